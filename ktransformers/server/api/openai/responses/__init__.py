"""OpenAI's /v1/responses: items in, items out, answers that later requests may refer to.

https://platform.openai.com/docs/api-reference/responses. `items` reads the conversation and `tools` what the model may
call, `read` makes the neutral request of them, `output` and `writer` say the answer, `store` keeps it.
"""
