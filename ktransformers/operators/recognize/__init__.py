"""What modules of `transformers` compute, found by asking them: `probe` says how, the others what is looked for."""
