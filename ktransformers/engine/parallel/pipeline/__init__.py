"""Runs one model over several processes, each with neighbouring layers: stages, between which hidden states travel.

    first stage ── hidden states [1, T, H] ──> next ── ... ──> last stage: norm, head, sampling; it leads

stages.py cuts a skeleton and says where; link.py hands hidden states on.
"""
