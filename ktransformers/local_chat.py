"""`python ktransformers/local_chat.py --model_path ... --gguf_path ...`: the same as `ktransformers chat`."""

import importlib.util
import os
import sys


def _fix_sys_path() -> None:
    """Make `ktransformers` importable, and nothing in its folder.

    Running this file puts its folder first on sys.path, where `kernels`, `tokenizer` and others would be found in place
    of packages of those names. The folder above is added only when no `ktransformers` is installed: an installed one
    (also an editable one of this very checkout) has the compiled extension, a bare checkout does not.
    """
    folder = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != folder]
    spec = importlib.util.find_spec("ktransformers")
    if spec is None or spec.origin is None:  # without an origin it is some folder of that name
        sys.path.insert(0, os.path.dirname(folder))


if __name__ == "__main__" and not __package__:
    _fix_sys_path()

from ktransformers.models.registry import custom_models, default_optimize_rules  # noqa: E402 - the path comes first

__all__ = ["custom_models", "default_optimize_rules", "main"]


def main() -> int:
    """Chat as the command line says. Returns the exit code."""
    from ktransformers.cli import local_chat_main

    return local_chat_main()


if __name__ == "__main__":
    sys.exit(main())
