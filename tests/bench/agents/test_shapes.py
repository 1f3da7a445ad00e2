"""The shapes of agents' load, counted by hand."""

from __future__ import annotations

import pytest

from ktransformers.bench.agents.shapes import (
    WARM_UP,
    WAVES,
    AgentGroup,
    Prompts,
    Wave,
    choose_waves,
    parse_shape,
    scaled,
    slot_len,
)
from ktransformers.errors import ConfigError


def wave_called(name: str) -> Wave:
    return next(wave for wave in WAVES if wave.name == name)


def test_requests_and_tokens_of_the_load() -> None:
    requests = {wave.name: sum(group.agents * group.turns for group in wave.groups) for wave in WAVES}
    assert requests == {
        "warm_up": 1, "cold": 1, "cached": 1, "shared": 16, "own": 8, "beside": 2, "behind": 7, "many": 32
    }  # fmt: skip
    tokens = {
        wave.name: sum(g.agents * g.prompt_len(turn) for g in wave.groups for turn in range(1, g.turns + 1))
        for wave in WAVES
    }
    assert tokens == {
        "warm_up": 300,
        "cold": 8192,
        "cached": 8192,
        "shared": 8 * 8192 + 8 * 8456,
        "own": 8 * 8192,
        "beside": 64 + 8192,
        "behind": 6 * 8192 + 9,
        "many": 32 * 7000,
    }
    assert [wave.at_once for wave in WAVES] == [1, 1, 1, 8, 8, 2, 7, 32]
    assert max(wave.longest for wave in WAVES) == 6000 + 2192 + 264 + 64
    assert slot_len(WAVES) == 8704  # 8520 and 8 to spare, in steps of 256


@pytest.mark.parametrize(("longest", "expected"), [(248, 256), (249, 512), (1, 256)])
def test_slots_are_rounded_up(longest: int, expected: int) -> None:
    assert slot_len([Wave("a", (AgentGroup("", 1, own=longest - 1, answer=1),))]) == expected


def test_prompts_share_what_they_should() -> None:
    wave = Wave("a", (AgentGroup("", 3, shared=10, own=5, turns=2, growth=4),))
    (group,) = wave.groups
    prompts = Prompts(7, vocab=1000)
    first, second = prompts.of(wave, group, 1), prompts.of(wave, group, 2)
    assert [len(one) for one in first] == [15] * 3
    assert [len(one) for one in second] == [19] * 3
    assert all(later[:15] == earlier for earlier, later in zip(first, second, strict=True))
    assert len({tuple(one[:10]) for one in first}) == 1
    assert len({tuple(one[10:]) for one in first}) == 3
    longer = Wave("b", (AgentGroup("", 1, shared=12),))
    assert prompts.of(longer, longer.groups[0], 1)[0][:10] == first[0][:10]
    assert all(256 <= token < 1000 for one in second for token in one)


def test_prompts_follow_from_the_seed_alone() -> None:
    wave, other = wave_called("own"), Wave("other", wave_called("own").groups)
    (group,) = wave.groups
    once = Prompts(1, 500).of(wave, group, 1)
    assert Prompts(1, 500).of(wave, group, 1) == once
    assert Prompts(2, 500).of(wave, group, 1) != once
    assert Prompts(1, 500).of(other, group, 1) != once
    assert {min(map(min, once)), max(map(max, once))} == {250, 499}  # 65,536 draws see both ends


def test_text_has_a_word_for_a_token() -> None:
    wave = Wave("a", (AgentGroup("", 2, shared=3, own=4),))
    one, other = Prompts(1, 0, is_text=True).of(wave, wave.groups[0], 1)
    assert isinstance(one, str)
    assert isinstance(other, str)
    assert len(one.split()) == len(other.split()) == 7
    assert one.split()[:3] == other.split()[:3]
    assert one != other


def test_scale_is_of_prompts_alone() -> None:
    (stream, prompt) = scaled(wave_called("beside"), 0.01).groups
    assert (stream.own, stream.answer) == (1, 300)
    assert (prompt.own, prompt.answer, prompt.after_tokens) == (82, 8, 32)
    (shared,) = scaled(wave_called("shared"), 2).groups
    assert (shared.shared, shared.own, shared.growth, shared.agents, shared.turns) == (12000, 4384, 528, 8, 2)
    (own,) = scaled(wave_called("own"), 0.00001).groups
    assert (own.shared, own.own) == (0, 1)


def test_waves_are_chosen_in_their_order_and_warmed_up() -> None:
    assert choose_waves(None, [], 1.0) == list(WAVES)
    assert choose_waves(["own", "cold"], [], 1.0) == [WARM_UP, wave_called("cold"), wave_called("own")]
    assert choose_waves(["warm_up"], [], 1.0) == [WARM_UP]
    (warm_up, shape) = choose_waves(None, ["agents=4,own=100"], 0.5)
    assert warm_up.groups[0].own == 150
    assert shape == Wave("shape1", (AgentGroup("", 4, own=50),))
    names = [wave.name for wave in choose_waves(["many"], ["own=1", "own=1,name=mine", "own=1"], 1.0)]
    assert names == ["warm_up", "many", "shape1", "mine", "shape3"]


def test_a_shape_of_ones_own() -> None:
    (group,) = parse_shape("agents=16,shared=4000,own=500,answer=64,turns=3").groups
    assert group == AgentGroup("", 16, shared=4000, own=500, answer=64, turns=3, growth=500)
    assert group.prompt_len(3) == 5500
    (group,) = parse_shape(" turns = 2 , shared=10,growth=0").groups
    assert group == AgentGroup("", 1, shared=10, turns=2, growth=0)
    assert parse_shape("shared=10,turns=2").groups[0].growth == 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("agents=2", "its prompts are empty"),
        ("own=5,agents=0", "agents must be a number from 1 to 4096, got '0'"),
        ("own=5,turns=-1", "turns must be a number from 1 to 1000, got '-1'"),
        ("own=x", "own must be a number from 0"),
        ("own=5,own=6", "own is given twice"),
        ("own=5,length=6", "'length=6' is none of name="),
        ("", "'' is none of name="),
        ("own=5,name=", "'name=' is none of name="),
        ("own=5,name=many", "there is a wave 'many' already"),
    ],
)
def test_wrong_shapes(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="--shape") as caught:
        choose_waves(None, [text], 1.0)
    assert message in str(caught.value)


def test_unknown_waves() -> None:
    with pytest.raises(ConfigError, match="--waves many,cold is not one of warm_up, cold"):
        choose_waves(["many,cold"], [], 1.0)
