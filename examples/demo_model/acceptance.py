"""How often the draft tokens of the demo model's own layer (mtp.py) are right, on tasks that training never saw.

Our engine answers without draft tokens. At each place of an answer the layer then drafts what an engine would have
drafted there, drawn as the answer was: greedily, or by the random number of the place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
import torch.nn.functional as F
from generators import evaluation
from model import DemoModel, Shape
from mtp import DEEPEST, MtpLayer, hidden_states
from render import prompt
from safetensors.torch import load_file
from tokenizers import Tokenizer

from ktransformers import LLM, SamplingParams
from ktransformers.engine.drafting.draws import draw_drafts
from ktransformers.engine.sampling.sampler import RequestSampler
from ktransformers.kernels.cpu import WorkerPool

MAX_TOKENS = 256


def right_drafts(
    model: DemoModel,
    layer: MtpLayer,
    prompt_ids: list[int],
    answer_ids: list[int],
    params: SamplingParams,
    pool: WorkerPool,
) -> list[tuple[int, int]]:
    """By depth: draft tokens that are right, and all of those behind which the ones before are right."""
    token_ids = torch.tensor([prompt_ids + answer_ids])
    anchors = torch.arange(len(prompt_ids) - 1, token_ids.shape[1] - 2)
    if not len(anchors):
        return [(0, 0)] * DEEPEST
    with torch.no_grad():
        hidden = hidden_states(model, token_ids)
        outs = layer(F.embedding(token_ids[:, 1:-1], model.embed), hidden[:, :-2], anchors[None])
    counts, left = list[tuple[int, int]](), torch.ones(len(anchors), dtype=torch.bool)
    for step, out in enumerate(outs):
        left &= anchors + step + 2 < token_ids.shape[1]
        places = (anchors + step + 2)[left].tolist()
        logits, samplers = F.linear(out[0][left], model.embed), [RequestSampler(params, prompt_ids, len(model.embed))]
        drafts = draw_drafts(logits, samplers * len(places), places, pool, is_first=False)
        is_right = torch.tensor(drafts, dtype=torch.long) == token_ids[0, places]
        counts.append((int(is_right.sum()), len(places)))
        left[left.clone()] = is_right
    return counts


def acceptance(folder: Path, skills: Sequence[str], count: int, seed: int, threads: int) -> dict[str, list[float]]:
    """By way of drawing, and depth: the share of draft tokens that are right, where those before are."""
    if threads:
        torch.set_num_threads(threads)
    model = DemoModel(Shape())
    model.load_hf_state(load_file(folder / "model.safetensors"))
    layer = MtpLayer(Shape(), model)
    layer.load_hf_state(load_file(folder / "mtp.safetensors"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cases = [case for skill in skills for case in evaluation(skill, count, seed)]
    prompts = [tokenizer.encode(prompt(m[:-1], t), add_special_tokens=False).ids for m, t in cases]
    found = dict[str, list[float]]()
    with (
        LLM(model_path=folder, cache_lens=4096, cpu_infer=threads, speculative="off") as llm,
        closing(WorkerPool(1)) as pool,
    ):
        for name, temperature in (("greedy", 0.0), ("0.8", 0.8)):
            params = [
                SamplingParams(temperature=temperature, seed=seed + i, max_tokens=MAX_TOKENS)
                for i in range(len(prompts))
            ]
            answers = [one.token_ids for one in llm.generate(prompts, params)]
            counts = [
                right_drafts(model, layer, given, list(answer), one, pool)
                for given, answer, one in zip(prompts, answers, params, strict=True)
            ]
            found[name] = [
                sum(one[depth][0] for one in counts) / max(sum(one[depth][1] for one in counts), 1)
                for depth in range(DEEPEST)
            ]
    return found
