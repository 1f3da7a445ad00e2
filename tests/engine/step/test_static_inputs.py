"""The memory in which the inputs of graphs lie, and what fills it."""

import pytest
import torch

from ktransformers.engine.step.broadcast import StepBlocks
from ktransformers.engine.step.decode_inputs import DecodeInputs, InputMemory, StaticInputs, StepSize, shared_nbytes
from ktransformers.kernels.types import StateStep
from ktransformers.system.shared_blocks import SharedBlocks

CPU = torch.device("cpu")


def test_graphs_share_their_inputs():
    memory = InputMemory(CPU)
    large, small = (StaticInputs(size, 2, memory, 3, has_states=True) for size in (StepSize(8, 2), 4))
    assert large.inputs.hidden_states.data_ptr() == small.inputs.hidden_states.data_ptr()
    assert large.inputs.block_table.shape == (2, 2)
    assert large.inputs.keep.shape == (2,)
    assert (large.inputs.states.max_rows, small.inputs.states.max_rows) == (8, None)
    assert large.inputs.states.save_slots.shape == (8,)
    drafted = StaticInputs(StepSize(6, 2, 6), 2, memory, 3, has_states=True)
    assert (drafted.inputs.keep.shape, drafted.inputs.block_table.shape) == ((6,), (2, 2))
    assert (drafted.inputs.states.max_rows, drafted.inputs.states.num_seqs) == (None, 2)


def test_static_inputs():
    static = StaticInputs(3, 2, CPU, 3)
    assert static.inputs.slot_mapping.tolist() == [-1] * 3
    source = DecodeInputs(
        torch.tensor([[0.5, 1, 2], [3, 4, 5]]), torch.tensor([1, 1 << 40]), torch.tensor([9, 1 << 33]),
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32),
        torch.tensor([[4], [6]], dtype=torch.int32),
    )  # fmt: skip
    address = static.inputs.hidden_states.data_ptr()
    for _ in range(2):
        static.fill(source)
        got = static.inputs
        assert got.hidden_states.dtype is torch.bfloat16
        assert got.hidden_states.tolist() == [[0.5, 1, 2], [3, 4, 5], [0, 0, 0]]
        assert got.positions.tolist() == [1, 1 << 40, 0]
        assert got.slot_mapping.tolist() == [9, 1 << 33, -1]
        assert got.seq_ids.tolist() == [0, 1, 0]
        assert got.kv_lens.tolist() == [2, 3, 0]
        assert got.block_table.tolist() == [[4, 0], [6, 0], [0, 0]]
    static.pad()
    assert static.inputs.kv_lens.tolist() == [0, 0, 0]
    assert static.inputs.hidden_states.data_ptr() == address


def test_what_others_left_in_shared_memory_is_overwritten():
    """Also behind what a step has: some kernels read pages and slots that they do not use."""
    memory, fresh = InputMemory(CPU), StaticInputs(StepSize(4, 3), 3, CPU, 2, has_states=True)
    static = StaticInputs(StepSize(4, 3), 3, memory, 2, has_states=True)
    for staged in memory._staged:
        staged.fill_(0x5A)
    memory._data.fill_(0x5A)
    ints = {"dtype": torch.int32}
    kv_lens = torch.tensor([5, 6], **ints)
    states = StateStep(
        torch.tensor([0, 2], **ints), torch.tensor([3], **ints), torch.tensor([4], **ints),
        torch.tensor([1, 2], **ints), kv_lens, None,
    )  # fmt: skip
    source = DecodeInputs(
        torch.ones(2, 2), torch.tensor([4, 5]), torch.tensor([8, 9]), torch.tensor([0, 0], **ints), kv_lens,
        torch.tensor([[7, 3]], **ints), states, torch.tensor([11, 12]), torch.tensor([1]),
    )  # fmt: skip
    for one in (static, fresh):
        one.fill(source)
    for name in (
        "hidden_states",
        "positions",
        "slot_mapping",
        "seq_ids",
        "kv_lens",
        "block_table",
        "token_ids",
        "keep",
    ):
        assert torch.equal(getattr(static.inputs, name), getattr(fresh.inputs, name)), name
    for name in ("first_rows", "read_slots", "write_slots", "save_slots"):
        assert torch.equal(getattr(static.inputs.states, name), getattr(fresh.inputs.states, name)), name
    assert static.inputs.block_table.tolist() == [[7, 3, 0], [0, 0, 0], [0, 0, 0]]
    assert static.inputs.states.save_slots.tolist() == [1, 2, -1, -1]
    assert static.inputs.states.first_rows.tolist() == [0, 2, 2, 2]


def a_step(rows, width, has_states):
    """Of sequences of their own, at positions that tell them apart."""
    ints, kv_lens = {"dtype": torch.int32}, torch.arange(5, 5 + rows, dtype=torch.int32)
    states = None
    if has_states:
        slots = torch.arange(rows, **ints)
        states = StateStep(torch.arange(rows + 1, **ints), slots, slots + 1, slots + 2, kv_lens, 1)
    hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    return DecodeInputs(
        hidden, torch.arange(rows) + 4, torch.arange(rows) + 7, torch.arange(rows, **ints), kv_lens,
        torch.full((rows, 2), 3, **ints), states, torch.arange(rows) + 9, torch.arange(rows),
    )  # fmt: skip


@pytest.mark.parametrize("has_states", [True, False])
def test_what_is_published_is_what_others_would_fill(has_states):
    """Steps of several graphs one after another, in both slots; rows are copied in as many pieces as there are."""
    sizes, extent = [StepSize(8, 8), StepSize(2, 2)], (3, 6000, torch.bfloat16)
    writer = SharedBlocks.create(1)
    reader = SharedBlocks.open(writer.path, 0)
    nbytes = shared_nbytes(sizes, *extent, has_states=has_states)
    memories = [InputMemory(CPU, StepBlocks(blocks, CPU), nbytes) for blocks in (writer, reader)]
    driver, worker = ({size: StaticInputs(size, extent[0], memory, *extent[1:], has_states) for size in sizes}
                      for memory in memories)  # fmt: skip
    alone = {size: StaticInputs(size, extent[0], CPU, *extent[1:], has_states) for size in sizes}
    for rows in (2, 1, 7, 8, 2):
        size, step = sizes[rows <= 2], a_step(rows, extent[1], has_states)
        driver[size].publish(step)
        shared = memories[1].blocks.wait()
        assert (StepSize(*shared[1:4]), shared.num_tokens) == (size, rows)
        worker[size].take(shared.slot, non_blocking=False)
        alone[size].fill(step)
        want = alone[size]._data
        assert torch.equal(driver[size]._data, want)
        assert torch.equal(worker[size]._data, want)


def test_large_graphs_are_not_shared():
    sizes = [StepSize(128, 4), StepSize(64, 4)]
    blocks = StepBlocks(SharedBlocks.create(0), CPU)
    memory = InputMemory(CPU, blocks, shared_nbytes(sizes, 3, 8, torch.bfloat16, has_states=False))
    assert [StaticInputs(size, 3, memory, 8).is_shared for size in sizes] == [False, True]
    assert not StaticInputs(4, 3, CPU, 8).is_shared
