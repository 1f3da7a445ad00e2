"""Predicts how long prefill and decode will take, from a plan's load and what the machine was measured to do.

    step = sum over layers (matrices + attention + beside(routed experts, shared experts) + layer cost)
         + head + step cost
    beside(a, b) = max(a, b) on two devices, a + b on one

Decode steps on a GPU are replayed, and so are a prompt's steps of few rows. A longer one, or one in which the host
chooses what is streamed, is launched kernel by kernel while earlier ones run: it takes as long as the kernels or as
the program that launches them, whichever is longer.

Every term is bytes or operations times a measured time: of a byte of weights of that type at that many rows (kernels'
own curves), of a multiplication of attention, of an empty layer and an empty step. Nothing is fitted to results. Each
time is divided into what the memory's bandwidth explains (bytes over the best read rate) and what is left, which is
arithmetic; so the largest sum is the resource that limits. Pure: measures nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ktransformers.operators.experts.split import STEP_COST
from ktransformers.optimize.machine_speed import CpuSpeed, Curve, GpuSpeed, MachineSpeed, StepCost, nearest_type
from ktransformers.optimize.step_load import AttentionLoad, ExpertLoad, LayerLoad, Matrix, StepLoad

__all__ = ["RESOURCES", "Expected", "Prediction", "predict_decode", "predict_prefill"]

RAM, CPU, VRAM, GPU, PCIE, LAUNCH = (
    "RAM bandwidth",
    "CPU arithmetic",
    "GPU memory bandwidth",
    "GPU arithmetic",
    "PCIe",
    "launches and hand-overs",
)
RESOURCES = (RAM, CPU, VRAM, GPU, PCIE, LAUNCH)
"""What may limit."""

Times = Counter[str]
"""Seconds by resource."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of a phase. phase: "prefill" or "decode". tokens: of the prompt, or sequences of a step. seconds:
    of the prompt, or a step.

    parts: of these, by resource; they add up. assumed: types that were not measured, and what stood in for them.
    """

    phase: str
    tokens: int
    context: int
    seconds: float
    parts: Mapping[str, float]
    assumed: Mapping[str, str]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all sequences together."""
        return self.tokens / self.seconds

    def ranked(self) -> list[tuple[str, float]]:
        """Return [(resource, share of the time)], the one that limits first."""
        pairs = ((name, seconds / self.seconds) for name, seconds in self.parts.items() if seconds)
        return sorted(pairs, key=lambda pair: -pair[1])


@dataclass(frozen=True, slots=True)
class Expected:
    """Predictions of prefill and decode; or none, and why."""

    predictions: tuple[Prediction, ...]
    reason: str = ""


def predict_decode(load: StepLoad, speed: MachineSpeed, batch: int = 1, context: int = 0) -> Prediction:
    """Predict a step of `batch` sequences with `context` tokens each in the cache.

    Raises KeyError when a device of the plan was not measured.
    """
    step = _Step(speed, [(context, 1)] * batch, batch, is_prefill=False)
    return _prediction("decode", batch, context, [step.times(load)], step.assumed)


def predict_prefill(
    load: StepLoad, speed: MachineSpeed, tokens: int, chunk_size: int, long_rows: int = 0
) -> Prediction:
    """Predict a prompt of `tokens` in steps of `chunk_size`, until its first token is sampled; or in steps of
    `long_rows`, on memory that slots lend, if that is quicker and there are any. Raises as predict_decode.
    """
    if chunk_size < min(long_rows, tokens):
        both = [predict_prefill(load, speed, tokens, rows) for rows in (chunk_size, long_rows)]
        return min(both, key=lambda one: one.seconds)
    steps = [(start, min(chunk_size, tokens - start)) for start in range(0, tokens, chunk_size)]
    times: list[Times] = []
    assumed: dict[str, str] = {}
    for first, rows in steps:
        step = _Step(speed, [(first, rows)], int(first + rows == tokens), is_prefill=True)
        times.append(step.times(load))
        assumed |= step.assumed
    return _prediction("prefill", tokens, tokens, times, assumed)


def _prediction(
    phase: str, tokens: int, context: int, times: Sequence[Times], assumed: Mapping[str, str]
) -> Prediction:
    total = sum(times, Counter())
    return Prediction(phase, tokens, context, sum(total.values()), dict(total), dict(assumed))


class _Step:
    """One step. sequences: (positions before, rows) of each. num_logits: rows that go through the head."""

    def __init__(
        self, speed: MachineSpeed, sequences: Sequence[tuple[int, int]], num_logits: int, *, is_prefill: bool
    ) -> None:
        self._is_prefill = is_prefill
        self._is_replayed = False  # as a prompt's step
        self._speed, self._sequences, self._num_logits = speed, sequences, num_logits
        self._rows = sum(rows for _, rows in sequences)
        self.assumed: dict[str, str] = {}

    def times(self, load: StepLoad) -> Times:
        total: Times = Counter()
        alike: dict[object, Times] = {}
        self._is_replayed = self._is_prefill and not any(map(self._is_of_the_host, load.layers))
        for layer in load.layers:
            key = _key(layer)
            if key not in alike:
                alike[key] = self._layer(layer)
            total += alike[key]
        if self._num_logits:
            for matrix in load.outside:
                total += self._matrix(matrix, self._num_logits)
        total += self._cost(load.layers[0], lambda cost: cost.step) if load.layers else Counter()
        return _longer(total, self._launching(load))

    def _launching(self, load: StepLoad) -> Times:
        """What the program takes to launch a prompt's step that is not replayed."""
        seconds = 0.0
        for i, layer in enumerate(load.layers if self._is_prefill and not self._is_replayed else ()):
            side = self._side(layer.layer_device)
            cost = side.launches.get(layer.steps) if isinstance(side, GpuSpeed) else None
            if cost is not None:
                seconds += cost.layer.of(self._rows) + (cost.step.of(self._rows) if i == 0 else 0.0)
        return Counter({LAUNCH: seconds})

    def _is_of_the_host(self, layer: LayerLoad) -> bool:
        """Whether the host must see to this layer in a prompt's step, so that the step cannot be replayed."""
        side = self._side(layer.layer_device)
        if isinstance(side, CpuSpeed) or self._rows > side.replayed_rows:
            return True
        return any("cpu" in (experts.device, experts.prefill_device) for experts in layer.experts)

    def _layer(self, layer: LayerLoad) -> Times:
        alone, shared, routed = Counter[str](), Counter[str](), Counter[str]()
        for matrix in layer.matrices:
            into = shared if matrix.is_shared else alone
            into.update(self._matrix(matrix, self._rows))
        for experts in layer.experts:
            routed = _longer(routed, self._experts(experts))  # shares on several devices run side by side
        if layer.attention is not None:
            alone.update(self._attention(layer.attention))
        places = {matrix.device for matrix in layer.matrices if matrix.is_shared}
        is_beside = bool(places) and not places & {experts.device for experts in layer.experts}
        alone.update(self._cost(layer, lambda cost: cost.layer))
        if layer.layer_device != "cpu" and any(experts.device == "cpu" for experts in layer.experts):
            alone.update(Counter({LAUNCH: self._gpu(layer.layer_device).hand_over}))
        return alone + (_longer(routed, shared) if is_beside else routed + shared)

    def _gpu(self, device: str) -> GpuSpeed:
        return self._speed.gpus[device]

    def _side(self, device: str) -> CpuSpeed | GpuSpeed:
        return self._speed.cpu if device == "cpu" else self._gpu(device)

    def _per_byte(self, curves: Mapping[str, Curve], types: Sequence[str], rows: float) -> float:
        seconds = 0.0
        for name in types:
            stand_in = nearest_type(name, curves)
            if stand_in != name:
                self.assumed[name] = stand_in
            seconds += curves[stand_in].of(rows)
        return seconds / len(types)

    def _matrix(self, matrix: Matrix, rows: int) -> Times:
        seconds = matrix.nbytes * self._per_byte(self._side(matrix.device).linear, matrix.types, float(rows))
        return self._split_times(matrix.device, seconds, matrix.nbytes)

    def _experts(self, experts: ExpertLoad) -> Times:
        touched = experts.touched(self._rows)
        pairs = self._rows * experts.top_k
        nbytes = experts.nbytes * touched / experts.num_experts
        per_byte = self._per_byte(self._side(experts.device).experts, experts.types, pairs / max(touched, 1e-9))
        there = self._split_times(experts.device, nbytes * per_byte, nbytes)
        if experts.prefill_device == experts.device or not self._is_prefill:
            return there
        return self._streamed(experts, there, nbytes, pairs)

    def _streamed(self, experts: ExpertLoad, there: Times, nbytes: float, pairs: int) -> Times:
        """Copies and the CPU share the experts so that both end together: rates add."""
        gpu = self._gpu(experts.prefill_device)
        copy, alone = nbytes / gpu.to_gpu, sum(there.values())
        rows = pairs / experts.num_experts
        on_gpu = nbytes * self._per_byte(gpu.experts, experts.types, rows)
        slower = max(copy, on_gpu)  # copies of the next experts run beside the products of these
        both = 1.0 / (1.0 / slower + 1.0 / alone) + STEP_COST
        if both >= alone:
            return there
        name = PCIE if copy >= on_gpu else GPU
        return Counter({name: both})

    def _attention(self, attention: AttentionLoad) -> Times:
        seen = sum(attention.seen(first, rows) for first, rows in self._sequences)
        longest = max(rows for _, rows in self._sequences)
        nbytes = sum(
            attention.position_bytes * min(first + rows, (attention.window or first + rows) + rows)
            for first, rows in self._sequences
        )
        side = self._side(attention.device)
        if isinstance(side, CpuSpeed):
            seconds = seen * attention.width * side.attention[attention.kind].of(float(longest))
        else:  # two operations a multiplication; decode reads the cache, prefill multiplies
            seconds = max(nbytes / side.read, 2 * seen * attention.width / side.matmul)
            curve = side.attention.get(attention.kind)
            if curve is not None and self._rows <= curve.at[-1]:
                seconds = max(seconds, seen * attention.width * curve.of(float(self._rows)))
        return self._split_times(attention.device, seconds, nbytes)

    def _cost(self, layer: LayerLoad, curve_of: Callable[[StepCost], Curve]) -> Times:
        side = self._side(layer.layer_device)
        cost = side.steps[layer.steps]
        if self._is_replayed and isinstance(side, GpuSpeed):
            cost = side.replayed.get(layer.steps, cost)
        rows = min(self._rows, cost.layer.at[-1])  # beyond, what grows with rows is in the products' curves
        return Counter({LAUNCH: curve_of(cost).of(float(rows))})

    def _split_times(self, device: str, seconds: float, nbytes: float) -> Times:
        side = self._side(device)
        memory, arithmetic = (RAM, CPU) if isinstance(side, CpuSpeed) else (VRAM, GPU)
        best = side.best_read if isinstance(side, CpuSpeed) else side.read
        reading = min(seconds, nbytes / best)
        return Counter({memory: reading, arithmetic: seconds - reading})


def _longer(one: Times, other: Times) -> Times:
    return one if sum(one.values()) >= sum(other.values()) else other


def _key(layer: LayerLoad) -> object:
    return (layer.layer_device, layer.steps, tuple(layer.matrices), tuple(layer.experts), layer.attention)
