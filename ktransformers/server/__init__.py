"""HTTP: turns requests into generations and their events into responses. Does not know how a model is run.

From the outside in: `main.py` is the script, `lifecycle.py` binds the port (`listening.py`), serves and stops, `run.py`
loads the one model of a server, `app.py` puts routes together. A request passes `telemetry` (its line in the log),
`middleware.py` (path, host, origin, key, size, patience) and `bodies.py` (JSON is measured before it is parsed, and
sorted by the dialect's table); then a dialect in `api` reads it, `answers` prepares it, and a backend (`backend`, with
the processes in `balance`) yields tokens.
`admission.py` counts answers in, by key; `ongoing.py` has each request by its ids while it is in; `event_log.py` and
`journal` keep streams.

    body ── api/DIALECT reads ──> ChatRequest ── prepare ──> PreparedRequest ── steps ──> AnswerStep ── Writer ──> bytes

`utils` makes the backend that a name means. `http` has what requests share below any route (paths, hosts, keys,
fields), `sockets` what the kernel knows of connections. `multi_model` serves several models at one address, in front
of one app for each. Errors have the shape of their path (`responses.py`).
"""
