"""Options of the whole suite, and what has to be so before any test.

Triton interprets its kernels where there is no GPU: decided when a kernel is defined, so set before any import.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from tests.support.faults.reads import ReadFaults, compile_reads

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background, and servers would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # torch's threads would spin on the cores of the other workers
    torch.set_num_threads(max((os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), 1))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        from tests.support.checks.interpreter import compare_to_masks, quicken

        compare_to_masks()
        quicken()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the user's own models have taught this program changes plans."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _few_tokens_take_pairs() -> Iterator[None]:
    """Interpreted, a program takes milliseconds: experts of more than 16 tokens, not of 32, are computed in blocks."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    from ktransformers.kernels.triton.experts import workspace as moe_workspace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_workspace, "DIGIT_TOKENS", 16)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="whole products and long counts too (make test-all)")
    parser.addoption("--random_cases", type=int, metavar="COUNT", help="mutations of each fuzzed kind, instead of ours")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only `make test-all` runs. A case that is asked for by its whole name is never left out."""
    if config.getoption("--exhaustive"):
        return
    asked, seen = set(config.args), Counter[str]()
    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        nth, seen[name] = seen[name], seen[name] + 1
        every = item.get_closest_marker("every")
        is_left_out = item.get_closest_marker("exhaustive") is not None or (every is not None and nth % every.args[0])
        (left_out if is_left_out and item.nodeid not in asked else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(scope="session")
def random_cases(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """random_cases(few, many): how many to take; many under --exhaustive, or what --random_cases says."""
    option, is_exhaustive = request.config.getoption("--random_cases"), request.config.getoption("--exhaustive")
    return lambda few, many: option or (many if is_exhaustive else few)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Commands set up the logging of the whole process; later tests must not notice."""
    logger = logging.getLogger("ktransformers")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _cpu_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of the tests are on the CPU on every machine, unless a test hands them other hardware."""
    monkeypatch.setattr("ktransformers.optimize.machine.cuda_memory", dict)


@pytest.fixture(scope="session")
def _read_faults_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = compile_reads(tmp_path_factory.mktemp("read-faults"))
    if library is None:
        pytest.skip("faults of reads are made by a library, and there is no C compiler")
    return library


@pytest.fixture
def read_faults(
    _read_faults_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Path], ReadFaults]]:
    """read_faults(path): what makes reads of that file fail in processes that are started with its environment."""
    with ExitStack() as stack:

        def made(path: Path) -> ReadFaults:
            shared = tmp_path_factory.mktemp("faults") / "shared"
            return stack.enter_context(closing(ReadFaults(_read_faults_library, path, shared)))

        yield made
