"""Commands about models: pull, models, plan, quantize, imatrix, pack."""
