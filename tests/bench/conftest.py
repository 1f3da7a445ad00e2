"""What every test of a measurement needs."""

from tests.support.logs import logging_as_it_was

__all__ = ["logging_as_it_was"]
