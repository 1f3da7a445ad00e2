"""A process that is forked from the one that loaded a model has none of its threads: it is told so, and nothing hangs.

Each script runs in a Python of its own, because forking the test's process would copy its threads' locks.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

HEAD = """
import asyncio, multiprocessing, os, sys, tempfile
from ktransformers import LLM, AsyncLLM
from ktransformers.engine.load.builder import build_engine
from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.errors import EngineError

DEMO = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))))

def expect(name, use):
    try:
        use()
    except EngineError as error:
        assert "forked from it" in str(error) and str(os.getppid()) in str(error), error
        print(name, "refused", flush=True)
    else:
        print(name, "went on", flush=True)

def in_child(run, leave=os._exit):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        run()
        sys.stdout.flush()
        leave(0)
    _, status = os.waitpid(pid, 0)
    print("child", os.waitstatus_to_exitcode(status), flush=True)
"""

PAGED = """
llm = LLM(DEMO, cpu_infer=2, cache_lens=512)
first = llm.generate("Once", temperature=0, max_tokens=4)[0].token_ids
stream = llm.stream("Once", temperature=0, ignore_eos=True)
next(stream)
"""

EVERY = """
def child():
    expect("generate", lambda: llm.generate("a"))
    expect("chat", lambda: llm.chat("a"))
    expect("stream", lambda: llm.stream("a"))
    expect("open stream", lambda: next(stream))
    expect("suspend", lambda: llm.suspend("a"))
    expect("save", lambda: llm.save_session("/tmp/x", [1, 2]))
    expect("engine", lambda: llm.engine)
    print(llm.tokenizer.encode("hello") == ids, repr(llm), flush=True)
    llm.close()
    llm.close()
"""

AFTER = """
assert next(stream).token_id is not None
assert llm.generate("Once", temperature=0, max_tokens=4)[0].token_ids == first
llm.close()
print("parent went on")
"""

REFUSED = ["generate", "chat", "stream", "open stream", "suspend", "save", "engine"]


def run(*parts: str) -> list[str]:
    code = "\n".join(textwrap.dedent(part) for part in (HEAD, *parts))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.exhaustive
@pytest.mark.parametrize("leave", ["os._exit", "sys.exit"])
def test_every_use_in_a_forked_child(leave: str) -> None:
    """sys.exit runs what is registered for the end of a process, which must not touch the parent's model either."""
    said = run(PAGED, "ids = llm.tokenizer.encode('hello')", EVERY, f"in_child(child, {leave})", AFTER)
    wanted = [f"{name} refused" for name in REFUSED]
    assert said == [*wanted, "True LLM(of another process)", "child 0", "parent went on"]


@pytest.mark.exhaustive
def test_a_child_that_drops_the_model_ends() -> None:
    said = run(
        PAGED,
        """
        def child():
            global llm, stream
            del llm, stream
            import gc
            gc.collect()
        in_child(child, sys.exit)
        """,
        AFTER,
    )
    assert said == ["child 0", "parent went on"]


@pytest.mark.exhaustive
def test_multiprocessing_and_the_engine_of_one_sequence() -> None:
    said = run(
        """
        llm = LLM.from_engine(build_engine(EngineConfig(gguf_path=DEMO, cpu_infer=2, cache_lens=256)))
        first = llm.generate("Once", temperature=0, max_tokens=4)[0].token_ids

        def child():
            expect("generate", lambda: llm.generate("a"))
            expect("chat", lambda: llm.chat("a"))
            expect("stream", lambda: llm.stream("a"))
            expect("saved", lambda: llm.saved_nbytes([1]))
            llm.close()

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        print("child", process.exitcode)
        assert llm.generate("Once", temperature=0, max_tokens=4)[0].token_ids == first
        """
    )
    assert said == ["generate refused", "chat refused", "stream refused", "saved refused", "child 0"]


@pytest.mark.exhaustive
def test_asynchronous_models() -> None:
    said = run(
        """
        served = AsyncLLM(DEMO, cpu_infer=2, cache_lens=256)
        async def load():
            return (await served.generate("Once", temperature=0, max_tokens=4)).token_ids
        first = asyncio.run(load())

        def child():
            async def ask(how):
                await how()
            for name in ("generate", "chat"):
                expect(name, lambda: asyncio.run(ask(lambda: getattr(served, name)("a"))))
            expect("start", lambda: asyncio.run(ask(served.start)))
            expect("suspend", lambda: asyncio.run(ask(lambda: served.suspend("a"))))
            asyncio.run(ask(served.aclose))

        in_child(child, sys.exit)
        assert asyncio.run(load()) == first
        asyncio.run(served.aclose())
        """
    )
    assert said == ["generate refused", "chat refused", "start refused", "suspend refused", "child 0"]


@pytest.mark.exhaustive
def test_a_model_loaded_after_the_fork_works() -> None:
    said = run(
        """
        def child():
            with LLM(DEMO, cpu_infer=2, cache_lens=256) as llm:
                print(len(llm.generate("Once", temperature=0, ignore_eos=True, max_tokens=4)[0].token_ids))
        in_child(child, sys.exit)
        """
    )
    assert said == ["4", "child 0"]
