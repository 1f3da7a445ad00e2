"""Decode graphs over fakes: sizes, padding, what is left out when capture fails, experts beside the graph."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace

import pytest
import torch

from ktransformers.engine.step.cuda_graph_runner import CUDAGraphRunner
from ktransformers.engine.step.decode_inputs import (
    DecodeInputs,
    StaticInputs,
    StepSize,
    decode_batch_sizes,
    draft_sizes,
    mixed_sizes,
)
from ktransformers.engine.step.graph_sizes import DRAFT_ROWS
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts, EnqueueMethod, StreamShape
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, RawTensor
from tests.support.engines.fake_stream import FakeDriver

VOCAB, PAGES, PAGE = 16, 6, 4
CPU = torch.device("cpu")


class FakeGraph:
    def __init__(self, work, result):
        self.work, self.result, self.replays = work, result, 0

    def replay(self):
        self.replays += 1
        self.result.copy_(self.work())


class FakeBackend:
    """Replays by running the work again into the same tensor. `fails_below`: smaller batches cannot be captured."""

    def __init__(self, fails_below=0):
        self.fails_below, self.graphs, self.events = fails_below, {}, []

    def warm_up(self, work):
        self.events.append("warm")
        work()

    def capture(self, work):
        result = work().clone()
        if len(result) < self.fails_below:
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nwith a hint")
            except RuntimeError:
                raise RuntimeError("the capture is broken") from None
        self.graphs[len(result)] = FakeGraph(work, result)
        return self.graphs[len(result)], result

    def wait(self):
        self.events.append("wait")

    def launch(self, graph, send, *, is_held=False):
        assert not is_held or self.can_hold
        self.events.append("held" if is_held else "launched")
        self.held = (graph, send)
        if not is_held:
            self.release()

    can_hold = False

    def release(self):
        graph, send = self.held
        send()
        graph.replay()


class FakeWork:
    """Two pieces per run."""

    def __init__(self):
        self.count, self.count_expected, self.expected = 0, 0, []

    def captured(self):
        count, self.count = self.count, 0
        return count

    def expect(self, count):
        self.count_expected += count

    def set_rows(self, num_tokens):
        self.expected.append((self.count_expected, num_tokens))
        self.count_expected = 0


def tokens_of(inputs):
    """A "hidden state" of these tests is the token's number."""
    return inputs.hidden_states[:, 0].long().tolist()


class CachedModel:
    """Writes tokens to slots; the logits of a row are counts of the tokens that it attends to. Notes batch sizes."""

    def __init__(self, work=None):
        self.cache = torch.zeros(PAGES * PAGE, dtype=torch.int64)
        self.work, self.sizes = work, []

    def __call__(self, inputs):
        self.sizes.append(inputs.num_rows)
        if self.work is not None:
            self.work.count += 2
        for token, slot in zip(tokens_of(inputs), inputs.slot_mapping.tolist(), strict=True):
            if slot >= 0:
                self.cache[slot] = token
        logits = torch.zeros(inputs.num_rows, VOCAB)
        for row, (seq, length) in enumerate(zip(inputs.seq_ids.tolist(), inputs.kv_lens.tolist(), strict=True)):
            for position in range(length):
                slot = int(inputs.block_table[seq, position // PAGE]) * PAGE + position % PAGE
                logits[row, self.cache[slot]] += 1
        assert not logits[inputs.slot_mapping < 0].any()  # a padded row sees nothing
        return logits


def make_graphs(model, sizes=(1, 2, 4), backend=None, **options):
    backend = backend or FakeBackend()
    return CUDAGraphRunner(
        model, sizes, lambda size: StaticInputs(size, 3, CPU, 1, torch.float64), backend, **options
    ), backend


def decode_inputs(sequences, tables):
    """The last token of each sequence, decoded: its page table is tables[i]."""
    ends = torch.tensor([len(sequence) - 1 for sequence in sequences])
    rows = torch.arange(len(sequences), dtype=torch.int32)
    table = torch.tensor(tables, dtype=torch.int32)
    slots = table[rows.long(), ends // PAGE].long() * PAGE + ends % PAGE
    tokens = torch.tensor([[sequence[-1]] for sequence in sequences], dtype=torch.float64)
    return DecodeInputs(tokens, ends, slots, rows, (ends + 1).int(), table)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_batch_sizes(most, sizes):
    assert decode_batch_sizes(most) == sizes


def test_batch_sizes_must_be_positive():
    for sizes in ((), (0, 1)):
        with pytest.raises(ValueError, match="batch sizes must be"):
            make_graphs(CachedModel(), sizes)


@pytest.mark.parametrize("sizes", [(1, 2, 4), (4,), (1, 3)])
def test_sequences_come_out_as_counted_by_hand(sizes):
    graphs, backend = make_graphs(CachedModel(), sizes)
    tables, sequences = [[0, 3, 5], [4, 1, 0], [2, 0, 0]], [[], [], []]
    for step in range(12):
        alive = [s for s in range(3) if step < (12, 8, 4)[s]]
        for s in alive:
            sequences[s].append((5 * step + 3 * s) % VOCAB)
        logits = graphs.forward(decode_inputs([sequences[s] for s in alive], [tables[s] for s in alive]))
        want = torch.stack([torch.bincount(torch.tensor(sequences[s]), minlength=VOCAB) for s in alive])
        assert torch.equal(logits, want.float())
    assert sum(graph.replays for graph in backend.graphs.values()) == 12
    assert backend.events[-24:] == ["wait", "launched"] * 12


def test_steps_that_are_launched_before_their_tokens_are_known():
    """Each behind the one before it; what it reads is written before it is released, not before that one is over."""
    work = FakeWork()
    model = CachedModel(work)
    graphs, backend = make_graphs(model, (1, 2), works=lambda: [work])
    table, sequences = [[0, 3, 5], [4, 1, 2]], [[7], [11]]
    assert not graphs.launch_held(decode_inputs(sequences, table))  # this backend holds nothing
    backend.can_hold = True
    logits = graphs.forward(decode_inputs(sequences, table))
    for step in range(8):
        for s in range(2):
            sequences[s].append((3 * step + 5 * s) % VOCAB)
        inputs = decode_inputs(sequences, table)
        unknown = replace(inputs, hidden_states=torch.empty(2, 1, device="meta"))
        before = logits.clone()
        assert graphs.launch_held(unknown)
        assert torch.equal(logits, before)
        assert work.expected == [(2, 2)] * (1 + step)
        logits = graphs.release(torch.zeros(2, dtype=torch.int64), lambda ids, at=inputs: at.hidden_states)
        want = torch.stack([torch.bincount(torch.tensor(one), minlength=VOCAB) for one in sequences])
        assert torch.equal(logits, want.float())
    assert backend.events[-8:] == ["held"] * 8
    assert work.expected == [(2, 2)] * 9


def test_the_smallest_that_fits_is_replayed():
    work = FakeWork()
    model = CachedModel(work)
    progress = []
    graphs, backend = make_graphs(
        model, works=lambda: [work], progress=lambda done, total: progress.append((done, total))
    )
    assert model.sizes == [4, 4, 2, 2, 1, 1]  # each once to warm up and once captured, the largest first
    assert graphs.batch_sizes == (1, 2, 4)
    assert progress == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert graphs.reason is None
    for rows, size in ((1, 1), (2, 2), (3, 4), (4, 4)):
        before = backend.graphs[size].replays
        assert graphs.forward(decode_inputs([[7]] * rows, [[s, 0, 0] for s in range(rows)])).shape == (rows, VOCAB)
        assert backend.graphs[size].replays == before + 1
        assert work.expected.pop() == (2, rows)
    # A page table that is wider than the graphs', and a batch that is larger, run as they are.
    for rows, pages in ((1, 4), (5, 3)):
        model.sizes.clear()
        assert graphs.forward(decode_inputs([[7]] * rows, [[s, 0, 0, 0][:pages] for s in range(rows)])).shape[0] == rows
        assert model.sizes == [rows]
        assert not work.expected


@pytest.mark.parametrize(("fails_below", "left"), [(9, ()), (2, (2, 4))])
def test_what_cannot_be_captured_runs_without(fails_below, left, caplog):
    with caplog.at_level(logging.INFO):
        graphs, backend = make_graphs(CachedModel(), backend=FakeBackend(fails_below))
    assert graphs.batch_sizes == left
    size = 1 if left else 4
    assert graphs.reason == f"batch size {size}: operation not permitted when stream is capturing"
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "operation not permitted" in caplog.text
    logits = graphs.forward(decode_inputs([[3]], [[1, 0, 0]]))
    assert torch.equal(logits, torch.eye(VOCAB)[3:4])
    assert bool(left) == any(graph.replays for graph in backend.graphs.values())


MIXED = (StepSize(8, 2), StepSize(16, 3))


def mixed_inputs(sequences, starts, keep):
    """Rows of all tokens from `starts` on: sequence i has pages i, i + 3."""
    lens = [len(sequence) - start for sequence, start in zip(sequences, starts, strict=True)]
    seq_ids = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lens, strict=True)])
    table = torch.tensor([[i, i + 3] for i in range(len(lens))], dtype=torch.int32)
    slots = table[seq_ids, positions // PAGE].long() * PAGE + positions % PAGE
    tokens = [token for sequence, start in zip(sequences, starts, strict=True) for token in sequence[start:]]
    hidden = torch.tensor(tokens, dtype=torch.float64)[:, None]
    lengths = (positions + 1).int()
    return DecodeInputs(hidden, positions, slots, seq_ids.int(), lengths, table, keep=torch.tensor(keep))


class KeptModel(CachedModel):
    def __call__(self, inputs):
        return super().__call__(inputs)[inputs.keep]


def test_rows_of_prompts_beside_decoded_ones():
    """Two sequences in eight rows: one decodes, the other reads its prompt. Logits of the last rows of both alone."""
    model, work = KeptModel(work := FakeWork()), work
    graphs, backend = make_graphs(model, works=lambda: [work], mixed=MIXED)
    assert model.sizes[::2] == [16, 8, 4, 2, 1]
    assert (graphs.batch_sizes, graphs.mixed_sizes) == ((1, 2, 4), MIXED)
    first, second = [3, 3, 5, 7, 9], [1, 2, 3, 1, 2, 1]
    graphs.forward(mixed_inputs([first[:4]], [0], [3]))
    assert work.expected.pop() == (2, 4)
    replays = backend.graphs[2].replays
    got = graphs.forward(mixed_inputs([first, second], [4, 0], [0, 6]))
    want = [torch.bincount(torch.tensor(sequence), minlength=VOCAB) for sequence in (first, second)]
    assert torch.equal(got, torch.stack(want).float())
    assert work.expected == [(2, 7)]
    assert backend.graphs[2].replays == replays + 1 or backend.graphs[3].replays == 0


@pytest.mark.parametrize(
    ("rows", "kept", "seqs", "size"),
    [
        (3, 3, 3, StepSize(4, 4)),
        (4, 1, 1, StepSize(4, 4)),  # few rows: attention takes them alike
        (5, 1, 1, StepSize(8, 2)),
        (8, 3, 3, StepSize(16, 3)),  # more sequences
        (8, 3, 2, StepSize(16, 3)),  # more rows that are scored
        (16, 4, 3, None),
        (17, 1, 1, None),
    ],
)
def test_the_size_that_suits_a_step(rows, kept, seqs, size):
    assert make_graphs(KeptModel(), mixed=MIXED)[0].size_of(rows, kept, seqs, 3) == size
    assert make_graphs(KeptModel(), mixed=MIXED)[0].size_of(rows, kept, seqs, 4) is None


def test_graphs_are_freed_at_once():
    """Without a collection of reference cycles: what they captured is memory of a GPU."""
    graphs = CUDAGraphRunner(KeptModel(), (1, 4), lambda size: StaticInputs(size, 3, CPU, 1, torch.float64), None)
    assert graphs.size_of(3, 3, 3, 3) == StepSize(4, 4)
    alive = weakref.ref(graphs)
    gc.disable()
    try:
        del graphs
        assert alive() is None
    finally:
        gc.enable()


def test_large_decode_graphs_are_for_decode_steps():
    graphs, _ = make_graphs(KeptModel(), (1, 32), mixed=(StepSize(64, 2),))
    assert graphs.size_of(20, 20, 20, 3) == StepSize(32, 32)
    assert graphs.size_of(20, 1, 1, 3) == StepSize(64, 2)
    assert graphs.size_of(20, 3, 3, 3) == StepSize(32, 32)  # before it runs eagerly


def test_mixed_sizes_that_cannot_be_captured_leave_decode_steps(caplog):
    class Backend(FakeBackend):
        def capture(self, work):
            if model.sizes[-1] == 16:
                raise RuntimeError("the host waits")
            return super().capture(work)

    model = KeptModel()
    graphs, _ = make_graphs(model, backend=Backend(), mixed=MIXED)
    assert (graphs.batch_sizes, graphs.mixed_sizes) == ((1, 2, 4), ())
    assert "other steps are not replayed as CUDA graphs from batch size 16 rows of 3: the host waits" in caplog.text


@pytest.mark.parametrize(
    ("most_rows", "batch", "sizes"),
    [
        (4096, 1, [(16, 1), (32, 1), (64, 1)]),
        (4096, 16, [(32, 16), (64, 16)]),
        (4096, 100, [(32, 16), (64, 32)]),
        (40, 4, [(16, 4), (32, 4), (40, 4)]),
        (9, 4, [(9, 4)]),
    ],
)
def test_sizes_of_other_steps(most_rows, batch, sizes):
    assert mixed_sizes((16, 32, 64), most_rows, batch) == tuple(StepSize(*size) for size in sizes)


@pytest.mark.parametrize(
    ("drafts", "most_rows", "batch", "rows"),
    [
        (7, 4096, 1, (2, 3, 4, 6, 8)),
        (4, 4096, 1, (2, 3, 4, 5)),
        (7, 4096, 4, (6, 8, 12, 16, 24, 32)),  # fewer rows are replayed as decode steps are
        (7, 20, 4, (6, 8, 12, 16, 20)),  # no step has more rows
        (7, 4096, 40, (48, 64)),
        (7, 4096, 256, ()),
        (64, 4096, 1, (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)),
    ],
)
def test_sizes_of_steps_with_draft_tokens(drafts, most_rows, batch, rows):
    assert draft_sizes(DRAFT_ROWS, drafts, most_rows, batch) == tuple(StepSize(count, batch, count) for count in rows)


DRAFTED = (StepSize(3, 1, 3), StepSize(20, 1, 20))


@pytest.mark.parametrize(
    ("rows", "kept", "seqs", "size"),
    [
        (2, 2, 1, StepSize(3, 1, 3)),
        (3, 1, 1, StepSize(3, 1, 3)),  # few rows of a prompt
        (4, 4, 1, StepSize(20, 1, 20)),
        (4, 1, 1, StepSize(16, 1)),
        (17, 1, 1, StepSize(32, 1)),  # of a prompt, though fewer rows would do
        (17, 17, 1, StepSize(20, 1, 20)),
        (21, 21, 1, None),
        (2, 2, 2, None),
    ],
)
def test_the_size_that_suits_a_step_with_draft_tokens(rows, kept, seqs, size):
    mixed = (*DRAFTED, StepSize(16, 1), StepSize(32, 1))
    assert make_graphs(KeptModel(), (1,), mixed=mixed)[0].size_of(rows, kept, seqs, 3) == size


def test_logits_of_draft_tokens():
    """Three rows of one sequence in four, all of whose logits are kept; the padding writes nowhere."""
    model, work = KeptModel(work := FakeWork()), work
    graphs, backend = make_graphs(model, (1,), works=lambda: [work], mixed=(StepSize(4, 1, 4),))
    sequence = [3, 3, 5, 7, 9]
    for token in range(2):
        graphs.forward(mixed_inputs([sequence[: token + 1]], [token], [0]))
    got = graphs.forward(mixed_inputs([sequence], [2], [0, 1, 2]))
    want = [torch.bincount(torch.tensor(sequence[:length]), minlength=VOCAB) for length in (3, 4, 5)]
    assert torch.equal(got, torch.stack(want).float())
    assert work.expected == [(2, 1), (2, 1), (2, 3)]
    assert (backend.graphs[1].replays, backend.graphs[4].replays) == (2, 1)


@pytest.mark.parametrize(("broken", "left"), [(20, [1, 16]), (16, [1, 3, 20])])
def test_sizes_of_one_kind_that_cannot_be_captured_leave_the_others(broken, left, caplog):
    class Backend(FakeBackend):
        def capture(self, work):
            if model.sizes[-1] == broken:
                raise RuntimeError("the host waits")
            return super().capture(work)

    model = KeptModel()
    graphs, _ = make_graphs(model, (1,), backend=Backend(), mixed=(DRAFTED[0], StepSize(16, 1), DRAFTED[1]))
    assert [size.rows for size in sorted((StepSize(1, 1), *graphs.mixed_sizes))] == left
    kind = "draft" if broken == 20 else "other"
    assert f"{kind} steps are not replayed as CUDA graphs from batch size {broken} " in caplog.text


def test_steps_can_be_padded_without_being_captured():
    model = CachedModel()
    graphs = CUDAGraphRunner(model, (1, 4), lambda size: StaticInputs(size, 3, CPU, 1, torch.float64), None)
    assert (graphs.batch_sizes, graphs.reason, model.sizes) == ((1, 4), None, [])
    for rows, size in ((1, 1), (3, 4)):
        logits = graphs.forward(decode_inputs([[7]] * rows, [[s, 0, 0] for s in range(rows)]))
        assert torch.equal(logits, torch.eye(VOCAB)[7].expand(rows, VOCAB))
        assert model.sizes.pop() == size


def test_an_error_of_the_model_is_no_matter_of_graphs():
    def broken(inputs):
        raise RuntimeError("no such weight")

    with pytest.raises(RuntimeError, match="no such weight"):
        make_graphs(broken)


class StreamBackend:
    """Captures what goes to a FakeDriver."""

    def __init__(self, driver):
        self.driver = driver

    def warm_up(self, work):
        work()
        self.driver.synchronize()

    def capture(self, work):
        with self.driver.capture() as graph:
            result = work()
        return _StreamGraph(self.driver, graph), result

    def wait(self):
        self.driver.synchronize()

    def launch(self, graph, send, *, is_held=False):
        assert not is_held
        send()
        graph.replay()

    can_hold = False


class _StreamGraph:
    def __init__(self, driver, graph):
        self.driver, self.graph = driver, graph

    def replay(self):
        self.driver.replay(self.graph)


@pytest.mark.parametrize("method", EnqueueMethod)
def test_experts_on_the_cpu_beside_the_graph(method):
    torch.manual_seed(0)
    pool, driver = WorkerPool(2), FakeDriver()
    experts, rows = 3, [RawTensor.from_tensor(torch.randn(32, 32)) for _ in range(6)]
    kernels = [MoeKernel(ExpertWeights(rows[i : i + 3], rows[:3], rows[3:]), ActivationSpec(), pool) for i in range(2)]
    streamed = AsyncCpuExperts(pool, StreamShape(8, 1, 32, torch.float32), driver, method)
    for kernel in kernels:
        streamed.add_layer(kernel)
    embedding = torch.randn(VOCAB, 32)

    def run(inputs):
        """Two layers, x + experts(x), whose routing is the token's number."""
        x, y = torch.zeros(inputs.num_rows, 32), torch.zeros(inputs.num_rows, 32)
        ids, weights = torch.zeros(inputs.num_rows, 1, dtype=torch.int32), torch.ones(inputs.num_rows, 1)
        driver.enqueue(lambda: embed(x, ids, inputs))
        for layer in range(2):
            streamed.submit(layer, x, ids, weights)
            streamed.collect(y)
            driver.enqueue(lambda: x.add_(y))
        return x

    def embed(x, ids, inputs):
        tokens = inputs.hidden_states[:, 0].long()
        x.copy_(embedding[tokens])
        ids.copy_(tokens[:, None] % experts)

    def make(size):
        return StaticInputs(size, 3, CPU, 1, torch.float64)

    graphs = CUDAGraphRunner(run, (1, 2, 4), make, StreamBackend(driver), lambda: [streamed])
    for step in range(30):
        tokens = [(step * 7 + row) % VOCAB for row in range(1 + step % 4)]
        got = graphs.forward(decode_inputs([[token] for token in tokens], [[0, 0, 0]] * len(tokens)))
        driver.synchronize()
        want = embedding[tokens]
        ids, weights = torch.tensor(tokens)[:, None] % experts, torch.ones(len(tokens), 1)
        for kernel in kernels:
            want = want + kernel.forward(want.contiguous(), ids, weights)
        assert torch.equal(got, want)
    streamed.check()
    streamed.close()
    driver.stop()
    pool.close()
