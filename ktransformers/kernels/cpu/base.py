"""Instruction sets, worker pools, and the checks in front of every kernel."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from enum import Enum, IntEnum
from functools import cache

import torch
from torch import Tensor

from ktransformers.errors import ConfigError, KernelError
from ktransformers.kernels.cpu.grids import register_grids
from ktransformers.kernels.cpu.topology import ThreadPlace, thread_places
from ktransformers.kernels.extension import extension
from ktransformers.kernels.formats import FORMATS, Kernels
from ktransformers.kernels.types import GroupType, OwnType, PackedTensor, QuantType, RawTensor, block_size, type_size

__all__ = [
    "ISA_VARIABLE",
    "NATIVE_TYPES",
    "REBUILD",
    "CpuLayout",
    "Isa",
    "WorkerPool",
    "active_isa",
    "available_isas",
    "check_tensor",
    "check_weight",
    "has_bf16",
    "lacking_isa",
    "layout_of",
    "output",
]

logger = logging.getLogger(__name__)

ISA_VARIABLE = "KTRANSFORMERS_ISA"
_FEW_ROWS = 8
"""Of a step up to which reading the weights is what takes time: a decode step with its draft tokens."""
#: What compiles every tier, in the folder of the sources; without the option, those of the machine that compiles.
REBUILD = "pip install --config-settings cmake.define.KTRANSFORMERS_TIERS=all ."


def _native_types() -> frozenset[QuantType]:
    types = set()
    for number, format in FORMATS.items():
        if format.kernels is Kernels.FP8:  # no type of ggml
            continue
        qtype = QuantType(number)
        if (qtype.name, block_size(qtype), type_size(qtype)) != (format.name, format.block, format.nbytes):
            raise KernelError(
                f"ktransformers._native and the gguf package disagree about {format.name}: reinstall ktransformers"
            )
        types.add(qtype)
    return frozenset(types)


#: The block formats that the kernels compute with in place.
NATIVE_TYPES: frozenset[QuantType] = _native_types()


class Isa(Enum):
    """Instruction sets that kernels are built for. The value is the name that `KTRANSFORMERS_ISA` takes."""

    SCALAR = "scalar"
    AVX2 = "avx2"
    AVX_VNNI = "avx_vnni"
    AVX512_VNNI = "avx512_vnni"
    AVX512_BF16 = "avx512_bf16"
    AMX = "amx"
    NEON_DOTPROD = "neon_dotprod"
    NEON_I8MM = "neon_i8mm"
    # Slow: kernels over emulated instructions on any machine, for tests; never chosen.
    AVX_VNNI_EMULATED = "avx_vnni_emulated"
    AVX512_BF16_EMULATED = "avx512_bf16_emulated"
    AMX_EMULATED = "amx_emulated"


_LAYOUTS = extension.layouts()


class CpuLayout(IntEnum):
    """Memory layouts of a matrix: rows of blocks, or packed; TILES_BF16: see PackedTensor.wants_bf16."""

    ROWS = _LAYOUTS["ROWS"]
    TILES = _LAYOUTS["TILES"]
    TILES_BF16 = _LAYOUTS["TILES_BF16"]


def layout_of(weight: RawTensor | PackedTensor) -> int:
    """Return the number of a matrix's memory layout, as the extension takes it."""
    if isinstance(weight, RawTensor):
        return int(CpuLayout.ROWS)
    return int(CpuLayout.TILES_BF16 if weight.wants_bf16 else CpuLayout.TILES)


def available_isas() -> tuple[Isa, ...]:
    """Return the instruction sets that this build has and this machine can run, slowest first."""
    return tuple(Isa(name) for name in extension.available_isas())


def lacking_isa() -> Isa | None:
    """Return the fastest instruction set of this machine where the build lacks it, None where it has it.

    A build from source has the tiers of the machine that compiled it, as far as its compiler knows them.
    """
    missing = extension.missing_isas()
    if not missing:
        return None
    fastest, order = Isa(missing[-1]), list(Isa)
    return fastest if order.index(fastest) > order.index(available_isas()[-1]) else None


def active_isa() -> Isa:
    """Return the instruction set of a new WorkerPool: the one in `KTRANSFORMERS_ISA`, or else the fastest of the build.

    One line is logged where the machine has a faster one. Raises ConfigError when the variable names a tier that does
    not exist, or that the machine or the build lacks.
    """
    known = available_isas()
    forced = os.environ.get(ISA_VARIABLE)
    if not forced:
        _report_lacking_isa()
        return known[-1]
    for isa in known:
        if isa.value == forced:
            return isa
    names = ", ".join(isa.value for isa in known)
    if forced in extension.missing_isas():
        raise ConfigError(f"{ISA_VARIABLE}={forced}: this build has {names}; in the folder of the sources: {REBUILD}")
    raise ConfigError(f"{ISA_VARIABLE}={forced}: this machine has {names}")


@cache
def _report_lacking_isa() -> None:
    lacking = lacking_isa()
    if lacking is not None:
        logger.warning(
            "kernels run on %s: this build lacks %s, which this machine has and which is faster; "
            "in the folder of the sources: %s",
            available_isas()[-1].value,
            lacking.value,
            REBUILD,
        )


def has_bf16(isa: Isa) -> bool:
    """Whether an instruction set multiplies bf16: packed BF16 weights, and others that want it."""
    return bool(extension.has_bf16(isa.value))


class WorkerPool:
    """Threads that run kernels, one call at a time; calls from several Python threads wait for one another.

    num_threads counts the calling thread, which works too. isa: the tier, `active_isa()` when None. An idle pool uses
    no CPU. After fork() the child must make its own pool (a call raises RuntimeError there).
    places: node and CPUs of each thread (see topology.thread_places), those that suit the machine when None. Weights
    of experts are spread over the nodes, and each part is multiplied by threads of its node; results do not change.
    planes: 1 rounds activations to int8, in blocks with a scale, before they are multiplied with quantized weights; 2
    adds what that leaves of them, rounded in the same way: 16 bits, which cost arithmetic but no bytes of weights.
    num_slow: threads on efficiency cores, which come last. They take fewer tasks than others, since all tasks are
    handed out as threads come to them. slow_rest: whether they take none in steps of few rows, see `begin_step`.
    Raises ValueError for a thread count below 1 or above 1024, a tier that the machine lacks, or places that are not
    one per thread in the order of their nodes.
    """

    def __init__(
        self,
        num_threads: int,
        isa: Isa | None = None,
        places: Sequence[ThreadPlace] | None = None,
        planes: int = 1,
    ) -> None:
        if not isinstance(num_threads, int) or isinstance(num_threads, bool):
            raise TypeError(f"num_threads must be an int, got {num_threads!r}")
        if not 1 <= num_threads <= extension.MAX_THREADS:
            raise ValueError(f"num_threads must be between 1 and {extension.MAX_THREADS}, got {num_threads}")
        self.isa = isa or active_isa()
        self.num_threads = num_threads
        self.planes = planes
        chosen = thread_places(num_threads) if places is None else places
        if len(chosen) != num_threads:
            raise ValueError(f"places must be one per thread: got {len(chosen)} for {num_threads} threads")
        register_grids()
        where = [(place.node, list(place.cpus), place.is_slow) for place in chosen]
        self.num_slow = sum(place.is_slow for place in chosen)
        self.slow_rest = False
        self.handle = extension.WorkerPool(where, self.isa.value, planes)
        self.num_nodes = int(self.handle.num_nodes)
        self._finalizer = weakref.finalize(self, self.handle.close)

    @property
    def has_bf16(self) -> bool:
        """Whether the pool's instruction set multiplies bf16, see `has_bf16`."""
        return has_bf16(self.isa)

    def begin_step(self, num_rows: int) -> None:
        """Note that kernels of a step of num_rows rows come next: of few rows, threads on efficiency cores rest where
        slow_rest is set.
        """
        if self.num_slow:
            self.handle.rest_slow(self.slow_rest and num_rows <= _FEW_ROWS)

    def close(self) -> None:
        """Stop the threads. Later calls with this pool raise RuntimeError. Closing twice does nothing."""
        self._finalizer()

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        return f"WorkerPool(num_threads={self.num_threads}, isa={self.isa.value}{state})"


def check_tensor(name: str, tensor: Tensor, shape: Sequence[int | None], dtype: torch.dtype = torch.float32) -> None:
    """Check a contiguous CPU tensor; None in `shape` allows any size."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}")
    actual = tensor.shape
    if len(actual) != len(shape) or any(w is not None and w != got for w, got in zip(shape, actual, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(actual)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def output(out: Tensor | None, shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
    """Return `out` checked, or a new tensor. An output that shares its memory with an input would be read after
    writing.
    """
    if out is None:
        return torch.empty(shape, dtype=torch.float32)
    check_tensor("out", out, shape)
    for tensor in inputs:
        if tensor.data_ptr() == out.data_ptr() and out.numel():
            raise ValueError("out must not be one of the inputs")
    return out


def check_weight(name: str, weight: object, dims: int) -> RawTensor | PackedTensor:
    """Return `weight`, after checking that kernels can read it."""
    if not isinstance(weight, (RawTensor, PackedTensor)):
        raise TypeError(f"{name} must be a RawTensor or made by pack or pack_fp8, got {type(weight).__name__}")
    is_fp8 = isinstance(weight, PackedTensor) and weight.qtype is OwnType.F8_E4M3
    if weight.qtype not in NATIVE_TYPES and not is_fp8 and not isinstance(weight.qtype, GroupType):
        names = ", ".join(sorted(qtype.name for qtype in NATIVE_TYPES))
        raise ValueError(f"{name} is {weight.qtype.name}, which has no kernel; transcode it to one of {names}")
    if len(weight.shape) != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {weight.shape}")
    if weight.data.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {weight.data.device}")
    return weight
