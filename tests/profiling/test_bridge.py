"""The bridge process and its recorders: deaths on either side, what is lost and that it is counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ktransformers.errors import ConfigError
from ktransformers.profiling import recorder as module
from ktransformers.profiling.bridge import Bridge
from ktransformers.profiling.capture import Capture
from ktransformers.profiling.files import ProfileFiles
from ktransformers.profiling.messages import (
    BridgeOptions,
    DropsRecord,
    ProfileMeta,
    RequestRecord,
    StepRecord,
    TokensRecord,
    encode_messages,
)
from ktransformers.profiling.recorder import Recorder
from tests.support.checks.profiles import check_nothing_lost, check_sums, read_profile
from tests.support.engines.fake_runtime import FakeRuntime

META = ProfileMeta(backend="test", version="0", model={"num_layers": 2})


def run_step(recorder: Recorder, step_id: int) -> None:
    """Two rows, of which the last one samples a token of the request "a"."""
    began = time.monotonic_ns()
    recorder.begin_step(step_id, 2, [1])
    recorder.end_step(
        StepRecord(
            epoch=recorder.epoch,
            step_id=step_id,
            began_ns=began,
            ended_ns=time.monotonic_ns(),
            num_rows=2,
            prefill_rows=1,
            num_seqs=1,
            sampled=[("a", 1)],
        )
    )
    recorder.post(TokensRecord(step_id=step_id, time_ns=time.monotonic_ns(), tokens=[("a", step_id, 7 + step_id, 3)]))


def test_steps_reach_the_files_in_order(tmp_path: Path) -> None:
    capture = Capture(tmp_path / "p", META)
    assert Path(f"/proc/{capture.pid}/comm").read_text() == "kt-profile\n"
    recorder = Recorder(capture.endpoint, "engine", runtime=FakeRuntime())
    for step_id in range(300):
        run_step(recorder, step_id)
    recorder.post(RequestRecord(request="a", prompt_len=7, cached_len=0, completion_len=300, finish_reason="length"))
    recorder.close()
    recorder.close()
    capture.stop()
    capture.stop()
    profile = read_profile(tmp_path / "p")
    check_sums(profile)
    check_nothing_lost(profile)
    assert [step["step"] for step in profile.steps] == list(range(300))
    assert profile.answers() == {"a": [3] * 300}
    for token in profile.tokens:
        assert token["experts"] == [[FakeRuntime.expert(token["step"], 1, layer)] for layer in range(2)]
    assert capture.status()["counts"] == {"steps": 300, "tokens": 300, "requests": 1}
    with pytest.raises(ConfigError, match="holds a profile already"):
        Capture(tmp_path / "p", META)


PARENT = """
import sys, time
from pathlib import Path
from tests.profiling.test_bridge import META, run_step
from ktransformers.profiling.capture import Capture
from ktransformers.profiling.recorder import Recorder
from tests.support.engines.fake_runtime import FakeRuntime
capture = Capture(Path(sys.argv[1]), META)
recorder = Recorder(capture.endpoint, "engine", runtime=FakeRuntime())
for step_id in range(50):
    run_step(recorder, step_id)
while capture.status()["counts"].get("tokens") != 50:
    time.sleep(0.01)
print(capture.pid, capture.endpoint, flush=True)
input()
"""


def test_a_profile_ends_in_order_when_its_program_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, tmp_path / "p"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, endpoint = parent.stdout.readline().split()
        parent.kill()
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.01)
    profile = read_profile(tmp_path / "p")
    assert len(profile.tokens) == 50
    assert profile.meta["stopped_unix_ns"] is not None
    assert not Path(endpoint.removeprefix("ipc://")).parent.exists()


def test_a_recorder_whose_bridge_is_gone_counts_and_never_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[bool] = []
    capture = Capture(tmp_path / "p", META, on_death=lambda: died.append(True))
    monkeypatch.setattr(module, "_MAX_WAITING", 20)
    monkeypatch.setattr(module, "DRAIN_SECONDS", 3600.0)  # by hand
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.0)
    recorder = Recorder(capture.endpoint, "engine")
    os.kill(capture.pid, signal.SIGKILL)
    while not died:
        time.sleep(0.01)
    assert not capture.is_alive
    for number in range(3 * module._HIGH_WATER):
        recorder.post(TokensRecord(step_id=number, time_ns=0, tokens=[]))
        recorder._drain([])
    assert recorder._num_unsent > 0
    for number in range(30):
        recorder.post(TokensRecord(step_id=number, time_ns=0, tokens=[]))
    assert recorder._num_dropped == 10
    recorder.close()
    recorder.join()
    capture.stop()


def test_losses_are_in_meta(tmp_path: Path) -> None:
    files = ProfileFiles(tmp_path / "p")
    bridge = Bridge(BridgeOptions(folder="p", meta=META), files)
    bridge.receive(b"\x93garbage", 0.0)
    bridge.receive(encode_messages([DropsRecord("engine 0", 5, 2)]), 0.0)
    bridge.receive(encode_messages([DropsRecord("engine 0", 7, 2), DropsRecord("scheduler", 0, 1)]), 0.0)
    assert bridge.tick(1.0)
    assert not bridge.tick(1.1)
    meta = json.loads((tmp_path / "p" / "meta.json").read_text())
    assert (meta["dropped"]["records"], meta["dropped"]["messages"]) == (7, 4)
    assert meta["stopped_unix_ns"] is None
    bridge.finish()
    assert json.loads((tmp_path / "p" / "meta.json").read_text())["stopped_unix_ns"] == bridge.stopped_unix_ns
