"""Parsers of the families whose calls have a form of their own, one module for each."""
