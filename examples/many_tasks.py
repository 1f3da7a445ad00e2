"""Many tasks, one model: python examples/many_tasks.py [MODEL]"""

import asyncio
import sys

from ktransformers import AsyncLLM, SamplingParams

QUESTIONS = ["What is 17 + 25?", "Reverse the word: kernel", "Sort these numbers: 9, 3, 27, 14."]


async def ask(llm: AsyncLLM, question: str) -> None:
    """One user. The tokens of all of them are computed in the same steps."""
    text = ""
    async for event in llm.chat(question, SamplingParams(temperature=0, max_tokens=64)):
        text += event.text  # comes as it is generated
    print(f"{question} -> {text}")


async def main() -> None:
    async with AsyncLLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        await asyncio.gather(*(ask(llm, question) for question in QUESTIONS))

        # Awaited instead of iterated, an answer is the whole output.
        output = await llm.chat("Who are you?")
        print(output.text, output.finish_reason)

        # A task that is cancelled, or a loop that is left, ends its answer: nothing more is computed for it.
        async for event in llm.generate("Once upon a time", SamplingParams(max_tokens=10_000, ignore_eos=True)):
            if event.stats.completion_len == 5:
                break


asyncio.run(main())
