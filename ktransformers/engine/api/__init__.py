"""The API that programs import: `LLM`, `AsyncLLM` and the loop that steps a batch for them.

`batch_loop.py` runs the scheduler and the `PagedExecutor` on a thread of their own, which alone touches them: callers
hand it requests and read events from queues (`queue.SimpleQueue`, `asyncio.Queue`), so that an interrupt or a cancelled
task never meets a half-done step. `llm.py` and `async_llm.py` are the two faces of it; `llm_options.py` reads keywords,
vLLM's too, `option_types.py` checks them, `home.py` knows the process that they were made in.

`LLM.from_engine(Engine)` keeps the static cache and its `Session`: the chat of the terminal, and the oracle of tests.
"""
