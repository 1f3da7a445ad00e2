"""ktransformers: run Mixture-of-Experts LLMs that do not fit in VRAM.

    from ktransformers import LLM, SamplingParams

    llm = LLM(gguf_path="model.gguf")
    print(llm.generate("Hello", SamplingParams(temperature=0, max_tokens=16))[0].text)

Names load on first use, so that importing the package (the command line does) costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktransformers.core import SamplingParams as SamplingParams
    from ktransformers.engine.llm import LLM as LLM
    from ktransformers.engine.llm import RequestOutput as RequestOutput

__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]

__version__ = "0.1.0"

_HOME = {
    "LLM": "ktransformers.engine.llm",
    "RequestOutput": "ktransformers.engine.llm",
    "SamplingParams": "ktransformers.core",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
