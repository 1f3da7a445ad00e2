"""What a recorder sees of modules, and that it leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ktransformers.operators.recorder import intercepted, is_watched, recorded_calls, replaced_forwards, tensors_in


class InPlace(nn.Module):
    """Adds to what it is given, in place; raises for what is no tensor."""

    def forward(self, hidden_states: torch.Tensor, beside: dict[str, Any] | None = None) -> tuple[torch.Tensor, str]:
        hidden_states += 1
        return hidden_states, "more"


def test_what_goes_in_is_copied_before_it_is_changed() -> None:
    module, rows, key = InPlace(), torch.zeros(2), object()
    module.register_forward_pre_hook(lambda module, args: (args[0] + 3,))
    with recorded_calls([(key, module)]) as calls:
        output = module(rows)[0]
    (call,) = calls
    assert call.key is key
    assert call.hidden_states.tolist() == [3, 3]  # behind the hook, in front of the module
    assert call.output[0].tolist() == output.tolist() == [4, 4]
    assert call.output[1] == "more"
    output.zero_()
    assert call.output[0].tolist() == [4, 4]


def test_a_tensor_that_is_given_twice_is_one_copy() -> None:
    module, rows = InPlace(), torch.zeros(2)
    with recorded_calls([("a", module)]) as calls:
        module(hidden_states=rows, beside={"same": [rows], "other": rows.clone()})
    (call,) = calls
    assert call.kwargs["beside"]["same"][0] is call.hidden_states is not rows
    assert call.kwargs["beside"]["other"] is not call.hidden_states


def test_calls_come_in_the_order_in_which_they_end_and_failed_ones_without_output() -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(InPlace(), inner)  # which gets a tuple
    with recorded_calls([("outer", outer), ("inner", inner)]) as calls, pytest.raises(TypeError):
        outer(torch.zeros(2))
    assert [(call.key, call.output) for call in calls] == [("inner", None), ("outer", None)]


def test_forwards_are_given_back_also_those_that_were_replaced_before() -> None:
    module, own = nn.Identity(), InPlace()
    with replaced_forwards([(module, lambda x: x + 1)]):
        with intercepted([("a", module), ("a", module)], lambda key, forward, x: 2 * forward(x)):
            assert module(torch.tensor(1)) == 8
        assert module(torch.tensor(1)) == 2
    assert module(torch.tensor(1)) == 1
    with pytest.raises(KeyError), recorded_calls([("b", own)]):
        raise KeyError
    assert not {"forward"} & (vars(module).keys() | vars(own).keys())


def hooked(module: nn.Module) -> Any:
    return module.register_forward_hook(lambda *_: None)


def pre_hooked(module: nn.Module) -> Any:
    return module.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize("hook", [hooked, pre_hooked])
def test_who_is_watched(hook: Callable[[nn.Module], Any]) -> None:
    module = nn.Identity()
    assert not is_watched(module)
    handle = hook(module)
    assert is_watched(module)
    handle.remove()
    with recorded_calls([("a", module)]):
        assert is_watched(module)
    assert not is_watched(module)


def test_tensors_are_found_in_what_holds_them() -> None:
    one, two, three = (torch.tensor(i) for i in range(3))
    assert list(tensors_in(({"a": one, "b": [two, "text"]}, None, (three,)))) == [one, two, three]
