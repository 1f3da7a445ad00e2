"""Backends, which answer the server's requests: one interface (`base`), one module per backend.

`balance_serve.py` keeps the text and hands the ids to the processes of `server/balance`. The single backends
(`single.py`, `ktransformers.py`, `transformers.py`) take a lock in the order of arrival and run a session on the
worker thread, whose events cross to the event loop through a bounded buffer (`events.py`). `on_demand.py` is a backend
that is started and closed many times, `replayed_events.py` tells again what was told before a restart, `timeline.py`
notes times for traces, `pictures.py` says who reads pictures, `profiler.py` is behind /v1/profile.
"""
