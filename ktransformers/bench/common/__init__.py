"""Shared parts of all measurements: tables and records, the machine, clocks, random weights."""
