"""From logits to a token: samplers, constraints, and how little of the logits has to come back."""
