"""Whether a loaded model computes what transformers would: reference modules, hooks, comparisons."""
