"""`python ktransformers/server/main.py --model_path ... --gguf_path ...`: the same as `ktransformers serve`."""

import importlib.util
import os
import sys


def _fix_sys_path() -> None:
    """Make `ktransformers` importable, and nothing in this file's folder. See ktransformers/local_chat.py."""
    folder = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != folder]
    spec = importlib.util.find_spec("ktransformers")
    if spec is None or spec.origin is None:  # without an origin it is some folder of that name
        sys.path.insert(0, os.path.dirname(os.path.dirname(folder)))


if __name__ == "__main__" and not __package__:
    _fix_sys_path()


def main() -> int:
    """Serve as the command line says. Returns the exit code."""
    from ktransformers.cli import server_main

    return server_main()


if __name__ == "__main__":
    sys.exit(main())
