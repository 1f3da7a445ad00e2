"""Probes of a machine for predictions, which take seconds: `doctor` and `plan` use them."""
