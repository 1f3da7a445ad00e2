"""Finds what models take of each device, before any of them is loaded: each is planned in a process of its own.

Planning imports torch and looks at GPUs: in a child neither stays in the memory of the server. Reads headers only.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ktransformers.config import EngineConfig
from ktransformers.errors import ConfigError, KTransformersError
from ktransformers.optimize.machine import Machine
from ktransformers.server.balance.messages import decode, encode
from ktransformers.system.child import framed, read_frame, spawn_code
from ktransformers.system.cores import usable_cores

__all__ = ["ModelNeeds", "ToPlan", "find_needs", "pinned", "plan_needs", "with_shares"]

_MOST_AT_ONCE = 4
"""Processes that plan: each has torch in memory."""


@dataclass(frozen=True, slots=True)
class ToPlan:
    """A model to be planned. page_size, max_batch_size: as for `build_engine`. beside: bytes of host memory that its
    processes take for themselves.

    memory: bytes of host memory that there are for models; 0: all that is free.
    """

    config: EngineConfig
    page_size: int = 0
    max_batch_size: int = 1
    beside: int = 0
    memory: int = 0


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Memory that a model needs, as planned. nbytes: {device: bytes} that the model takes, `beside` included. memory:
    {device: bytes} that are free now.

    cache_lens, chunk_size, uses_gpus: what was left to the plan. error: why it cannot run; all else is empty then.
    ram_bytes: of the machine. expert_slots: bytes of RAM for experts where they stay in files, those of a model that
    drafts included; 0: none of the model's own do. These experts are stored_experts bytes, of which RAM has to have
    least_slots. reserve: bytes that slots leave free where nobody says how large they are.
    """

    nbytes: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    ram_bytes: int = 0
    cache_lens: int = 0
    chunk_size: int = 0
    uses_gpus: bool = False
    expert_slots: int = 0
    stored_experts: int = 0
    least_slots: int = 0
    reserve: int = 0
    error: str = ""


def find_needs(models: Sequence[ToPlan]) -> list[ModelNeeds]:
    """Return the needs of each model, in order; a few are planned at the same time. Errors of a model are in its
    needs.
    """
    with ThreadPoolExecutor(max(min(len(models), _MOST_AT_ONCE, usable_cores()), 1)) as pool:
        return list(pool.map(_in_child, models))


def pinned(config: EngineConfig, needs: ModelNeeds) -> EngineConfig:
    """Return the configuration in which a model takes what was planned, whatever memory is free when it is loaded."""
    return replace(
        config,
        cache_lens=needs.cache_lens,
        chunk_size=needs.chunk_size,
        use_cuda=needs.uses_gpus if config.use_cuda is None else config.use_cuda,
        experts_from="disk" if needs.expert_slots else "ram",
        experts_ram=needs.expert_slots / 2**30,
    )


def with_shares(
    needs: Sequence[ModelNeeds], are_open: Sequence[bool], are_wanted: Sequence[bool], memory: int
) -> list[ModelNeeds]:
    """Return needs in which slots of experts that stay in files share `memory` bytes of RAM: what they have above the
    least, in the ratio of their experts' bytes, so that all models run beside each other.

    are_open: of each model, whether nobody says how large its slots are. Where not all models have room, those do that
    are_wanted at the start or for ever, and each of the others takes turns in what these leave.
    """
    shared = _shared(needs, are_open, range(len(needs)), memory)
    if shared is not None:
        return shared
    wanted = [i for i, is_wanted in enumerate(are_wanted) if is_wanted]
    shared = _shared(needs, are_open, wanted, memory) or list(needs)
    left = memory - sum(shared[i].nbytes["cpu"] for i in wanted)
    for i in set(range(len(needs))) - set(wanted):
        shared = _shared(shared, are_open, [i], left) or shared
    return shared


def _shared(
    needs: Sequence[ModelNeeds], are_open: Sequence[bool], group: Sequence[int], memory: int
) -> list[ModelNeeds] | None:
    """As `with_shares`, of the models of a group; None where they do not fit."""
    slots = {i: needs[i].least_slots for i in group if are_open[i] and needs[i].expert_slots}
    taken = sum(needs[i].nbytes["cpu"] - (needs[i].expert_slots if i in slots else 0) for i in group)
    left = memory - taken - max((needs[i].reserve for i in slots), default=0) - sum(slots.values())
    if left < 0:
        return None
    growing = sorted(slots, key=lambda i: needs[i].stored_experts)
    while growing:  # the smallest first: what it cannot use is for the others
        i, stored = growing[0], sum(needs[i].stored_experts for i in growing)
        more = min(left * needs[i].stored_experts // stored, needs[i].stored_experts - slots[i])
        slots[i], left, growing = slots[i] + more, left - more, growing[1:]
    return [_with_slots(one, slots[i]) if i in slots else one for i, one in enumerate(needs)]


def _with_slots(needs: ModelNeeds, nbytes: int) -> ModelNeeds:
    cpu = needs.nbytes["cpu"] - needs.expert_slots + nbytes
    return replace(needs, nbytes={**needs.nbytes, "cpu": cpu}, expert_slots=nbytes)


def _in_child(model: ToPlan) -> ModelNeeds:
    done = subprocess.run(spawn_code(__name__), input=framed(encode(model)), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise ConfigError(f"the process that plans models ended with {done.returncode}; what it says stands above")
    needs = decode(done.stdout, ModelNeeds)
    assert isinstance(needs, ModelNeeds)
    return needs


def plan_needs(model: ToPlan) -> ModelNeeds:
    """Plan the memory that one model needs on this machine. Imports torch."""
    from ktransformers.engine.api.pictures import as_served
    from ktransformers.engine.model.opened import open_model
    from ktransformers.engine.plan.cache_plan import CachePlan
    from ktransformers.engine.plan.dry_run import on_one_thread
    from ktransformers.engine.plan.hardware import Hardware
    from ktransformers.engine.plan.planning import Planner
    from ktransformers.optimize.expert_slots import reserve_of

    try:
        opened = open_model(as_served(model.config))
        hardware = Hardware.detect(model.config)
        machine = hardware.machine
        with on_one_thread():
            planner = Planner(opened, None, CachePlan.of(opened, model.max_batch_size, model.page_size))
            planned, _ = planner.plan(replace(hardware, machine=_limited(machine, model)))
    except KTransformersError as error:
        return ModelNeeds(error=str(error))
    misfit = planned.plan.misfit()
    if misfit is not None:
        return ModelNeeds(error=misfit)
    nbytes = planned.plan.total_bytes
    slots, least, most = planned.expert_ram(opened.facts.top_k())
    placed = {entry.placement.generate_device for entry in planned.plan.entries}
    return ModelNeeds(
        nbytes=nbytes | {"cpu": nbytes.get("cpu", 0) + model.beside},
        memory=dict(machine.devices),
        ram_bytes=machine.ram_bytes,
        cache_lens=planned.num_slots,
        chunk_size=planned.chunk_size,
        uses_gpus=bool(placed - {"cpu"}),
        expert_slots=slots,
        stored_experts=most,
        least_slots=least,
        reserve=reserve_of(planned.plan.capacity["cpu"]),
    )


def _limited(machine: Machine, model: ToPlan) -> Machine:
    free = machine.devices["cpu"]
    return machine.beside(model.beside + max(free - model.memory, 0) * bool(model.memory))


def main() -> int:
    """Plan a model in the child process: a ToPlan on standard input, ModelNeeds on standard output."""
    data = read_frame(sys.stdin.buffer)
    if data is None:
        return 1
    out, sys.stdout = sys.stdout, sys.stderr  # what a model's own code prints is no part of the answer
    out.buffer.write(encode(plan_needs(decode(data, ToPlan))))
    out.buffer.flush()
    return 0
