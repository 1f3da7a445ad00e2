"""Finds the variants of the kernels that a process needs, and compiles them before they are launched.

Triton compiles a kernel when it is first launched with other constants, types, or arguments that it specializes on (1,
multiples of 16). A warm-up calls what launches kernels without launching them: each variant that it meets is handed
to a few threads which compile it, or read it from Triton's folder on the disk, where it stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ktransformers.kernels.triton.common import runtime
from ktransformers.system.cores import usable_cpus

__all__ = ["Compiled", "compiles", "is_warmup", "loading", "variant_of", "warmup", "watch_launches"]

logger = logging.getLogger(__name__)

_MOST_THREADS = 16
_PACKAGE = "ktransformers.kernels.triton."  # all rooms of it

Listener = Callable[[str, bool], None]
"""Told of a variant: the kernel with its constants, and whether it came from the disk."""

_warming_up: int | None = None  # the thread that warms up


def compiles() -> bool:
    """Whether launches compile anything here: Triton is there, and does not interpret."""
    return runtime.triton is not None and not runtime.is_interpreted()


def is_warmup() -> bool:
    """Whether this thread is in a warm-up: it only calls launches, and what they would write is not there."""
    return _warming_up is not None and _warming_up == threading.get_ident()


@dataclass(slots=True)
class Compiled:
    """Result of a warm-up: variants met, and how many of them were compiled or came from the disk."""

    variants: set[tuple[Any, ...]]
    num_compiled: int = 0
    num_from_disk: int = 0
    seconds: float = 0.0


class _Zeros(TorchFunctionMode):
    """New memory is 0: what kernels would have written may be used as an index."""

    _EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in self._EMPTY else result


def _current_device() -> int | None:
    """The CUDA device that this thread launches on."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _compile_and_load(device: int | None, compile: Callable[[], Any]) -> Any:
    """The kernel, with what its first launch would make: a launcher, which a C compiler builds, and its code loaded."""
    kernel = compile()
    if device is not None:
        with torch.cuda.device(device):
            kernel.run  # noqa: B018
    return kernel


class _Compilers(Executor):
    """Threads that compile and load. A launch of what failed raises why."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "compile")
        self.futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = self._threads.submit(_compile_and_load, _current_device(), lambda: fn(*args, **kwargs))
        self.futures.append(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)


def _compile_mode(compilers: Executor) -> Any:
    """Triton's mode in which launches hand what they compile to `compilers`, one kernel for each device.

    Its own would give all devices the kernel that was loaded on the first of them.
    """
    active = runtime.triton.runtime.driver.active

    class PerDevice(runtime.triton.AsyncCompileMode):  # type: ignore[misc]
        def submit(self, key: Any, *functions: Callable[..., Any]) -> Any:
            """functions: compile and finalize; and clean up, from Triton 3.9 on."""
            return super().submit((key, active.get_current_device()), *functions)

    return PerDevice(compilers, ignore_errors=True)


def variant_of(kernel: runtime.Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what distinguishes the variant that a launch needs, as Triton does: name, then a value or type per
    argument.
    """
    names = kernel.function.arg_names
    values, found = dict(zip(names, args, strict=False)) | kwargs, list[tuple[str, Any]]()
    for name, value in values.items():
        is_aligned = name not in kernel.unaligned
        if name in kernel.constants or name not in names or value is None:
            found.append((name, value if isinstance(value, bool | int | float | str | None) else str(value)))
        elif isinstance(value, torch.Tensor):
            found.append((name, (value.dtype, is_aligned and value.data_ptr() % 16 == 0)))
        elif isinstance(value, int):
            special = name not in kernel.plain and (1 if value == 1 else 16 if is_aligned and value % 16 == 0 else 0)
            found.append((name, ("i32" if -(1 << 31) <= value < 1 << 31 else "i64", special)))
        else:
            found.append((name, type(value).__name__))
    return (kernel.function.fn.__name__, *found)


@contextmanager
def watch_launches(seen: Callable[[tuple[Any, ...]], None], *, launches: bool = True) -> Iterator[None]:
    """Call `seen` with the variant of each launch of this thread inside the block. launches: whether they are
    launched.
    """
    mine = threading.get_ident()

    def watched(kernel: runtime.Kernel) -> Callable[..., Any]:
        run = kernel.function.run

        def launch(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if threading.get_ident() != mine:
                return run(*args, grid=grid, warmup=warmup, **kwargs)
            seen(variant_of(kernel, args, kwargs))
            return run(*args, grid=grid, warmup=warmup or not launches, **kwargs)

        return launch

    with ExitStack() as stack:
        for kernel in runtime.kernels:
            before = vars(kernel.function).get("run")
            kernel.function.run = watched(kernel)
            stack.callback(_put_back, kernel.function, before)
        yield


def _put_back(function: Any, run: Any) -> None:
    if run is None:
        del function.run  # the class has one
    else:
        function.run = run


@contextmanager
def warmup(progress: Callable[[int, int], None] | None = None) -> Iterator[Compiled]:
    """Context of a warm-up: calls of this thread inside the block launch nothing; at its end, all variants that they
    need are compiled.

    New tensors of torch hold zeros meanwhile, not what kernels would have written. progress: called with (done, all)
    while the rest is compiled. One warm-up at a time.
    """
    global _warming_up
    if _warming_up is not None:
        raise RuntimeError("a warm-up runs already")
    found, began = Compiled(set()), time.perf_counter()
    report = progress or (lambda done, total: None)
    compilers = _Compilers(max(1, min(_MOST_THREADS, usable_cpus())))

    def count(name: str, is_from_disk: bool) -> None:
        found.num_from_disk += is_from_disk
        found.num_compiled += not is_from_disk

    _warming_up = threading.get_ident()
    try:
        with ExitStack() as stack:
            stack.callback(compilers.shutdown)
            stack.enter_context(_compilations.calling(count))
            if compiles():
                stack.enter_context(_compile_mode(compilers))
            with watch_launches(found.variants.add, launches=False), _Zeros():
                yield found
            _warming_up = None
            total = len(compilers.futures)
            report(0, total)
            for done, future in enumerate(compilers.futures, start=1):
                error = future.exception()
                if error is not None:
                    logger.warning("a kernel does not compile: %s", str(error).splitlines()[0] if str(error) else error)
                report(done, total)
    finally:
        _warming_up = None
    found.seconds = time.perf_counter() - began


class _Compilations:
    """Tells listeners of what Triton compiles or reads from the disk for our kernels, in any thread.

    num_loading: models that load now, for which that is no fault.
    """

    def __init__(self) -> None:
        self._lock, self._is_installed = threading.Lock(), False
        self._other: Any = None  # the listener before
        self.listeners: list[Listener] = []
        self.num_loading = 0

    def install(self) -> None:
        """Put ours before the listener that there is."""
        if self._is_installed or not compiles():
            return
        knobs = runtime.triton.knobs.compilation
        self._is_installed, self._other, knobs.listener = True, knobs.listener, self

    def __call__(self, *, src: Any, cache_hit: bool, **rest: Any) -> None:
        function = getattr(src, "fn", None)
        if str(getattr(function, "module", "")).startswith(_PACKAGE):
            assert function is not None
            constants = {function.arg_names[at[0]]: value for at, value in src.constants.items()}
            shape = ", ".join(f"{name}={value}" for name, value in constants.items())
            with self._lock:
                for listener in self.listeners:
                    listener(f"{function.fn.__name__} ({shape})", cache_hit)
        if self._other is not None:
            self._other(src=src, cache_hit=cache_hit, **rest)

    @contextmanager
    def calling(self, listener: Listener) -> Iterator[None]:
        """Call `listener` for each kernel that is compiled or loaded inside the block."""
        self.install()
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)

    def warn(self, name: str, is_from_disk: bool) -> None:
        if self.num_loading or is_warmup():
            return
        if is_from_disk:
            logger.info("a kernel was read from the disk while serving: %s", name)
        else:
            logger.warning("a kernel was compiled while serving: %s", name)


_compilations = _Compilations()


@contextmanager
def loading() -> Iterator[None]:
    """Context in which a model loads. After it, a line in the log names each kernel that is compiled nevertheless."""
    _compilations.num_loading += 1
    try:
        yield
    finally:
        _compilations.num_loading -= 1
    _compilations.install()
    if _compilations.warn not in _compilations.listeners:
        _compilations.listeners.append(_compilations.warn)
