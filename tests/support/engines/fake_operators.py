"""Stand-ins for tests of rules and plans: models on meta, a weight source without files, small operators."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ktransformers.core import Phase
from ktransformers.errors import TensorMismatchError
from ktransformers.kernels.types import ExpertWeights, Fp8Matrix, QuantType, RawTensor
from ktransformers.models.facts import ModelFacts
from ktransformers.operators.base import Operator, OperatorConfig, Placement, Requirements, expect_shape
from ktransformers.operators.wrapper import WrapperOperator
from ktransformers.optimize.machine import Machine
from ktransformers.optimize.plan import Plan, make_plan
from ktransformers.optimize.rules import Rules, parse_rules
from ktransformers.system.shipped_rules import shipped_path
from ktransformers.weights.source import ExpertsInfo, ExpertsLayout, MappedExperts, TensorInfo
from tests.support.models.tiny_models import tiny_config

GIB = 1 << 30
MACHINE = Machine(ram_bytes=8 * GIB, available_bytes=4 * GIB, devices={"cpu": 4 * GIB})


def meta_model(model_type: str, **config_values: Any) -> Any:
    """A tiny model of `model_type` on meta, the way the engine builds it."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(model_type, **config_values), dtype=torch.float32).eval()


class FakeSource:
    """Holds, as F32, everything that a meta model asks for: the value of an element is the length of its name."""

    def __init__(self, model: Any):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.experts_shapes: dict[str, list[tuple[int, ...]]] = {}
        self.stored_type = "F32"
        self.reads: list[str] = []
        tied = set(model.all_tied_weights_keys)
        for key, module in model.named_modules():
            state = {**module._parameters, **module._buffers}
            held = {n: tuple(t.shape) for n, t in state.items() if t is not None}
            if len(held.get("down_proj", ())) == 3:
                self.experts_shapes[key] = list(held.values())
                continue
            for name, shape in held.items():
                full = f"{key}.{name}"
                if name not in module._non_persistent_buffers_set and full not in tied:
                    self.shapes[full] = shape

    def describe(self) -> str:
        return "fake"

    def stored_names(self) -> Sequence[str]:
        return [*self.shapes, *(f"{key}.all" for key in self.experts_shapes)]

    def ignorable(self, stored_name: str) -> bool:
        return False

    def stored_bytes(self, stored_name: str) -> torch.Tensor | None:
        return None

    def find(self, name: str) -> TensorInfo | None:
        shape = self.shapes.get(name)
        if shape is None:
            return None
        return TensorInfo(name, shape, self.stored_type, QuantType.F32, 4 * math.prod(shape), (name,))

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if name not in self.shapes:
            raise TensorMismatchError(f"tensor {name} is missing from the weight files")
        self.reads.append(name)
        return torch.full(self.shapes[name], float(len(name)), dtype=dtype)

    def tensor(self, name: str) -> RawTensor:
        return RawTensor.from_tensor(self.dense(name))

    def fp8(self, name: str) -> Fp8Matrix:
        raise TensorMismatchError(f"tensor {name} is no FP8 matrix")

    def find_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertsInfo | None:
        if key not in self.experts_shapes:
            return None
        nbytes = 4 * sum(math.prod(shape) for shape in self.experts_shapes[key])
        part = TensorInfo(key, (), "F32", QuantType.F32, nbytes, (f"{key}.all",))
        return ExpertsInfo(part, part, part, (f"{key}.all",), nbytes)

    def experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertWeights:
        raise NotImplementedError

    def mapped_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> MappedExperts:
        raise NotImplementedError


class FakeLinear(Operator):
    """A linear that reads weight and bias densely."""

    OPS: ClassVar[dict[str, str]] = {"FastOp": "fast", "SlowOp": "slow"}
    KWARGS: ClassVar[frozenset[str]] = frozenset({"bits", "transfer_map"})

    def __init__(
        self,
        module: nn.Module,
        key: str,
        config: OperatorConfig,
        placement: Placement | None = None,
        bits: int = 8,
        transfer_map: dict[int, str] | None = None,
    ):
        super().__init__(module, key, config, placement)
        self.bits, self.transfer_map = bits, transfer_map
        self.shape = tuple(module.weight.shape)  # type: ignore[union-attr, arg-type]
        self.is_loaded = False

    def requirements(self, source: Any) -> Requirements:
        needs, name = Requirements(), f"{self.key}.weight"
        needs.add(self.placement.device(Phase.GENERATE), expect_shape(source.find(name), name, self.shape))
        bias = source.find(f"{self.key}.bias")
        if bias is not None:
            needs.add(self.placement.device(Phase.GENERATE), bias)
        return needs

    def load(self, source: Any) -> None:
        self.is_loaded = True
        source.tensor(f"{self.key}.weight")


class FakeExperts(Operator):
    """Experts that are never run."""

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        self.is_loaded = False

    def requirements(self, source: Any) -> Requirements:
        info = source.find_experts(self.key, None)
        needs = Requirements(nbytes={"cpu": info.nbytes}, quant_types=["F32"])
        needs.stored_names.update(info.stored_names)
        return needs

    def load(self, source: Any) -> None:
        self.is_loaded = True


class OwningBlock(WrapperOperator):
    """A wrapper that reads its child `gate` itself."""

    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"gate"})

    def requirements(self, source: Any) -> Requirements:
        needs, name = super().requirements(source), f"{self.key}.gate.weight"
        info = source.find(name)
        assert info is not None
        needs.add("cpu", info)
        return needs


class UnloadedWrapper(WrapperOperator):
    """A broken operator: it leaves its module's parameters where they are."""

    def load(self, source: Any) -> None:
        pass


class NotAnOperator(nn.Module):
    """A class that a rule may not inject."""


EXPERTS_RULE = r"""
- match: {name: '\.experts$'}
  replace: {class: tests.support.engines.fake_operators.FakeExperts}
"""


def inlined_rules(name: str) -> str:
    """The text of a shipped rule file with those that it includes in their places, for tests that change some of it."""
    text = shipped_path(name).read_text()
    return re.sub(r"^- include: (\S+)$", lambda include: inlined_rules(include[1]), text, flags=re.MULTILINE)


def plan_with(
    model: Any,
    rules: str | Rules,
    source: Any = None,
    machine: Machine = MACHINE,
    extra_bytes: Mapping[str, Mapping[str, int]] | None = None,
    **options: Any,
) -> Plan:
    """make_plan with the usual companions, and a cache."""
    plan = make_plan(
        model,
        parse_rules(rules, trust=True) if isinstance(rules, str) else rules,
        operator_config=OperatorConfig(ModelFacts.of(model.config)),
        source=source or FakeSource(model),
        machine=machine,
        **options,
    )
    return replace(plan, extra_bytes=extra_bytes or {})
