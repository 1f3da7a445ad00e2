"""Stages that an agent starts, as on other machines: who may ask for one, what it computes, and its end."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from ktransformers.config import EngineConfig, parse_hosts
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.parallel.pipeline.network import local_address, local_interface, rendezvous_store
from ktransformers.engine.parallel.ranks import agent as agent_module
from ktransformers.engine.parallel.ranks.agent import MOST_PENDING, StageAgent, connect, read_secret
from ktransformers.engine.parallel.ranks.driver import Driver
from ktransformers.errors import ConfigError, EngineError, StageLostError
from tests.engine.parallel.test_pipeline import logits_in_steps
from tests.support.models.tiny_models import tiny_model, write_safetensors

SECRET = b"sixteen or more bytes"
ECHO = [sys.executable, "-c", "import os\nwhile data := os.read(0, 100): os.write(1, data)"]


@contextmanager
def agent(command: list[str] | None = None) -> Iterator[StageAgent]:
    made = StageAgent("127.0.0.1", 0, SECRET, command)
    thread = threading.Thread(target=made.serve)
    thread.start()
    try:
        yield made
    finally:
        made.close()
        thread.join()


def config_of(path: Path, agents: list[StageAgent], folder: Path) -> EngineConfig:
    secret = folder / "secret"
    secret.write_bytes(SECRET + b"\n")
    secret.chmod(0o600)
    hosts = ",".join(f"127.0.0.1:{one.port}" for one in agents)
    config = EngineConfig(model_path=path, cache_lens=96, cpu_infer=1, self_check=False)
    return replace(config, stage_hosts=hosts, stage_key_file=secret).resolved()


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_stages_elsewhere_compute_what_one_process_does(num_stages: int, tmp_path: Path) -> None:
    """Also for the driver after that one, whose stages the same agents start anew."""
    model = tmp_path / "model"
    write_safetensors(tiny_model("qwen3_moe", seed=1, num_hidden_layers=num_stages + 1), model)
    plain = EngineConfig(model_path=model, cache_lens=96, cpu_infer=1, self_check=False)
    with closing(build_engine(plain, page_size=8, max_batch_size=4)) as engine:
        want = logits_in_steps(engine)
    with ExitStack() as stack:
        agents = [stack.enter_context(agent()) for _ in range(num_stages - 1)]
        config = config_of(model, agents, tmp_path)
        assert config.pipeline == num_stages
        for _ in range(2):
            with closing(build_engine(config, page_size=8, max_batch_size=4)) as engine:
                assert torch.equal(logits_in_steps(engine), want)


@pytest.mark.exhaustive
def test_a_stage_elsewhere_that_dies(tmp_path: Path) -> None:
    """Its agent starts another one; without the agent that is the end."""
    model = tmp_path / "model"
    write_safetensors(tiny_model("llama", seed=1), model)
    told: list[str] = []
    has_died = threading.Event()

    def on_death(message: str) -> None:
        told.append(message)
        has_died.set()

    with agent() as one:
        config = config_of(model, [one], tmp_path)
        ranks = Driver(config, None, on_death=on_death)
        with closing(build_engine(config, page_size=8, max_batch_size=4, ranks=ranks)) as engine:
            want = logits_in_steps(engine)
            assert one._process is not None
            one._process.kill()
            one._process.wait()
            with pytest.raises(StageLostError):
                logits_in_steps(engine)
            engine.executor.recover()
            assert torch.equal(logits_in_steps(engine), want)
            assert not told
            one.close()  # which ends its process, too
            assert has_died.wait(60)
            with pytest.raises(EngineError, match="no other one can start"):
                engine.executor.recover()
        where = f"127.0.0.1:{one.port}"
        assert told == [
            f"the process of stage 1 at {where} has ended, or the connection to it, and no other one can start: "
            f"no stage at {where} (Connection refused): run `ktransformers stage` there"
        ]


def test_who_knows_the_secret_gets_a_process() -> None:
    with agent(ECHO) as one, connect("127.0.0.1", one.port, SECRET) as first:
        first.sendall(b"hello")
        assert first.recv(5) == b"hello"
        with connect("127.0.0.1", one.port, SECRET) as second:  # which ends the first one's
            assert first.recv(1) == b""
            second.sendall(b"again")
            assert second.recv(5) == b"again"


def test_who_does_not_gets_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), agent(ECHO) as one:
        with pytest.raises(EngineError, match=r"was not convinced .* is --stage_key_file the same"):
            connect("127.0.0.1", one.port, SECRET + b"?")
        with socket.create_connection(("127.0.0.1", one.port)) as silent:
            silent.shutdown(socket.SHUT_WR)
            while silent.recv(100):
                pass
        assert one._process is None
    assert caplog.messages == [
        "127.0.0.1 was refused: it has another secret",
        "127.0.0.1 was refused: the other side closed the connection",
    ]


def greeted(port: int) -> socket.socket:
    """A connection whose handshake has begun, and has come no further."""
    made = socket.create_connection(("127.0.0.1", port))
    assert len(made.recv(43, socket.MSG_WAITALL)) == 43
    return made


def is_closed(connection: socket.socket) -> bool:
    """Waits for it."""
    with suppress(ConnectionResetError):  # what it had sent was not read
        return connection.recv(1) == b""
    return True


@pytest.mark.parametrize("count", [1, 6, MOST_PENDING + 5])
def test_who_says_nothing_keeps_nobody_out(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their time is endless here: a driver must not wait for it to pass, and neither must the end."""
    monkeypatch.setattr(agent_module, "_SECONDS", 1e6)
    with agent(ECHO) as one, ExitStack() as stack:
        silent = [stack.enter_context(greeted(one.port)) for _ in range(count)]
        with connect("127.0.0.1", one.port, SECRET) as driver:
            driver.sendall(b"hello")
            assert driver.recv(5) == b"hello"
        assert len(one._pending) <= MOST_PENDING
        if count > MOST_PENDING:
            assert is_closed(silent[0])  # the oldest have left


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_all_of_a_handshake_has_ten_seconds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """However its bytes come."""
    clock = Clock()
    monkeypatch.setattr(agent_module, "time", clock)
    with caplog.at_level(logging.WARNING), agent(ECHO) as one, greeted(one.port) as dripping:
        for at in (8.0, 9.9):
            clock.now = at
            dripping.sendall(b"x")
        clock.now = 10.1
        dripping.sendall(b"x")
        assert is_closed(dripping)
        with greeted(one.port):
            assert one._process is None
    assert caplog.messages[0] == "127.0.0.1 was refused: it proved nothing within 10 s"


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), agent(ECHO) as one:
        for _ in range(50):
            with greeted(one.port) as stranger:
                stranger.sendall(bytes(64))
                while stranger.recv(100):
                    pass
    assert caplog.messages == ["127.0.0.1 was refused: it has another secret"]


def test_a_signal_ends_it_whoever_is_waiting() -> None:
    code = (
        "import sys; from ktransformers.cli import main; import ktransformers.engine.parallel.ranks.agent as agent;"
        "agent._SECONDS = 1e6; sys.exit(main(sys.argv[1:]))"
    )
    with TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
        command = [sys.executable, "-c", code, "stage", "--port", "0", "--stage_key_file", str(secret)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            with greeted(port) as silent, greeted(port) as dripping:
                dripping.sendall(b"x")
                process.terminate()
                assert process.wait(60) == 0
                assert is_closed(silent)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", r"closed the connection before it had answered.*busy"),
        (b"kt-stage 2\n", r"closed the connection before it had answered.*busy"),
        (b"kt-stage 2\n" + bytes(32), r"closed the connection before it had answered.*busy"),
        (b"kt-stage 2\n" + bytes(64), r"another secret\): is --stage_key_file the same"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", r"is no `ktransformers stage` of this version"),
        (None, r"did not answer within 0 s: it is busy"),
    ],
)
def test_a_driver_blames_the_key_file_for_nothing_else(
    data: bytes | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: what listens does not even accept."""
    monkeypatch.setattr(agent_module, "_SECONDS", 0.2 if data is None else 60.0)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            with other.accept()[0] as connection:
                connection.sendall(data or b"")
                with suppress(OSError):  # a driver that has read enough is gone already
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(100):
                        pass

        thread = threading.Thread(target=answer)
        if data is not None:
            thread.start()
        with pytest.raises(EngineError, match=says) as caught:
            connect("127.0.0.1", other.getsockname()[1], SECRET)
        assert ("key_file" in str(caught.value)) == ("key_file" in says)
        if data is not None:
            thread.join()


def test_where_no_stage_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def hang_up() -> None:
            with other.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(EngineError, match="is no `ktransformers stage` of this version"):
            connect("127.0.0.1", port, SECRET)
        thread.join()
    with pytest.raises(EngineError, match="run `ktransformers stage` there"):
        connect("127.0.0.1", port, SECRET)
    with agent() as one, pytest.raises(ConfigError, match="choose another --port"):
        StageAgent("127.0.0.1", one.port, SECRET)


def test_secrets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match=r"No such file.*openssl rand"):
        read_secret(path)
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="has less than 16 bytes"):
        read_secret(path)
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o644)
    assert read_secret(path) == SECRET
    assert "can be read by others than its owner" in caplog.text
    assert SECRET.decode() not in caplog.text


def test_hosts(tmp_path: Path) -> None:
    assert parse_hosts("10.0.0.1:7900, [fe80::1]:80") == [("10.0.0.1", 7900), ("fe80::1", 80)]
    for text in ("10.0.0.1", ":7900", "a:0", "a:b", "a:1,"):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            parse_hosts(text)
    write_safetensors(tiny_model("llama", seed=1), tmp_path)
    for settings, says in (
        ({"pipeline": 3}, "--pipeline 3 with 1 --stage_hosts: these are all stages but the last one"),
        ({}, "--stage_hosts needs --stage_key_file"),
    ):
        with pytest.raises(ConfigError, match=says):
            EngineConfig(model_path=tmp_path, stage_hosts="a:1", **settings).resolved()  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_meeting_place_listens_at_one_address(address: str) -> None:
    try:
        store = rendezvous_store(address, 2)
    except EngineError as error:
        pytest.skip(str(error))
    store.set("a", "b")
    assert listeners(store.port) == [address]


def listeners(port: int) -> list[str]:
    """The addresses at which sockets of this machine listen on a port, as the kernel says."""
    found = []
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            packed, number = local.split(":")
            if state == "0A" and int(number, 16) == port:
                words = [bytes.fromhex(packed[at : at + 8])[::-1] for at in range(0, len(packed), 8)]
                found.append(socket.inet_ntop(family, b"".join(words)))
    return found


def test_the_way_to_another_machine() -> None:
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert local_interface("127.0.0.1") == "lo"
