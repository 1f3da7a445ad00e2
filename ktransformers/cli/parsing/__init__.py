"""Parsing of command lines, the settings behind them, and the exit codes of commands."""
