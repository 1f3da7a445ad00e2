"""Runs one step of the model: its context, inputs, graphs, forward and logits. Knows neither loading nor planning.

`context.py` fills a `ForwardContext` (which row belongs to which sequence, which slots it writes, how many positions it
sees); `layout.py` brings hidden states to a layer's device; `forward.py` brings a step's inputs to the GPU once and
runs it; `runner.py` runs one step of any sequences, `executor.py` the scheduler's steps on it.

A decode step on a GPU is replayed: `decode.py` pads its inputs (`decode_inputs.py`) and brings its logits to the host,
`cuda_graph_runner.py` captures it at batch sizes 1, 2, 4, 8, ... and replays the smallest that fits. Steps of several
rows a sequence, of prompts or of draft tokens, have sizes of their own (`StepSize`: rows, sequences, and how many rows'
logits are kept); `graph_sizes.py` finds which of them a model allows. A step in which the host decides something runs
eagerly (`ForwardContext.is_replayable`); the pieces between such decisions are not captured. Rows without a token have
slot -1, so nothing is cached, and length 0, so nothing is attended to. Steps that show pictures (`engine/media`) have
graphs of their own, captured when the first of them comes, unless rows see all of their picture, or layers have pools.
What they call CUDA for is an argument, so tests run them over a stream that is a thread.

`fused_decode.py` leaves the model's own code out where every layer is native, if the logits are the same bits;
`logits_fetch.py` brings back what choosing the token takes; `expert_streaming.py` sets up experts streamed over
PCIe, `hot.py` those in slots of a GPU; `kv_offload.py` copies pages to and from the tiers below; `hidden.py` pools
embeddings.
"""
