"""The profile that is being written, seen from the process that asked for it: starts the bridge, and ends it.

Knows no engine: whoever makes a Capture gives its endpoint to Recorders, and closes those before `stop`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ktransformers.errors import ConfigError, EngineError
from ktransformers.profiling.files import check_folder
from ktransformers.profiling.messages import BridgeOptions, ProfileMeta
from ktransformers.system.child import framed, spawn_code
from ktransformers.system.process_group import ProcessGroup, Program

__all__ = ["MAX_BYTES", "Capture", "ProfileLimits", "ProfileTarget", "shown_command"]

logger = logging.getLogger(__name__)

MAX_BYTES = 8 << 30
"""Of all files of a profile, unless somebody says otherwise."""

STOP_SECONDS = 12.0
"""How long the bridge may take to end: a little longer than it waits itself."""

_SHOWN_VALUES = frozenset(
    (
        *("model_path", "gguf_path", "optimize_config_path", "backend_type", "profile", "profile_root"),
        *(
            "chunk_size",
            "cache_lens",
            "page_size",
            "max_batch_size",
            "max_new_tokens",
            "profile_max_bytes",
            "max_itl_ratio",
            "max_gap_ms",
        ),
        *(
            "cpu_infer",
            "cpu_quant",
            "cpu_prefill",
            "cpu_activations",
            "cpu_bf16",
            "gpu_memory",
            "hot_experts",
            "experts_from",
            "experts_ram",
            "attention_backend",
            "attention_products",
            "sparse_attention",
            "speculative",
            "speculative_tokens",
        ),
        "kv_type",
        *("host", "port", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"),
    )
)
"""Flags whose values are neither a key nor a text."""


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """The budget of a profile. max_bytes: of all files. file_bytes: of one before it is rotated.

    Raises ConfigError for a budget of nothing.
    """

    max_bytes: int = MAX_BYTES
    file_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if not 1 << 16 <= self.max_bytes < 1 << 62:
            raise ConfigError(f"--profile_max_bytes must be at least {1 << 16}, got {self.max_bytes}")


def shown_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line as a profile may keep it: names of flags, and values of those without a key or a text."""
    shown = [Path(arguments[0]).name] if arguments else []
    keeps = False
    for argument in arguments[1:]:
        if argument.startswith("--"):
            name, _, value = argument.partition("=")
            keeps = name[2:].replace("-", "_") in _SHOWN_VALUES
            shown.append(argument if keeps or not value else f"{name}=...")
        elif keeps:
            shown.append(argument)
            keeps = False
    return shown


class Capture:
    """A profile that is being written to `folder`, and the bridge process that writes it.

    Blocks until the files are there, some tenths of a second.
    on_death: called on another thread when the bridge ends although nobody stopped it. Raises ConfigError for a folder
    that cannot be, EngineError when the process does not start.
    """

    def __init__(
        self,
        folder: Path,
        meta: ProfileMeta,
        limits: ProfileLimits | None = None,
        on_death: Callable[[], None] | None = None,
        log_level: str = "info",
    ):
        limits = limits or ProfileLimits()
        self.folder, self.began = folder, time.time()
        self._on_death, self._is_stopping, self._is_stopped = on_death, False, False
        self._news: dict[str, Any] = {}
        program = Program("the profile's process", spawn_code("ktransformers.profiling.bridge"), stdout=subprocess.PIPE)
        self._processes = ProcessGroup()
        self._process = self._processes.start(program)
        options = BridgeOptions(
            folder=str(folder.absolute()),
            meta=meta,
            log_level=log_level,
            max_bytes=limits.max_bytes,
            file_bytes=limits.file_bytes,
        )
        with contextlib.suppress(BrokenPipeError):
            self._process.send(framed(msgspec.msgpack.encode(options)))
        self.endpoint = self._begun()
        self._reader = threading.Thread(target=self._listen, name="profile-bridge", daemon=True)
        self._reader.start()
        logger.info("a profile is written to %s", folder)

    @property
    def pid(self) -> int:
        """The process id of the bridge."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the bridge process runs."""
        return self._process.poll() is None

    def status(self) -> dict[str, Any]:
        """Return the state of the profile in JSON types: where, since when, how many lines, and what was lost."""
        news = {"counts": {}, "dropped": {}} | self._news
        return {"dir": self.folder.name, "began": round(self.began, 3), **news}

    def end(self, seconds: float) -> None:
        """Tell the bridge to end, and wait at most so long for it. `stop` has to follow."""
        self._is_stopping = True
        self._process.ask_to_end()
        with contextlib.suppress(TimeoutError):
            self._process.wait(seconds)

    def stop(self) -> None:
        """End the bridge, which writes what it has been sent first. Safe to call twice."""
        if self._is_stopped:
            return
        self._is_stopped = True
        is_alive = self.is_alive
        self._is_stopping = True
        self._processes.stop(self._process, STOP_SECONDS)
        self._reader.join()
        self._processes.close()
        if is_alive:
            logger.info("the profile in %s is complete", self.folder)

    def _begun(self) -> str:
        """The endpoint. Raises what the bridge says when it cannot start."""
        line = self._process.stdout.readline()
        said = json.loads(line) if line else {}
        endpoint: str | None = said.get("endpoint")
        if endpoint is not None:
            return endpoint
        code = self._process.wait()
        self._processes.close()
        if "error" in said:
            raise ConfigError(said["error"])
        raise EngineError(f"the profile's process ended with exit code {code} before it began")

    def _listen(self) -> None:
        stdout = self._process.stdout
        for line in stdout:
            with contextlib.suppress(ValueError):  # a line that was cut because nobody read
                self._news = json.loads(line)
        code = self._process.wait()
        stdout.close()
        if self._is_stopping:
            return
        logger.error("the profile in %s ends here: its process ended with %d; nothing else does", self.folder, code)
        if self._on_death is not None:
            self._on_death()


@dataclass(frozen=True, slots=True)
class ProfileTarget:
    """The folder in which a program wants its profile.

    Raises ConfigError on creation for a folder in which none can begin.
    """

    folder: Path
    limits: ProfileLimits = ProfileLimits()

    def __post_init__(self) -> None:
        check_folder(self.folder)

    def open(self, meta: ProfileMeta) -> Capture:
        """Begin the profile. Errors as Capture."""
        return Capture(self.folder, msgspec.structs.replace(meta, command=shown_command(sys.argv)), self.limits)
