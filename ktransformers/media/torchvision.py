"""Makes an installed torchvision importable, where it was built for another torch than the one that is here.

The package index has one wheel of torchvision, built for CUDA. Beside a torch for the CPU its compiled operators cannot
be loaded, and then `import torchvision` fails, and with it every model class of transformers. Nothing here needs these
operators: boxes and regions are for detection. Declared by name they let the rest of it be imported.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from pathlib import Path
from typing import Any, cast

__all__ = ["prepare_torchvision"]

_log = logging.getLogger(__name__)

_DECLARATION = re.compile(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"')

_kept: list[object] = []  # a library takes its operators along when it goes


def prepare_torchvision() -> None:
    """Prepare for `import torchvision`, by transformers. Safe to call twice; does nothing where there is none.

    Logs a line where its operators cannot be loaded. One that fails all the same is hidden, as if it were not there.
    """
    if "torchvision" in sys.modules:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    import torch

    folder, operators = Path(spec.origin).parent, cast(Any, torch.ops)
    try:
        operators.load_library(str(folder / "_C.so"))
    except OSError:
        _declare(folder)
        try:
            importlib.import_module("torchvision")
        except (ImportError, RuntimeError, AttributeError) as error:
            _log.warning("torchvision cannot be imported beside this torch and is left aside: %s", error)
            for name in [one for one in sys.modules if one.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            sys.modules["torchvision"] = None  # type: ignore[assignment]


def _declare(folder: Path) -> None:
    import torch

    library_of: Any = torch.library.Library
    _log.info(
        "torchvision's operators were built for another torch, and are not needed: its transforms work without them"
    )
    library = library_of("torchvision", "DEF")
    text = (folder / "_meta_registrations.py").read_text(encoding="utf-8")
    for name in dict.fromkeys(_DECLARATION.findall(text)):
        library.define(f"{name}(Tensor input) -> Tensor")
    _kept.append(library)
