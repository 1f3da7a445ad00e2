"""Decides WHICH operator goes where: rule files (rules) -> checked plan (plan) -> model with operators in place
(apply).

- Rules: `document.py` and `includes.py` read files, `rules.py` matches, `aliases.py` has upstream's
  names, `unmatched.py` says why a rule decided nothing.
- Plan: `plan.py` is the pure function from module tree and rules to placements; `layer_devices.py`, `fill.py`,
  `tied.py`, `streaming.py` and `hot_slots.py` decide devices, what is left of GPUs, shared weights, streamed and hot
  experts.
- What it means: `summary.py`, `report.py`, `decode_bound.py`, `predict.py`, `machine_speed.py`.
- `apply.py` puts operators in place and leads their lives.

`optimize_rules` holds the shipped rule files. Does not know steps, requests or how a kernel works.
"""
