"""The API that programs import: `LLM`, `AsyncLLM` and the loop that runs steps for them.

`engine_loop.py` runs the scheduler and the `PagedExecutor` on a thread of their own, which alone touches them;
`batch_loop.py` makes text of it: callers submit requests and read events from queues (`queue.SimpleQueue`,
`asyncio.Queue`), so that an interrupt or a cancelled task never meets a half-done step. `generate.py` is one answer of
it. `llm.py` and `async_llm.py` are the two faces of it; `llm_options.py` checks and reads keywords, vLLM's
too, `home.py` knows the process that they were made in.

Chat, the backends in the server's process and a program's own batches differ in how many sequences run at once alone.
"""
