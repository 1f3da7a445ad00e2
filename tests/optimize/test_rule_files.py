"""The shipped rule files, and files as users of upstream have them, on tiny models of their families."""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ktransformers.engine.model.skeleton import build_skeleton
from ktransformers.errors import KTransformersError, RuleError
from ktransformers.models.registry import custom_models
from ktransformers.optimize.machine import Machine
from ktransformers.optimize.plan import Plan
from ktransformers.optimize.rules import Rules, load_rules
from ktransformers.system.shipped_rules import RULES_DIR, shipped_names, shipped_path
from tests.support.checks.products import product
from tests.support.engines.fake_operators import GIB, inlined_rules, meta_model, plan_with
from tests.support.models.attention_families import CASES as CASES_OF_ATTENTION
from tests.support.models.latent_models import BLOCK_VALUES, latent_values
from tests.support.models.recurrent_models import recurrent_values
from tests.support.models.tiny_models import DENSE_TYPES, MOE_TYPES

SHIPPED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "DeepSeek-V2-Chat.yaml": [("deepseek_v2", {"q_lora_rank": 64})],
    "DeepSeek-V2-Lite-Chat.yaml": [("deepseek_v2", {})],
    "DeepSeek-V3-Chat.yaml": [("deepseek_v3", {}), ("deepseek_v3", {"q_lora_rank": None})],
    "DeepSeek-V3-Chat-serve.yaml": [("deepseek_v3", {})],
    "Glm4MoeLite.yaml": [("glm4_moe_lite", latent_values("glm4_moe_lite"))],
    "DeepSeek-V32.yaml": [("deepseek_v32", latent_values("deepseek_v32"))],
    "MiniMaxM3.yaml": [("minimax_m3_vl_text", BLOCK_VALUES)],
    "GlmMoeDsa.yaml": [("glm_moe_dsa", latent_values("glm_moe_dsa"))],
    "AXK2.yaml": [],  # this and the next three: tests/models/test_families.py
    "HYV4.yaml": [],
    "Dots3Note.yaml": [],
    "JetMoe.yaml": [],
    "Glm5Next.yaml": [],  # these two: tests/models/attention/test_pooled_attention.py
    "Qwen4Exp.yaml": [],
    "KimiLinear.yaml": [("kimi_linear", recurrent_values("kimi_linear"))],
    "BailingHybrid.yaml": [("bailing_hybrid", recurrent_values("bailing_hybrid"))],
    "LongcatFlash.yaml": [("longcat_flash", latent_values("longcat_flash"))],
    "Mistral4.yaml": [],  # transformers does not choose its class: tests/models/attention/test_latent_families.py
    "Qwen2-57B-A14B-Instruct.yaml": [("qwen2_moe", {})],
    "Qwen2-serve.yaml": [("qwen2_moe", {})],
    "Qwen3Moe-ktransformers.yaml": [("qwen3_moe", {}), ("qwen3_moe", {"tie_word_embeddings": True})],
    "Qwen3Moe-serve.yaml": [("qwen3_moe", {})],
    "Mixtral.yaml": [("mixtral", {})],
    "Glm4Moe.yaml": [("glm4_moe", {})],
    "Dots1.yaml": [("dots1", {})],
    "Ernie4_5_Moe.yaml": [("ernie4_5_moe", {})],
    "Hunyuan-A13B.yaml": [("hunyuan_v1_moe", {})],
    "Llama4.yaml": [("llama4_text", CASES_OF_ATTENTION["llama4"][1] | {"no_rope_layers": None})],
    "default-latent-moe.yaml": [("deepseek_v3", {}), ("kimi_linear", recurrent_values("kimi_linear"))],
    "default-moe.yaml": [(model_type, {}) for model_type in MOE_TYPES],
    "default-dense.yaml": [(model_type, {}) for model_type in DENSE_TYPES],
    "DeepSeek-V4.yaml": [("deepseek_v4", {})],
    "DeepSeek-V41.yaml": [],  # transformers has no class: tests/models/test_deepseek_v41.py
}
CASES = [(file, model_type, values) for file, cases in SHIPPED.items() for model_type, values in cases]
ONE_GPU = Machine(8 * GIB, 4 * GIB, {"cpu": 4 * GIB, "cuda:0": 2 * GIB})


def test_every_shipped_file_is_tested() -> None:
    assert set(shipped_names()) == set(SHIPPED)
    assert len(shipped_names()) == len(SHIPPED)  # a name means one file, whichever folder it is in


def operators(plan: Plan) -> dict[str, str]:
    return {entry.key: entry.operator for entry in plan.entries if entry.operator is not None}


@pytest.mark.parametrize(("file", "model_type", "values"), CASES)
def test_shipped_rules_all_match(file: str, model_type: str, values: dict[str, Any]) -> None:
    plan = plan_with(meta_model(model_type, **values), load_rules(shipped_path(file)), strict=True)
    assert plan.unmatched == ()
    found = operators(plan)
    kept = [entry.key for entry in plan.entries if entry.is_kept and entry.nbytes and "self_attn" not in entry.key]
    # What stays as it is: correction biases of the block or of the router, and hyper-connections.
    assert [key for key in kept if not key.endswith((".mlp", ".moe_statics", "_hc", ".hc_head"))] == []
    assert found["lm_head"] == "KTransformersLinear"
    assert found["model.embed_tokens"] == "KEmbedding"
    assert found["model.norm"] == "KRMSNorm"
    if model_type != "kimi_linear":  # which rotates nothing
        assert found["model.rotary_emb"] == "KRotaryEmbedding"
    has_experts = [key for key, name in found.items() if name == "KTransformersExperts"]
    assert bool(has_experts) == ("dense" not in file)
    assert len([name for name in found.values() if name == "KRouter"]) == len(has_experts)


@pytest.mark.parametrize(("file", "model_type"), [("default-moe.yaml", "qwen3_next"), ("default-dense.yaml", "lfm2")])
def test_recurrent_layers_have_operators(file: str, model_type: str) -> None:
    kinds = ["full_attention", *["conv" if model_type == "lfm2" else "linear_attention"] * 3]
    config = CONFIG_MAPPING[model_type](hidden_size=64, vocab_size=32, num_hidden_layers=4, layer_types=kinds)
    plan = plan_with(build_skeleton(config), load_rules(shipped_path(file)), strict=True)
    blocks = [key for key, name in operators(plan).items() if name == "KMoEBlock"]
    assert blocks == [f"model.layers.{i}.mlp" for i in range(4)] * (model_type == "qwen3_next")
    kinds = [name for name in operators(plan).values() if name in ("KGatedDeltaNet", "KShortConv", "KAttention")]
    assert kinds.count("KAttention") == 1
    assert len(kinds) == 4


@product(strength=1, model_type=(*DENSE_TYPES, *MOE_TYPES), file=sorted(SHIPPED))
def test_any_family_with_any_file_is_planned_whole_or_refused(model_type: str, file: str) -> None:
    model = meta_model(model_type)
    with contextlib.suppress(KTransformersError):
        plan = plan_with(model, load_rules(shipped_path(file)))
        read = {name for entry in plan.entries for name in entry.stored_names}
        assert {name for name, _ in model.named_parameters() if ".experts." not in name} <= read
        assert {f"{name}.all" for name, _ in model.named_modules() if name.endswith(".experts")} <= read


@pytest.mark.parametrize(("file", "model_type", "values"), CASES[:9])
def test_shipped_rules_put_experts_on_the_cpu_and_the_rest_on_the_gpu(
    file: str, model_type: str, values: dict[str, Any]
) -> None:
    plan = plan_with(meta_model(model_type, **values), load_rules(shipped_path(file)), machine=ONE_GPU)
    for entry in plan.entries:
        if entry.operator in ("KTransformersExperts", "KEmbedding"):
            assert entry.placement.generate_device == "cpu"
        elif entry.operator is not None:
            assert entry.placement.generate_device == entry.placement.out_device == "cuda:0"
        if entry.operator == "KTransformersExperts":
            assert (entry.placement.prefill_device, entry.placement.out_device) == ("cuda:0", "cuda:0")


def test_named_families_get_their_attention_and_block() -> None:
    deepseek = operators(plan_with(meta_model("deepseek_v3"), load_rules(shipped_path("DeepSeek-V3-Chat.yaml"))))
    assert deepseek["model.layers.1.self_attn"] == "KMLAAttention"
    assert "model.layers.1.self_attn.kv_b_proj" not in deepseek
    assert deepseek["model.layers.1.mlp"] == "KMoEBlock"
    assert deepseek["model.layers.0.mlp"] == deepseek["model.layers.1.mlp.shared_experts"] == "KMLP"
    qwen = operators(plan_with(meta_model("qwen2_moe"), load_rules(shipped_path("Qwen2-serve.yaml"))))
    assert qwen["model.layers.1.self_attn"] == "KAttention"
    assert qwen["model.layers.1.mlp.shared_expert_gate"] == "KTransformersLinear"


# As users have them: written for upstream, names of both backends, for hardware that is not here.

MIXTRAL = r"""
- match:
    class: ktransformers.models.modeling_mixtral.MixtralRotaryEmbedding
  replace:
    class: ktransformers.operators.RoPE.RotaryEmbedding
    kwargs: {generate_device: "cuda", prefill_device: "cuda"}
- match:
    name: "^model\\.layers\\.(?!.*block_sparse_moe\\.gate).*$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs:
      generate_device: "cuda"
      prefill_device: "cuda"
      generate_op: "KLinearMarlin"
      prefill_op: "KLinearTorch"
- match:
    name: "^model\\.layers\\..*\\.block_sparse_moe$"
    class: ktransformers.models.modeling_mixtral.MixtralSparseMoeBlock
  replace:
    class: ktransformers.operators.experts.KMistralSparseMoEBlock
- match:
    name: "^model\\.layers\\..*\\.block_sparse_moe\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      prefill_device: "cuda"
      prefill_op: "KExpertsTorch"
      generate_device: "cpu"
      generate_op: "KExpertsCPU"
      out_device: "cuda"
  recursive: False
- match:
    name: "^model.embed_tokens"
  replace:
    class: "default"
    kwargs: {generate_device: "cpu", prefill_device: "cpu"}
- match:
    name: "^model\\.layers\\..*\\."
  replace:
    class: "default"
    kwargs: {generate_device: "cuda", prefill_device: "cuda"}
"""


def test_mixtral_with_its_older_names() -> None:
    plan = plan_with(meta_model("mixtral"), MIXTRAL, strict=True)
    found = operators(plan)
    assert found["model.layers.0.mlp"] == "KMoEBlock"
    assert found["model.layers.1.mlp.experts"] == "KTransformersExperts"
    assert found["model.layers.0.self_attn.q_proj"] == "KTransformersLinear"
    assert found["model.rotary_emb"] == "KRotaryEmbedding"
    gate = next(entry for entry in plan.entries if entry.key == "model.layers.0.mlp.gate")
    assert (gate.operator, gate.rule) == (None, 6)


def two_gpu_rules() -> str:
    """DeepSeek-V3 on two GPUs, split by layer number."""
    half = [("0", "cuda:0"), ("[1-9]|[1-6][0-9]", "cuda:1")]
    blocks = [
        rf"""
- match:
    name: "^model\\.layers\\.({layers})\\.(?!self_attn\\.kv_b_proj).*$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs: {{generate_device: "{gpu}", prefill_device: "{gpu}", generate_op: KLinearMarlin, prefill_op: KLinearTorch}}
- match:
    name: "^model\\.layers\\.({layers})\\.mlp$"
    class: ktransformers.models.modeling_deepseek_v3.DeepseekV3MoE
  replace:
    class: ktransformers.operators.experts.KDeepseekV3MoE
    kwargs: {{generate_device: "{gpu}", prefill_device: "{gpu}"}}
- match:
    name: "^model\\.layers\\.({layers})\\.mlp\\.gate$"
    class: ktransformers.models.modeling_deepseek_v3.MoEGate
  replace:
    class: ktransformers.operators.gate.KMoEGate
    kwargs: {{generate_device: "{gpu}", prefill_device: "{gpu}"}}
- match:
    name: "^model\\.layers\\.({layers})\\.mlp\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      prefill_device: "{gpu}"
      prefill_op: "KExpertsTorch"
      generate_device: "cpu"
      generate_op: "KExpertsCPU"
      out_device: "{gpu}"
  recursive: False
- match:
    name: "^model\\.layers\\.({layers})\\.self_attn$"
  replace:
    class: ktransformers.operators.attention.KDeepseekV2Attention
    kwargs: {{generate_device: "{gpu}", prefill_device: "{gpu}", absorb_for_prefill: False}}
"""
        for layers, gpu in half
    ]
    tail = r"""
- match:
    name: "^model$"
  replace:
    class: "ktransformers.operators.models.KDeepseekV2Model"
    kwargs:
      per_layer_prefill_intput_threshold: 0
      transfer_map:
        1: "cuda:1"
- match:
    name: "^model\\.layers\\.0\\."
  replace:
    class: "default"
    kwargs: {generate_device: "cuda:0", prefill_device: "cuda:0"}
- match:
    name: "(^model\\.layers\\.([1-9]|[1-6][0-9])\\.)|(model.norm)|(lm_head)"
  replace:
    class: "default"
    kwargs: {generate_device: "cuda:1", prefill_device: "cuda:1"}
"""
    return "".join(blocks) + tail


def test_two_gpus_by_layer_number() -> None:
    model = meta_model("deepseek_v3", first_k_dense_replace=0)
    machine = Machine(8 * GIB, 4 * GIB, {"cpu": 4 * GIB, "cuda:0": GIB, "cuda:1": GIB})
    plan = plan_with(model, two_gpu_rules(), machine=machine, strict=True)
    by_key = {entry.key: entry for entry in plan.entries}
    for i in (0, 1):
        for name in ("self_attn", "self_attn.o_proj", "mlp", "mlp.gate", "input_layernorm"):
            assert by_key[f"model.layers.{i}.{name}"].placement.generate_device == f"cuda:{i}"
        experts = by_key[f"model.layers.{i}.mlp.experts"].placement
        assert (experts.generate_device, experts.out_device) == ("cpu", f"cuda:{i}")
    assert by_key["lm_head"].placement.generate_device == "cuda:1"
    assert by_key["lm_head"].is_kept
    assert plan.operators["model"].transfer_map == {1: "cuda:1"}


def test_two_gpus_on_a_machine_without_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        plan = plan_with(meta_model("deepseek_v3", first_k_dense_replace=0), two_gpu_rules())
        plan.report_fallback()
    assert {entry.placement.generate_device for entry in plan.entries} == {"cpu"}
    assert len([r for r in caplog.records if "no CUDA device" in r.getMessage()]) == 1


QWEN3_SERVE = r"""
- match:
    class: ktransformers.models.modeling_qwen2_moe.Qwen2MoeRotaryEmbedding   # of another family: matches nothing
  replace:
    class: ktransformers.operators.RoPE.RotaryEmbedding
    kwargs: {generate_device: "cuda", prefill_device: "cuda"}
- match:
    name: "^lm_head$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs: {generate_device: "cuda", prefill_device: "cuda", generate_op: "VLinearMarlin", prefill_op: "KLinearTorch"}
- match:
    name: "^model\\.layers\\.(?!.*mlp\\.shared_expert_gate).*$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs: {generate_device: "cuda", prefill_device: "cuda", generate_op: "KLinearMarlin", prefill_op: "KLinearTorch"}
- match:
    name: "^model\\.layers\\..*\\.mlp$"
    class: ktransformers.models.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock
  replace:
    class: ktransformers.operators.experts.KQwen3MoeSparseMoeBlockV2
    kwargs: {generate_device: "cuda", prefill_device: "cuda"}
- match:
    name: "^model\\.layers\\..*\\.mlp\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExpertsV2
    kwargs:
      prefill_device: "cuda"
      prefill_op: None
      generate_device: "cpu"
      generate_op: "KExpertsCPU"
      out_device: "cuda"
      backend: "AMXInt8"
  recursive: False
- match:
    name: "^model\\.layers\\..*\\.self_attn$"
  replace:
    class: ktransformers.operators.balance_serve_attention.KQwen3MoeAttention
    kwargs: {generate_device: "cuda", prefill_device: "cuda"}
- match:
    name: "^model$"
  replace:
    class: "ktransformers.operators.models.KQwen3MoeModel"
    kwargs:
      per_layer_prefill_intput_threshold: 0
- match:
    name: "^model.embed_tokens"
  replace:
    class: "default"
    kwargs: {generate_device: "cpu", prefill_device: "cpu"}
- match:
    class: ktransformers.models.modeling_qwen3_moe.Qwen3MoeRMSNorm
  replace:
    class: ktransformers.operators.layernorm.KQwen3MoeRMSNorm
    kwargs: {generate_device: "cuda", prefill_device: "cuda"}
- match:
    class: ktransformers.models.modeling_qwen3_moe.Qwen3MoeMLP
  replace:
    class: ktransformers.operators.mlp.KQwen2MoeMLP
    kwargs: {generate_device: "cuda", prefill_device: "cuda"}
"""


def test_qwen3_serve_with_names_of_the_serving_backend() -> None:
    plan = plan_with(meta_model("qwen3_moe"), QWEN3_SERVE)
    assert [unmatched.rule for unmatched in plan.unmatched] == [1, 10]
    found = operators(plan)
    assert found["model"] == "KModel"
    assert found["model.layers.0.mlp"] == "KMoEBlock"
    assert found["model.layers.0.self_attn"] == "KAttention"
    assert found["model.layers.0.self_attn.q_norm"] == "KRMSNorm"
    with pytest.raises(RuleError, match="--strict"):
        plan_with(meta_model("qwen3_moe"), QWEN3_SERVE, strict=True)


def test_rule_file_of_another_family_plans_what_it_can() -> None:
    with pytest.raises(RuleError, match=r"KMLAAttention at model\.layers\.0\.self_attn"):
        plan_with(meta_model("qwen3_moe"), load_rules(shipped_path("DeepSeek-V3-Chat.yaml")))


PARTICULAR = [case for case in CASES if not case[0].startswith("default-")]


def what_runs(rules: Rules, model_type: str, values: dict[str, Any]) -> list[object]:
    """What a plan for one GPU makes of each module, whichever rules say it."""
    plan = plan_with(meta_model(model_type, **values), rules, machine=ONE_GPU)
    return [(entry.key, entry.operator, entry.placement, entry.generate_op, entry.prefill_op) for entry in plan.entries]


@pytest.mark.parametrize(("file", "model_type", "values"), PARTICULAR)
def test_shipped_files_say_only_what_is_particular(file: str, model_type: str, values: dict[str, Any]) -> None:
    """Without any one of its own rules a file of a family would come to something else."""
    rules = load_rules(shipped_path(file))
    whole = what_runs(rules, model_type, values)
    for rule in (rule for rule in rules.rules if rule.source.parent is None):
        try:
            without = what_runs(
                replace(rules, rules=tuple(one for one in rules.rules if one is not rule)), model_type, values
            )
        except KTransformersError:  # what is left cannot run the model
            continue
        assert without != whole, rule.place


@pytest.mark.parametrize(
    ("serve", "file", "model_type"),
    [
        ("DeepSeek-V3-Chat-serve.yaml", "DeepSeek-V3-Chat.yaml", "deepseek_v3"),
        ("Qwen2-serve.yaml", "Qwen2-57B-A14B-Instruct.yaml", "qwen2_moe"),
        ("Qwen3Moe-serve.yaml", "Qwen3Moe-ktransformers.yaml", "qwen3_moe"),
    ],
)
def test_files_for_serving_are_other_names(serve: str, file: str, model_type: str) -> None:
    plans = [what_runs(load_rules(shipped_path(name)), model_type, {}) for name in (serve, file)]
    assert plans[0] == plans[1]


def test_both_names_of_a_linear_on_a_gpu_mean_one_kernel() -> None:
    """So that files for serving are none but other names."""
    text = inlined_rules("Qwen3Moe-ktransformers.yaml")
    plans = [
        plan_with(meta_model("qwen3_moe"), text.replace("KLinearMarlin", name), machine=ONE_GPU)
        for name in ("KLinearMarlin", "VLinearMarlin")
    ]
    ops = [[(entry.key, entry.generate_op, entry.prefill_op) for entry in plan.entries] for plan in plans]
    assert ops[0] == ops[1]


def table_of_the_documentation() -> dict[str, tuple[str, str]]:
    """{file: (model types, its rules)} of docs/rules.md."""
    page = Path(__file__).parents[2] / "docs" / "rules.md"
    section = page.read_text(encoding="utf-8").partition("## Shipped files")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines() if "`" in line]
    found = {file.strip("`"): (types, rules) for types, file, rules in (row for row in rows if len(row) == 3)}
    assert len(found) == len([row for row in rows if len(row) == 3])
    return found


def test_the_documentation_has_every_file() -> None:
    table = table_of_the_documentation()
    assert table.keys() == set(SHIPPED)
    chosen = {
        name: {
            model_type
            for model_type, family in custom_models.items()
            if name in (family.rules, family.rules_without_q_lora)
        }
        for name in SHIPPED
    }
    for name, (types, _) in table.items():
        listed = {known for known in re.findall(r"`(\w+)`", types) if known in custom_models}
        assert listed == chosen[name], name


def test_the_documentation_says_what_files_include() -> None:
    for name, (_, rules) in table_of_the_documentation().items():
        included = re.findall(r"^- include: (\S+)$", shipped_path(name).read_text(), re.MULTILINE)
        if not name.startswith("default-"):
            assert re.findall(r"`([\w.-]+\.yaml)`", rules) == included, name


def test_shipped_files_say_what_they_are_for() -> None:
    for path in RULES_DIR.rglob("*.yaml"):
        assert path.read_text().startswith("# "), path.name
