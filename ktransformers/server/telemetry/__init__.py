"""Figures of requests and the service: counts, metrics, traces, lines of the log. Never a text.

`request_log.py` writes a request's line when it is over and has `traces.py` make spans of it, which `otlp.py` sends:
it alone imports OpenTelemetry's SDK. `activity.py` writes the lines about the service, `request_metrics.py` and
`metrics.py` count, `status_window.py` is what /v1/status shows.
"""
