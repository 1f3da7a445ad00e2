"""The figures in README.md are those of benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.readme import (
    CHOSEN,
    KERNELS,
    PAGE,
    PICTURE,
    RESULTS,
    WHOLE_PAGE,
    chosen,
    kernels_text,
    page_with,
    renewed,
    run_of,
    runs_in,
    table,
    whole_table,
)
from benchmarks.roofline.draw import draw_recorded


def offline(decode: float, weights: dict[str, int], **settings: str) -> str:
    record = {
        "machine": {
            "cpu": "Intel(R) Xeon(R) Processor",
            "cores": 16,
            "threads": 15,
            "isa": "avx512_vnni",
            "gpus": 2 * [{"name": "NVIDIA H200"}],
            "read_bandwidth_gb_s": 151.6,
        },
        "model": {"weight_bytes": weights},
        "settings": settings,
        "memory": {"vram_peak_gb": 4.26},
        "rows": [
            {"phase": "prefill", "tokens": 2048, "tokens_per_s": 12345.6, "llama.cpp": 1000.4},
            {"phase": "decode", "tokens": 1, "tokens_per_s": decode},
            {"phase": "decode", "tokens": 2, "tokens_per_s": 0.0},
        ],
    }
    return json.dumps(record)


def test_readme_has_the_figures_of_the_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert renewed(page) == page, "README.md is older than benchmarks/results; run `make readme`"


def test_the_whole_table_has_every_model_that_was_measured() -> None:
    page = WHOLE_PAGE.read_text(encoding="utf-8")
    assert whole_table(page) == page, "docs/benchmarks.md is older than benchmarks/results; run `make readme`"
    files = [*RESULTS.glob("offline-*.jsonl"), *RESULTS.glob("model-*.jsonl")]
    assert page.count(" GB/s |") == len(files) > len(CHOSEN)


def test_the_readme_shows_a_few_of_them() -> None:
    runs = runs_in(RESULTS)
    assert 5 <= len(chosen(runs)) <= 8
    assert [run.file for run in chosen(runs)] == [run.file for run in runs if run.file in CHOSEN]
    kept = [run for run in runs if run.file != CHOSEN[0]]
    with pytest.raises(ValueError, match=f"no results for {CHOSEN[0]}: measure it"):
        chosen(kept)


def test_the_picture_is_of_the_results(tmp_path: Path) -> None:
    draw_recorded([RESULTS / f"{KERNELS}.jsonl"], tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == PICTURE.read_text(), "run `make readme`"


def test_the_newest_run_of_a_file_is_a_row(tmp_path: Path) -> None:
    """The last line; a GPU that holds no weights is not named."""
    gpu, cpu = {"cpu": 75, "cuda:0": 20, "cuda:1": 5}, {"cpu": 100}
    lines = [offline(1.0, cpu), offline(98.5, gpu, routing="skewed", hot_experts="auto")]
    (tmp_path / "offline-gpt-oss-20b-24layers-2gb-h200.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "offline-qwen3-30b-6layers-cpu-h200.jsonl").write_text(offline(7.0, cpu))
    rows = table(runs_in(tmp_path)).splitlines()[2:]
    assert rows == [
        "| 16 Xeon cores (avx512), 152 GB/s | Qwen3-30B-A3B, 6 of 48 layers | none | - | 12,346 (1,000) | 7 | - | - |",
        "| 2 x H200, 16 Xeon cores (avx512), 152 GB/s | gpt-oss-20b, skewed routing, hot experts | 4.3 GB "
        "(25% of the weights) | - | 12,346 (1,000) | 98 | - | - |",
    ]


def test_a_row_of_a_whole_gguf(tmp_path: Path) -> None:
    rows = [{"phase": "decode", "size": 4, "tokens_s": 140.0, "peer_tokens_s": {"llama.cpp": 67.0}}]
    machine = {"cpu": "AMD EPYC", "threads": 2, "isa": "avx2", "read_bandwidth_gb_s": 31.7}
    path = tmp_path / "model-qwen3.6-35b-8layers-epyc.jsonl"
    path.write_text(json.dumps({"machine": machine, "rows": rows}))
    (row,) = table(runs_in(tmp_path)).splitlines()[2:]
    want = "| 2 EPYC cores (avx2), 32 GB/s | Qwen3.6-35B-A3B, 8 of 40 layers | none | - | - | - | 140 (67) | - |"
    assert row == want


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("offline-h200.jsonl", "call it KIND-MODEL-Nlayers-PLACE"),
        ("model-llama-2layers-x.jsonl", "add llama, its name"),
    ],
)
def test_a_file_that_says_too_little_is_named(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        run_of(tmp_path / name)


def test_kernels_beside_another_program() -> None:
    rows = [
        {
            "type": "q4_k_m",
            "tokens": tokens,
            "us": 100.0,
            "peer_us": {"kt-kernel": same},
            "peer_format": "amx_int4",
            "peer_format_us": own,
        }
        for tokens, same, own in ((1, 200.0, 400.0), (64, 125.0, 250.0), (256, 1.0, 1.0), (1024, 50.0, 1000.0))
    ]
    rows.append(rows[0] | {"type": "q8_0", "us": 1.0})
    shape = {"experts": 4, "hidden": 256, "width": 512}
    text = kernels_text({"shape": shape, "rows": rows}).replace("\n", " ")
    assert "4 experts of 256 x 512 in Q4_K_M takes 0.50 to 0.80 times" in text
    assert text.endswith(" 2.00 times; 0.25 to 0.40, and 0.10 times what it needs in its own amx_int4.")
    with pytest.raises(ValueError, match=r"lacks kt-kernel's figures: python -m benchmarks\.kernels --types"):
        kernels_text({"shape": shape, "rows": [rows[0] | {"peer_us": {}}]})


def test_only_what_is_between_marks_changes() -> None:
    page = "a\n<!-- x: written by `make readme` -->\nold\n<!-- end of x -->\nb\n"
    assert page_with({"x": "new"}, page) == page.replace("old", "new")
    with pytest.raises(ValueError, match="no marks of y"):
        page_with({"y": "new"}, page)
