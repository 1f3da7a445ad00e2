"""ktransformers: run Mixture-of-Experts LLMs that do not fit in VRAM.

    from ktransformers import LLM

    llm = LLM()  # the bundled model; LLM("model.gguf") for your own
    print(llm.chat("What is 17 + 25?")[0].text)

Names load on first use, so that importing the package (the command line does) costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktransformers.core import SamplingParams as SamplingParams
    from ktransformers.core import TokenEvent as TokenEvent
    from ktransformers.engine.api.async_llm import AsyncLLM as AsyncLLM
    from ktransformers.engine.api.llm import LLM as LLM
    from ktransformers.engine.sequence.outputs import RequestOutput as RequestOutput

__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "TokenEvent", "__version__"]

__version__ = "0.2.0"

_HOME = {
    "AsyncLLM": "ktransformers.engine.api.async_llm",
    "LLM": "ktransformers.engine.api.llm",
    "RequestOutput": "ktransformers.engine.sequence.outputs",
    "SamplingParams": "ktransformers.core",
    "TokenEvent": "ktransformers.core",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
