"""The shared libraries of llama.cpp (pip package llama-cpp-python), and children that load them before all else.

numpy's wheels may hold a C++ library of their own whose global symbols the system's one then shares; built with another
compiler, llama.cpp crashes in its first formatted output. Loaded first, it keeps the one that it was built with.

LLAMA_CPP_LIB_PATH names another folder of libraries, as the package knows it: another build of the same version.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.base import PeerProcess

__all__ = ["PEER", "library_folder", "load_library", "start_llama"]

PEER = "llama.cpp"

# What is needed first: a wheel holds a copy in place of each link, and what is asked for by its versioned name would be
# loaded beside the one that we know.
_IN_ORDER = ("ggml-base", "ggml", "llama")


_FOLDER, _MTMD_FOLDER = "LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB"
"""Variables of the package: where its libraries are, and the one for pictures."""


def library_folder() -> Path | None:
    """The folder with the shared libraries of llama_cpp; None when the package is not installed."""
    if os.environ.get(_FOLDER):
        return Path(os.environ[_FOLDER])
    spec = importlib.util.find_spec("llama_cpp")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "lib"


def load_library(name: str) -> ctypes.CDLL:
    """ "ggml-base", say, of the installed package. Raises FileNotFoundError without it."""
    folder = library_folder()
    if folder is None:
        raise FileNotFoundError("llama_cpp is not installed (pip install llama-cpp-python)")
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    return ctypes.CDLL(str(folder / f"lib{name}{suffix}"), mode=ctypes.RTLD_GLOBAL)


def _plain(*words: str) -> list[str]:
    return list(words)


def start_llama(module: str, options: dict[str, Any], within: Callable[..., list[str]] = _plain) -> PeerProcess:
    """Start `module` as a child that answers for llama.cpp, with `options` as its argument.

    within: makes the command line of what is to be run, of the words of a plain one.
    """
    # This program asks OpenMP not to spin, for torch's sake; ggml's threads wait for each other by OpenMP's barriers.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if _FOLDER in environment:
        environment.setdefault(_MTMD_FOLDER, environment[_FOLDER])
    command = within(sys.executable, "-m", "benchmarks.peers.llama_library", module, json.dumps(options))
    return PeerProcess(PEER, command, environment)


def main() -> None:
    """The child: loads the libraries, then runs the module that is named with what follows as its arguments."""
    for name in _IN_ORDER:
        load_library(name)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
