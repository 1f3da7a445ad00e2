"""Talk to the server with OpenAI's client (pip install openai):

ktransformers serve                       # in one terminal; a model's file or folder can follow
python examples/server_client.py [URL]    # in another
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:10002/v1"
with OpenAI(base_url=url, api_key="none") as client:  # the key counts when the server has --api_key
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "What is 17 + 25?"}])
    print(answer.choices[0].message.content)

    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Who are you?"}], stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
