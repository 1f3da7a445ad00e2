"""Decides who runs next: admit, chunk, batch, preempt, finish, abort. Plain Python on ids and counts; never imports
torch.

`scheduler.py` holds the truth of every request (`sequence.py`) and plans steps (`batch.py`, over `page_tables.py`);
`records.py` is what it exchanges with an engine, `updates.py` what callers hear. How many rows prompts get beside
decodes: `prefill_throttle.py` on the curves of `step_times.py`, `passing.py`, `shared_prompts.py`. Prefixes and states:
`prefixes.py`, `snapshots.py`, which keeps states before the end of a prompt, every so many tokens, and at the end of a
growing answer. Draft tokens behind the known one of a decode: `drafting`. Pages below the cache: `kv_offload.py`,
`tier_records.py`, `tier_rates.py`. `limits.py` is the one check of a request's size.

Does not know text, time (it is told), tensors or processes.
"""
