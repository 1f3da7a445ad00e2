"""What is published of requests and the service: counts, metrics, traces, lines of the log. Never a text."""
