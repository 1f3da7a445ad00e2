"""Operators that a rule can put in the place of modules: one per role. See `base.Operator` for the contract.

    recorder, comparison               how every check of a model watches modules, and compares two results
    device, gpu_timers, usage          a device by its name; timers; counts
    partial_sums                       parts of a sum in other processes
    base, context                      an operator's life; which row of a step belongs to which sequence
    recognize, wrapper                 what a module of transformers computes, found by asking it; its forward kept
    activation, norm, exact            small ones; what a rule file leaves to torch
    linear                             matrices
    attention, experts, recurrent      mixers and experts
    layers                             whole layers and the loop over them

An operator's life is drawn in `base.py`: planned (its constructor, on meta), loaded (`fill`), bound (`post_load`, with
a `OperatorRuntime`: how long sequences get, what attends and what streams for it), each once, led by
`optimize/apply.py`.

A decoder layer's device is the device of its attention: hidden states come to it and its cache is there. Every operator
hands its result back where its input came from; routed experts cross devices in `submit` and `collect` only.

Does not know rule files, requests or which family a model is of.
"""
