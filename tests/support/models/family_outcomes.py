"""What becomes of a tiny random model of a family: agreement with `transformers`, or the error that refuses it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import PreTrainedModel, __version__

from ktransformers.config import EngineConfig
from ktransformers.errors import KTransformersError
from ktransformers.models.families import FAMILY_SUPPORT, Refusal
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.family_models import LENGTH, STEPS, NotBuilt, family_model, reaches
from tests.support.models.tiny_models import write_safetensors

TOLERANCE = 5e-5
"""Of the largest logit, fp32 on both sides; why: tests/models/test_agreement.py."""
CHUNK = 7


def check_family(model_type: str, folder: Path, seed: int | None = None) -> None:
    """Assert that a family does what its line in FAMILY_SUPPORT says."""
    said = FAMILY_SUPPORT.get(model_type)
    error = refusal_of(model_type, folder, seed)
    found = "it agrees with transformers" if error is None else f"it is refused: {error}"
    where = "ktransformers/models/families.py"
    assert said is not None, f"transformers {__version__} has {model_type}, of which {where} says nothing; {found}"
    if isinstance(said, Refusal):
        assert error is not None, f"{where} refuses {model_type}, and {found}; write CHECKED there, and `make families`"
        assert re.search(said.says, error), f"{where} refuses {model_type} for another reason; {found}"
    else:
        assert error is None, f"{where} says that {model_type} runs, but {found}"


def refusal_of(model_type: str, folder: Path, seed: int | None = None) -> str | None:
    """The error that refuses a family, ours or that of transformers, which may not build a small one.

    None for a family that runs; then its logits have been compared.
    """
    try:
        model = family_model(model_type, seed)
    except NotBuilt as error:
        return str(error)
    far = {name: reach for name, reach in reaches(model.config) if reach >= LENGTH}
    assert not far, (
        f"{model_type}: sequences of {LENGTH} tokens would not show {far}; see tests/support/models/family_models.py"
    )
    write_safetensors(model, folder)
    try:
        engine = static_engine(EngineConfig(model_path=folder, cache_lens=LENGTH + STEPS, cpu_infer=1))
    except KTransformersError as error:
        return str(error)
    try:
        check_agrees(model, engine)
    finally:
        engine.close()
    return None


def check_agrees(model: PreTrainedModel, engine: StaticEngine) -> None:
    """A prompt at once, then token by token; and all in chunks: near transformers, and equal to each other."""
    count = LENGTH + STEPS
    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids]), use_cache=False).logits[0]

    def run(start: int, end: int) -> torch.Tensor:
        return engine.runner.forward(ids[start:end], start, range(end - start))

    got = torch.cat([run(0, LENGTH), *(run(at, at + 1) for at in range(LENGTH, count))])
    error = float((got - want).abs().max() / want.abs().max())
    assert error <= TOLERANCE, f"logits are off by {error:.1e} of the largest"
    chunks = torch.cat([run(at, min(at + CHUNK, count)) for at in range(0, count, CHUNK)])
    assert torch.equal(chunks, got), f"chunks of {CHUNK} tokens give other logits"
