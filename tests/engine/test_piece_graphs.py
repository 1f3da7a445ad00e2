"""Prompts whose experts are streamed, or computed by a CPU that is waited for, replayed between the experts: the same
as padded steps that are not, with as many launches a layer whatever the model.

The GPU is made up, computes in fp32 and has tapes for graphs (tests/support/taped_graphs.py). The interpreter takes
long for many rows, so steps have up to 20 of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine import prefill as prefill_module
from ktransformers.engine import step_sizes
from ktransformers.engine.builder import Engine, Hardware, build_engine, build_paged_engine
from ktransformers.engine.decode_inputs import DecodeInputs, InputMemory, StaticInputs, StepSize
from ktransformers.engine.piece_graphs import PieceGraphs
from ktransformers.engine.step_runtime import StepRuntime
from ktransformers.kernels.cpu import MoeKernel
from ktransformers.models.registry import RULES_DIR
from ktransformers.operators import device as device_module
from ktransformers.operators.device import Device
from ktransformers.operators.experts import routed
from ktransformers.operators.experts.split import CpuRate, PrefillRates
from ktransformers.operators.experts.streamed import ExpertPrefill
from ktransformers.scheduler.records import StepPlan, counts_in
from tests.support.agreement import prompt
from tests.support.fake_gpus import FakeGraphs, fake_hardware
from tests.support.gpu_engines import Gpu, sequence_start, step_row
from tests.support.launches import counted_launches
from tests.support.taped_graphs import TapedGraphs
from tests.support.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

FLAT = CpuRate((1,), (1e-3,))
RATES = PrefillRates(1e-3, 0.0, FLAT, FLAT)  # some experts are copied, the others stay
# Ids to the host, what was chosen to the GPU, ranks of the ids; pairs are counted and placed, rows go to fp16; two
# groups of experts, one of them copied ahead; their sum, and where the next piece finds it.
OF_EXPERTS = {
    "torch copy_": 3,
    "torch index_select": 1,
    "_count_kernel": 1,
    "_place_kernel": 1,
    "torch to": 1,
    "_gate_up_tile": 2,
    "_down_tile": 2,
    "_sum_kernel": 1,
}
THRESHOLD, ROWS, PAGE = 8, 20, 16


@pytest.fixture(autouse=True)
def _given_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrate(prefill: ExpertPrefill, kernel: MoeKernel, expert_nbytes: int, file: object) -> None:
        prefill.rates, prefill.threshold = RATES, max(THRESHOLD, prefill.least_rows)

    monkeypatch.setattr(prefill_module, "calibrate", calibrate)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a shared expert, so that a layer has two seams."""
    path = tmp_path_factory.mktemp("model")
    write_safetensors(tiny_model("qwen2_moe", seed=3, layers=1), path)
    return path


def config_of(path: Path, **settings: object) -> EngineConfig:
    values = {"cache_lens": 96, "chunk_size": ROWS, "cpu_infer": 1, "cpu_quant": "q8_0", "self_check": False}
    rules = RULES_DIR / "default-moe.yaml"  # as a file of the user's, so that experts stay on the CPU
    return EngineConfig(model_path=path, optimize_config_path=rules, **{**values, **settings})  # type: ignore[arg-type]


def hardware_of(graphs: FakeGraphs, gpu: Gpu | None = None, rows: tuple[int, ...] = (ROWS,)) -> Hardware:
    return (gpu or Gpu()).hardware(graphs=graphs, graph_rows=rows)  # type: ignore[arg-type]


def chunks(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Logits of a prompt in chunks of up to ROWS tokens, of the last token of each."""
    parts = [(start, ids[start : start + ROWS]) for start in range(0, len(ids), ROWS)]
    return torch.cat([engine.runner.forward(part, start, [len(part) - 1]).clone() for start, part in parts])


def test_chunks_of_a_prompt_are_replayed(model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last chunk has fewer rows than the graphs."""
    ids, graphs, gpu = (prompt(100) * 2)[:33], TapedGraphs(), Gpu()
    with caplog.at_level(logging.INFO):
        engine = build_engine(config_of(model_path), hardware=hardware_of(graphs, gpu))
    assert "steps of more than 0 rows are replayed between the experts: the host chooses" in caplog.text
    assert "captured steps of 20 rows in 3 CUDA graphs in" in caplog.text
    copied = gpu.copies.num_copies
    got = chunks(engine, ids)
    (tapes,) = graphs.pieces
    assert [tape.replays for tape in tapes] == [2] * 3
    assert gpu.copies.num_copies > copied
    engine.close()
    engine = build_engine(config_of(model_path, use_cuda_graph=False), hardware=hardware_of(graphs))
    assert torch.equal(got, chunks(engine, ids))
    assert len(graphs.pieces) == 1
    engine.close()


def test_steps_that_are_timed_do_not_run_in_pieces(model_path: Path) -> None:
    """While a profile is written; afterwards they do again."""
    ids, graphs = prompt(100)[:12], TapedGraphs()
    engine = build_engine(config_of(model_path), hardware=hardware_of(graphs))
    (tapes,) = graphs.pieces
    runtime = StepRuntime(engine.runner)
    want = engine.runner.forward(ids, 0, [11]).clone()
    assert [tape.replays for tape in tapes] == [1] * 3
    runtime.start()
    runtime.begin_step(1, len(ids), [11])
    got = engine.runner.forward(ids, 0, [11]).clone()
    latest = runtime.end_step()
    assert latest is not None
    assert got.argmax() == want.argmax()
    assert [tape.replays for tape in tapes] == [1] * 3
    runtime.stop()
    assert torch.equal(engine.runner.forward(ids, 0, [11]), want)
    assert [tape.replays for tape in tapes] == [2] * 3
    engine.close()


Told = tuple[list[list[int | None]], list[tuple[int, int, int]], list[list[tuple[int, int, int]]]]


def told_of(path: Path, graphs: FakeGraphs, rows: tuple[int, ...], **settings: object) -> Told:
    """Tokens, counts of experts and rows of each, by step: a prompt; its next token beside the prompt of another
    sequence whose first page is the first one's; both of their next tokens."""
    hardware = hardware_of(graphs, rows=rows)
    paged = build_paged_engine(config_of(path, **settings), page_size=PAGE, max_batch_size=2, hardware=hardware)
    first = sequence_start(0, [5 * at % 90 for at in range(18)])
    second = sequence_start(1, [*first.token_ids[:PAGE], 7, 11, 13, 2, 3, 5, 1, 8])
    plans = [
        ([first], [step_row(0, first.token_ids, 0, [0, 1])]),
        ([second], [step_row(0, [4], 18, [0, 1]), step_row(1, second.token_ids[PAGE:], PAGE, [0, 2])]),
        ([], [step_row(0, [9], 19, [0, 1]), step_row(1, [6], 24, [0, 2])]),
    ]
    results = [
        paged.executor.execute(StepPlan(step_id=i, ended=[], starts=starts, rows=of_step))
        for i, (starts, of_step) in enumerate(plans, 1)
    ]
    paged.close()
    tokens = [[one.token_id for one in result.results] for result in results]
    return tokens, [result.experts for result in results], [sorted(counts_in(r.expert_counts)) for r in results]


def test_prefix_hits_beside_decoding_sequences(model_path: Path) -> None:
    """Tokens and counts of experts are those of steps without graphs, and of steps without padding."""
    graphs = TapedGraphs()
    told = told_of(model_path, graphs, (ROWS,))
    (tapes,) = graphs.pieces
    assert [tape.replays for tape in tapes] == [2] * 3
    assert told == told_of(model_path, FakeGraphs(), (ROWS,), use_cuda_graph=False)
    assert told == told_of(model_path, FakeGraphs(), ())
    top_k = 2
    assert [sum(rows for _, _, rows in counts) for counts in told[2]] == [18 * top_k, 9 * top_k, 2 * top_k]


def test_experts_that_the_host_waits_for(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts that are not streamed, of more rows than the stream hands over."""
    for module in (device_module, routed, step_sizes):
        monkeypatch.setattr(module, "STREAM_ROWS", 8)
    ids, graphs = prompt(100)[:14], TapedGraphs()
    engine = build_engine(config_of(model_path), hardware=fake_hardware(graphs=graphs, graph_rows=(ROWS,)))
    got = engine.runner.forward(ids, 0, [13]).clone()
    (tapes,) = graphs.pieces
    assert [tape.replays for tape in tapes] == [1] * 3
    engine.close()
    with caplog.at_level(logging.INFO):
        hardware = fake_hardware(graphs=graphs, graph_rows=(ROWS,))
        engine = build_engine(config_of(model_path, use_cuda_graph=False), hardware=hardware)
    assert torch.equal(got, engine.runner.forward(ids, 0, [13]))
    assert "are replayed between the experts: the host waits for the CPU's experts of more than 8 rows" in caplog.text
    engine.close()


def test_a_capture_without_memory_leaves_steps_as_they_are(model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids, graphs = (prompt(100) * 2)[:33], TapedGraphs(fails_in=2)
    with caplog.at_level(logging.WARNING):
        engine = build_engine(config_of(model_path), hardware=hardware_of(graphs))
        got = chunks(engine, ids)
    lines = [message for message in caplog.messages if "replayed" in message]
    assert lines == ["further steps are not replayed in pieces, from 20 rows: CUDA out of memory"]
    assert graphs.pieces == []
    engine.close()
    engine = build_engine(config_of(model_path), hardware=hardware_of(TapedGraphs()))
    assert torch.equal(got, chunks(engine, ids))
    engine.close()


def launches_of_a_step(model_type: str, layers: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of a prompt: graphs, kernels and operations of torch that Python launches."""
    folder.mkdir()
    write_safetensors(tiny_model(model_type, seed=1, layers=layers), folder)
    graphs = TapedGraphs()
    engine = build_engine(config_of(folder), hardware=hardware_of(graphs))
    with counted_launches(monkeypatch) as counts:
        engine.runner.forward(prompt(100)[:12], 0, [11])
    (tapes,) = graphs.pieces
    counts["graph"] = sum(tape.replays for tape in tapes)
    engine.close()
    return counts


@pytest.mark.parametrize(("model_type", "seams"), [("qwen2_moe", 2), ("qwen3_moe", 1)])
def test_launches_for_a_layer(model_type: str, seams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left beside the graphs is the host's part: nothing of attention, norms, routers and shared experts.

    All experts are copied: more groups of them add two products each.
    """
    slow = CpuRate((1,), (100.0,))

    def calibrate(prefill: ExpertPrefill, *rest: object) -> None:
        prefill.rates, prefill.threshold = PrefillRates(1e-3, 0.0, slow, slow), THRESHOLD

    monkeypatch.setattr(prefill_module, "calibrate", calibrate)
    fewer = launches_of_a_step(model_type, 1, tmp_path / "fewer", monkeypatch)
    more = launches_of_a_step(model_type, 2, tmp_path / "more", monkeypatch)
    assert dict(more - fewer) == {"graph": seams, **OF_EXPERTS}


def inputs_of(rows: int) -> DecodeInputs:
    numbers = torch.zeros(rows, dtype=torch.int64)
    hidden = torch.arange(1.0, rows + 1, dtype=torch.float64)[:, None]
    table = torch.zeros(1, 1, dtype=torch.int32)
    return DecodeInputs(hidden, numbers, numbers, numbers.int(), numbers.int(), table, keep=torch.arange(1))


def test_sizes_are_captured_when_they_are_used_again() -> None:
    """The largest one at once; those that are used most are kept. Between two pieces the host doubles the rows."""
    where = Device("cuda:0", torch.device("cpu"), torch.float64, True)
    graphs, memory, seen = TapedGraphs(), InputMemory(torch.device("cpu")), list[int]()

    def run(inputs: DecodeInputs) -> torch.Tensor:
        seams = where.seams
        assert seams is not None
        hidden, room = inputs.hidden_states + 1, torch.zeros(inputs.num_rows, 1)
        rows = seams.room(hidden, room, room)
        rows.fill(hidden, room, room)

        def double() -> None:
            seen.append(seams.num_rows)
            slots = where.slots_of(seams.num_rows)
            assert slots is not None
            rows.result[: seams.num_rows].copy_(2 * rows.inputs(seams.num_rows)[0])

        seams.cut(double)
        return rows.result[: inputs.num_rows].clone()

    sizes = [StepSize(rows, 1) for rows in (8, 16, 32)]
    pieces = PieceGraphs(
        run, sizes, lambda size: StaticInputs(size, 1, memory, 1, torch.float64), graphs, where, most_kept=2
    )
    steps = [(5, [32]), (14, [32]), (7, [32, 8]), (32, [32, 8]), (16, [32, 8]), (9, [32, 8])]
    steps += [(12, [32, 8, 16]), (8, [32, 8, 16]), (1, [32, 8, 16])]  # 16 is used twice as often as 8, takes its place
    for rows, want in steps:
        assert pieces.step(inputs_of(rows)).tolist() == [[4.0]]
        assert graphs.captured == want
    assert seen == [rows for rows, _ in steps]
    assert graphs.replays == 3
    assert pieces.size_of(33, 1, 1, 1) is None
    assert pieces.size_of(3, 2, 1, 1) is None


@pytest.mark.parametrize(
    ("rows", "most", "want"),
    [
        ((), 4096, ()),
        ((16, 64), 48, (16, 48)),
        ((256, 512, 1024), 1100, (256, 512, 640, 768, 896, 1024, 1100)),
        ((256,), 2100, (256, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2100)),
    ],
)
def test_rows_of_pieces(rows: tuple[int, ...], most: int, want: tuple[int, ...]) -> None:
    assert step_sizes.piece_rows(rows, most) == want
