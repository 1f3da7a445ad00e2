"""Decides who runs next: admit, chunk, batch, preempt, finish, abort. Plain Python on ids and counts; never imports
torch.

`scheduler.py` holds the truth of every request (`sequence.py`) and plans steps (`batch.py`, over `page_tables.py`);
`records.py` is what it exchanges with an engine and with callers. How many rows prompts get beside decodes:
`prefill_throttle.py` on the curves of `step_times.py`, `passing.py`. Prefixes and states: `page_tables.py`,
`prefixes.py`, `snapshots.py`, which keeps states before the end of a prompt, every so many tokens, and at the end of a
growing answer. `drafting` says which draft tokens a step runs. Pages below the cache: `kv_offload.py`,
`tier_records.py`, `tier_rates.py`. `limits.py` is the one check of a request's size; `integrity.py` is for tests.

Does not know text, time (it is told), tensors or processes.
"""
