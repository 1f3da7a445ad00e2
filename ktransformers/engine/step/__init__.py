"""One step of the model: its context, inputs, graphs, forward and logits. Knows neither loading nor planning."""
