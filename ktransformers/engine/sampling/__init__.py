"""Chooses a token from logits: samplers, constraints, and how little of the logits has to come back.

`sampler.py`: penalties, bias, temperature, top-k, top-p, min-p, then one draw from a counter-based generator keyed by
(seed, position), so that the draw depends on nothing else. `constraints.py`: a mask of the tokens that may come next,
as bits, which llguidance computes beside the next forward pass. `logits_request.py`: what a sampler needs of its row
(the best token, the candidates of top_k, or all of it), said before the step.
"""
