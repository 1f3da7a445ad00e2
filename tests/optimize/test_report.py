"""The table and the JSON document."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from ktransformers.operators.base import Placement
from ktransformers.optimize.machine import Machine
from ktransformers.optimize.plan import PlanEntry
from ktransformers.optimize.report import fold_entries, print_plan, to_json
from tests.support.engines.fake_operators import EXPERTS_RULE, FakeSource, meta_model, plan_with


def entry(key: str, nbytes: int = 8, rule: int | None = 1, kind: str = "F32") -> PlanEntry:
    return PlanEntry(key, "Linear", "Op", Placement(), "a", "b", rule, (kind,), {"cpu": nbytes})


def test_equal_layers_are_folded() -> None:
    entries = [entry(f"model.layers.{i}.mlp.up", rule=2 if i == 3 else 1) for i in (0, 1, 2, 3, 4, 6)]
    rows = fold_entries([entry("model.embed", rule=None), *entries, entry("lm_head")])
    assert [(row.label, row.count) for row in rows] == [
        ("model.embed", 1),
        ("model.layers.{0-2,4,6}.mlp.up", 5),
        ("model.layers.3.mlp.up", 1),
        ("lm_head", 1),
    ]


def test_only_the_layer_number_is_folded() -> None:
    rows = fold_entries([entry(f"layers.{i}.experts.{j}") for i in range(2) for j in range(2)])
    assert [row.label for row in rows] == ["layers.{0-1}.experts.0", "layers.{0-1}.experts.1"]


def test_types_and_bytes_do_not_split_a_row() -> None:
    """Files of the Q4_K_M mixture alternate types, and bytes with them."""
    mixed = [
        entry(f"layers.{i}.down", 300 if i % 4 == 0 else 200, kind="Q6_K" if i % 4 == 0 else "Q4_K") for i in range(8)
    ]
    (row,) = fold_entries(mixed)
    assert (row.label, row.shown_types) == ("layers.{0-7}.down", "Q4_K x 6, Q6_K x 2")
    assert row.shown_bytes == "1.76 KiB in 8"  # 1800
    (row,) = fold_entries([entry(f"layers.{i}.up", 2048) for i in range(8)])
    assert (row.shown_types, row.shown_bytes) == ("F32", "8 x 2.00 KiB")


def test_devices_split_a_row() -> None:
    on_gpu = replace(entry("layers.1.up"), nbytes={"cuda:0": 8}, placement=Placement("cuda:0", "cuda:0", "cuda:0"))
    assert [row.label for row in fold_entries([entry("layers.0.up"), on_gpu])] == ["layers.0.up", "layers.1.up"]


def table(**options: bool) -> str:
    model = meta_model("qwen3_moe", layers=3)
    out = io.StringIO()
    plan = plan_with(model, EXPERTS_RULE, extra_bytes={"kv cache": {"cpu": 1 << 20}})
    print_plan(plan, Console(file=out), **options)
    return out.getvalue()


def test_table() -> None:
    text = table()
    assert "qwen3_moe, rules <rules>" in text
    (line,) = [line for line in text.splitlines() if "mlp.experts" in line]
    assert line.split() == [
        "model.layers.{0-2}.mlp.experts", "FakeExperts", "cpu", "FakeExperts", "FakeExperts", "F32", "3", "x", "576.00",
        "KiB", "1",
    ]  # fmt: skip
    assert "act_fn" not in text
    (total,) = [line for line in text.splitlines() if line.lstrip().startswith("cpu ")]
    assert "1.00 MiB" in total
    assert "4.00 GiB" in total
    assert total.rstrip().endswith("fits")


def test_the_table_can_list_every_module() -> None:
    text = table(modules=True)
    assert all(f"model.layers.{i}.mlp.experts.act_fn" in text for i in range(3))
    assert "(root)" in text


def test_json() -> None:
    model = meta_model("llama", tie_word_embeddings=True)
    small = Machine(2000, 1000, {"cpu": 1000})
    rule = "- {match: {name: nowhere}, replace: {}}"
    plan = plan_with(model, rule, FakeSource(model), machine=small, extra_bytes={"kv cache": {"cpu": 7}})
    document = json.loads(json.dumps(to_json(plan)))
    assert len(document["entries"]) == len(list(model.modules()))
    assert document["total_bytes"]["cpu"] == document["weight_bytes"]["cpu"] + 7
    assert sum(e["bytes"].get("cpu", 0) for e in document["entries"]) == document["weight_bytes"]["cpu"]
    assert document["capacity_bytes"] == {"cpu": 1000}
    assert document["ram_bytes"] == 2000
    assert not document["fits"]
    assert "does not fit" in document["reason"]
    assert [rule["rule"] for rule in document["unmatched_rules"]] == [1]
    embedding = next(e for e in document["entries"] if e["key"] == "model.embed_tokens")
    assert embedding == {
        "key": "model.embed_tokens",
        "class": "Embedding",
        "operator": None,
        "generate_device": "cpu",
        "prefill_device": "cpu",
        "out_device": "cpu",
        "generate_op": "torch",
        "prefill_op": "torch",
        "quant_types": ["F32"],
        "bytes": {"cpu": 4 * 160 * 64},
        "stored_experts": 0,
        "rule": None,
        "rule_place": "",
        "note": "",
    }
