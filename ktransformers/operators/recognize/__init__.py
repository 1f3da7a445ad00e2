"""Recognizes what modules of `transformers` compute by running them: `probe` says how, the others what is
looked for.
"""
