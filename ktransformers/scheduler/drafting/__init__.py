"""Speculative decoding: draft tokens that a step runs behind a known one, and accepts as far as they are right.

    prompt_lookup.py   drafts what followed the last tokens where they stood before in the sequence
    engine_drafts.py   has the engine draft, by a model, and knows what that takes
    acceptance.py      how often draft tokens like these were accepted of late
    row_costs.py       what steps of so many rows take
    choice.py          how many draft tokens each row of a step gets, so that it pays
    account.py         whether draft tokens are looked for at all, by what they gained and cost of late
    planner.py         looks for them, and learns from steps

A draft token is accepted when it equals the token that is sampled there anyway: sampling depends on the seed and the
position, and a row on nothing beside it. So drafting changes no answer, only how many steps it takes.
"""
