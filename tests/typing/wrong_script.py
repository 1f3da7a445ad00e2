"""What mypy has to find: one error in each line that says so, and nowhere else. Never run; see test_typing.py."""

from __future__ import annotations

from typing import assert_type

from ktransformers import LLM, AsyncLLM, SamplingParams

LLM(cache_len=4096)  # wrong
LLM(cache_lens="4096")  # wrong
LLM(5)  # wrong
assert_type(LLM().chat("text")[0].text, int)  # wrong
LLM().generate("text", {"temperature": 0})  # wrong
LLM().generate("text", temprature=0)  # wrong
SamplingParams(temprature=0)  # wrong
for _ in AsyncLLM().generate("text"):  # wrong
    pass
