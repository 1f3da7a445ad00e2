"""Which lengths of a static cache's sequence a step can begin from, without a model."""

from __future__ import annotations

import random

import pytest

from ktransformers.core import SNAPSHOT_ALIGN
from ktransformers.engine.step.kept_states import KeptStates
from ktransformers.errors import ConfigError


class Sequence:
    """Runs steps as a runner does; each slot remembers the tokens of the state in it."""

    def __init__(self, num_states: int, interval: int = 0):
        self.kept, self.num_states = KeptStates(num_states, interval), num_states
        self.slots: dict[int, tuple[int, ...]] = {}
        self.tokens: tuple[int, ...] = ()

    def run(self, tokens: list[int], start: int) -> None:
        step = self.kept.begin(start, len(tokens))
        known = (*self.tokens[:start], *tokens)
        assert (self.slots[step.read] if step.read >= 0 else ()) == known[:start]
        writes = [(step.write, len(known)), *((slot, start + at + 1) for at, slot in step.saves)]
        assert len({slot for slot, _ in writes}) == len(writes)
        assert step.write == 0
        for slot, length in writes:
            assert 0 <= slot < self.num_states
            assert slot != step.read or slot == 0
            self.slots[slot] = known[:length]
        self.tokens = known
        self.kept.end(len(known))


def test_a_prompt_and_the_end_of_its_answer_are_kept() -> None:
    made = Sequence(6)
    for start in range(0, 300, 100):
        made.run(list(range(start, start + 100)), start)
    for token in range(150):
        made.run([token], 300 + token)
    assert made.kept.resume_len(450) == 450
    assert made.kept.resume_len(449) == 448
    assert made.kept.resume_len(447) == 256  # the border before the prompt's last token
    assert made.kept.resume_len(255) == 0


def test_long_prompts_have_snapshots_inside() -> None:
    made = Sequence(20, interval=100)  # 128 is the next border
    made.run(list(range(1000)), 0)
    assert [made.kept.resume_len(length) for length in (999, 900, 127)] == [960, 896, 0]


def test_what_is_overwritten_is_forgotten() -> None:
    made = Sequence(6)
    made.run(list(range(200)), 0)
    made.run([1, 2], 0)
    assert made.kept.resume_len(200) == 0
    made.run([3], 2)
    with pytest.raises(ConfigError, match="no state of the first 2 tokens is kept; the nearest is 0"):
        made.kept.begin(2, 1)


def test_a_step_that_failed_leaves_what_stood_before_it() -> None:
    made = Sequence(6)
    made.run(list(range(130)), 0)
    made.kept.begin(130, 1)
    assert made.kept.resume_len(130) == 128
    made.run([9, 9, 9], 128)


@pytest.mark.parametrize("num_states", [1, 2, 3, 5, 9])
def test_any_order_of_steps_reads_the_right_states(num_states: int) -> None:
    rng = random.Random(num_states)
    made = Sequence(num_states, interval=rng.choice((0, 64, 200)))
    for _ in range(300):
        shared = rng.choice((len(made.tokens), len(made.tokens), rng.randint(0, len(made.tokens))))
        start = made.kept.resume_len(shared)
        assert start <= shared
        assert start == shared or start % SNAPSHOT_ALIGN == 0
        if start > 1500:
            start = 0
        made.run([rng.randrange(5) for _ in range(rng.choice((1, 1, 1, 63, 64, 65, 190)))], start)


def test_a_restored_sequence() -> None:
    states = KeptStates(3)
    states.begin(0, 100)
    states.end(100)
    slots = states.restore((64, 128, 192, 200, 900), 200)
    assert sorted(slots) == [128, 192, 200]  # the longest, as there is room for two beside the one at the end
    assert slots[200] == 0
    assert sorted(slots.values()) == [0, 1, 2]
    assert states.slots() == slots
    assert [states.resume_len(n) for n in (100, 150, 199, 200, 300)] == [0, 128, 192, 200, 192]
    assert states.begin(128, 1).read == slots[128]


def test_a_restored_sequence_without_a_state_at_its_end() -> None:
    states = KeptStates(3)
    assert sorted(states.restore((64,), 100)) == [64]
    assert [states.resume_len(n) for n in (63, 99, 100)] == [0, 64, 64]
    assert states.restore((), 0) == {}
    assert states.resume_len(100) == 0
    assert states.begin(0, 5).read == -1
