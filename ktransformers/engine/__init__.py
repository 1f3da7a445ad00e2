"""Runs a model: builds it, fills the context of each step, runs the step, samples, and gives the loop to callers.

From the bottom up (the linter holds the order):

    model       what was opened: files, config, the skeleton on meta, its checks, card and fingerprint
    media       towers: pictures to hidden states in the rows of a step
    damage      which tensor is damaged when logits are no numbers
    sampling    from logits to a token
    step        one step: context, inputs, graphs, forward, logits
    drafting    models that find draft tokens for a step
    plan        what goes where, and whether it fits; reads no weights
    verify      whether a loaded model computes what transformers would
    parallel    one model in several processes: ranks, tensor_parallel, pipeline
    load        the build: opened -> planned -> loaded -> arranged -> captured
    sequence    one sequence: its answer, its session, its file
    api         LLM, AsyncLLM and the loop behind them

Does not know HTTP, dialects or command lines. Which families of models there are, `models` knows.
"""
