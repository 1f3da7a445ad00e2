"""Describes the machine without touching its GPUs from this process.

Asking CUDA what there is makes a context, which takes a few hundred MB of each GPU for as long as the process lives,
and fails where a server has taken all. So a child process asks.
"""

from __future__ import annotations

import json
import logging
import subprocess
from contextlib import closing
from typing import Any

from ktransformers.system.child import follow_parent, spawn_code
from ktransformers.system.cores import usable_cores
from ktransformers.system.cpu_names import cpu_name
from ktransformers.system.process_group import ProcessGroup, Program
from ktransformers.system.restart_policy import ending

__all__ = ["describe_host"]

logger = logging.getLogger(__name__)


def describe_host() -> dict[str, Any]:
    """Describe the machine from a child process; if that fails, CPU and cores alone, and one logged line."""
    with closing(ProcessGroup()) as processes:
        child = processes.start(
            Program("the look at the machine", spawn_code(__name__), stdout=subprocess.PIPE, keeps_words=True)
        )
        output = child.stdout.read()
        if child.wait():
            reason = (child.last_words.splitlines() or [ending(child.wait())])[-1]
            logger.warning("the machine is described by its CPU alone: %s", reason)
            return {"cpu": cpu_name(), "cores": usable_cores()}
    facts: dict[str, Any] = json.loads(output.splitlines()[-1])
    return facts


def main() -> int:
    """Run the child process: print the machine's description as one line of JSON."""
    follow_parent()
    from ktransformers.bench.common.machine import describe_machine

    print(json.dumps(describe_machine()))
    return 0
