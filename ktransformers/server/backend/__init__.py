"""Backends, which answer the server's requests: one interface (`base`), one module per backend in `interfaces`.

`balance_serve.py` keeps the text and hands the ids to the processes of `server/balance`. `transformers.py`, and
`ktransformers.py` on top of it, run one request at a time on a thread of this process, whose events cross to the event
loop through a bounded buffer (`events.py`). `on_demand.py` is a backend that is started and closed many times. Beside
them, `replayed_events.py` tells again what was told before a restart, `timeline.py` notes times for traces, and
`profiler.py` is behind /v1/profile.
"""
