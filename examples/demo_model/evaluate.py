"""Held-out score of the demo model, skill by skill: greedy decoding, exact match of the whole answer.

    python examples/demo_model/evaluate.py --backend ktransformers    # our engine, from the GGUF
    python examples/demo_model/evaluate.py --backend transformers     # Hugging Face, from the safetensors
    python examples/demo_model/evaluate.py --drafts --count 10        # instead: how often draft tokens are right

An answer counts when its text, tool calls included, equals the expected one to the last character and ends there.
The tasks are those that training never saw (see generators/base.py). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from acceptance import acceptance
from generators import SKILLS, evaluation
from render import answer_text

from ktransformers.config import DEMO_MODEL_PATH

CHECKPOINT = Path(__file__).resolve().parent / "checkpoint"
MAX_TOKENS = 256
Case = tuple[list[dict], list[dict]]
Answerer = Callable[[list[Case]], list[str]]


def ktransformers_backend(folder: Path, threads: int) -> Answerer:
    from ktransformers import LLM, SamplingParams

    llm = LLM(gguf_path=next(iter(sorted(folder.glob("*.gguf")))), cache_lens=4096, cpu_infer=threads)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

    def answer(cases: list[Case]) -> list[str]:
        outputs = [llm.chat(messages[:-1], params, tools=tools or None)[0] for messages, tools in cases]
        # Tool-call markers are part of the answer; the end token is not.
        return [out.text if out.finish_reason == "stop" else out.text + " (cut off)" for out in outputs]

    return answer


def transformers_backend(folder: Path, batch_size: int = 16) -> Answerer:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def batch(cases: list[Case]) -> list[str]:
        texts = [
            tokenizer.apply_chat_template(m[:-1], tools=t or None, add_generation_prompt=True, tokenize=False)
            for m, t in cases
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        out = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        answers = []
        for ids in out.tolist():
            has_ended = end in ids
            text = tokenizer.decode(ids[: ids.index(end)] if has_ended else ids, skip_special_tokens=False)
            answers.append(text if has_ended else text + " (cut off)")
        return answers

    def answer(cases: list[Case]) -> list[str]:
        # Prompts of like length share a batch, so that padding stays short.
        order = sorted(range(len(cases)), key=lambda i: len(str(cases[i])))
        answers = [""] * len(cases)
        for at in range(0, len(order), batch_size):
            chosen = order[at : at + batch_size]
            for i, text in zip(chosen, batch([cases[i] for i in chosen]), strict=True):
                answers[i] = text
        return answers

    return answer


def score(answer: Answerer, skill: str, count: int, seed: int, show: int) -> float:
    cases = evaluation(skill, count, seed)
    right = 0
    for (messages, _), got in zip(cases, answer(cases), strict=True):
        expected = answer_text(messages[-1])
        right += got == expected
        if got != expected and show > 0:
            show -= 1
            print(f"  {skill}: expected {expected!r}\n  {' ' * len(skill)}  got      {got!r}", flush=True)
    return right / len(cases)


def score_drafts(options: argparse.Namespace) -> dict[str, float]:
    """Print and return the share of draft tokens that are right where those before are, by way of drawing and depth."""
    found = acceptance(options.model or CHECKPOINT, options.skills, options.count, options.seed, options.threads)
    for name, shares in found.items():
        print(f"{name:8}", *(f"depth {depth}: {100 * share:5.1f} %" for depth, share in enumerate(shares, 1)), sep="  ")
    print(json.dumps({"drafts": found, "count": options.count, "seed": options.seed}))
    return {f"{name} {depth}": share for name, shares in found.items() for depth, share in enumerate(shares, 1)}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("ktransformers", "transformers"), default="ktransformers")
    parser.add_argument("--model", type=Path, help="another folder with a GGUF, or with safetensors and tokenizer")
    parser.add_argument("--count", type=int, default=200, help="held-out tasks per skill")
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--skills", nargs="*", choices=tuple(SKILLS), default=list(SKILLS))
    parser.add_argument("--threads", type=int, default=0, help="worker threads of our engine; 0: one per core")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per skill")
    parser.add_argument("--drafts", action="store_true", help="score draft tokens of the model's own layer instead")
    options = parser.parse_args(arguments)
    if options.drafts:
        return score_drafts(options)
    if options.backend == "ktransformers":
        answer = ktransformers_backend(options.model or DEMO_MODEL_PATH, options.threads)
    else:
        answer = transformers_backend(options.model or CHECKPOINT)
    scores = {}
    for skill in options.skills:
        began = time.perf_counter()
        scores[skill] = score(answer, skill, options.count, options.seed, options.show)
        print(f"{skill:12} {100 * scores[skill]:6.1f} %   {time.perf_counter() - began:6.1f} s", flush=True)
    print(json.dumps({"backend": options.backend, "count": options.count, "seed": options.seed, "scores": scores}))
    return scores


if __name__ == "__main__":
    main()
