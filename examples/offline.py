"""Ask a model from Python: python examples/offline.py [MODEL]"""

import sys

from ktransformers import LLM, SamplingParams

# None is the small model that comes with the package. A GGUF file, a folder, or the id of a pulled model work too.
model = sys.argv[1] if len(sys.argv) > 1 else None

with LLM(model) as llm:
    # A string is a question of the user. The answer comes as a list with one entry per question.
    print(llm.chat("What is 17 + 25?")[0].text)

    # Many questions in one call share the steps of the model: much faster than one after the other.
    questions = [f"What is {n} + 25?" for n in range(10, 18)]
    for question, output in zip(questions, llm.chat(questions), strict=True):
        print(question, output.text)

    # A conversation is a list of messages. What it shares with the ones before is not computed again.
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    messages += [{"role": "assistant", "content": "17 + 25 = 42."}, {"role": "user", "content": "Who are you?"}]
    print(llm.chat(messages)[0].text)

    # The answer as it comes. `stream` and `generate` take plain text, without the chat template.
    for event in llm.stream("The capital of France is", SamplingParams(temperature=0, max_tokens=16)):
        print(event.text, end="", flush=True)
    print()

    # Sampling. The parameters of an output hold the seed that was drawn: given again, they make the same answer.
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=16)
    first = llm.generate("Once upon a time", params)[0]
    again = llm.generate("Once upon a time", first.params)[0]
    assert first.text == again.text
    print(first.params)
