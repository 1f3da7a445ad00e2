"""Drafters of the engine: models that find draft tokens, which the target's step then checks.

    draws.py         tokens from a draft model's logits, by the numbers that the target's sampler takes
    drafter.py       which tokens of which sequences a draft model has to run, in its own cache of the target's pages
    draft_model.py   a small model of the same tokenizer
    mtp.py           the target's own layer for multi-token prediction, and Gemma 4's assistant
    mtp_layers.py    several of them, each of which makes one draft token
    dspark.py        DeepSeek's head of several layers, of which one pass makes a block of draft tokens

Whatever they find, answers are the same: see engine/step/drafts.py.
"""
