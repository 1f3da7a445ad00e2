"""The way from a neutral request to neutral events, which every dialect of the API shares. Knows no wire format.

`requests.py` is what dialects read into; `pictures.py` has pictures read, then `prompts.py`, `history.py` and
`fitting.py` make prompt ids of turns; `constraints.py`, `forced.py` and `tool_choices.py` say what an answer must look
like; `prepared_request.py` puts all of it together and has the backend check it. `respond.py` admits and runs it,
`choices.py` makes `events.py` of tokens. `resumable.py` writes a stream that outlives its connection to a log,
`replay.py` has the next server ask the same again; `embed.py` is the same way for vectors.
"""
