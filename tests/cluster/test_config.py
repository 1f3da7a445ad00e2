"""What `serve --cluster` and a YAML file of Ray Serve say."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from ktransformers.cli.serve.cluster_options import check_cluster_flags, cluster_args
from ktransformers.cli.serve.command import server_parser
from ktransformers.cluster import ClusterArgs, app
from ktransformers.config import EngineConfig
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.keys import KeyLimits
from tests.support.models.demo import DEMO_GGUF

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster" / "serve.yaml"


def told(*flags: str, **server: object) -> ClusterArgs:
    args = parsed(*flags)
    check_cluster_flags(args)
    return cluster_args(args, EngineConfig(gguf_path=DEMO_GGUF), ServerConfig(model_names=("demo",), **server))


def parsed(*flags: str) -> argparse.Namespace:
    args: argparse.Namespace = server_parser().parse_args(list(flags))
    return args


def test_flags_become_what_replicas_are_told() -> None:
    made = told(
        *("--cluster", "127.0.0.1:6379", "--replicas", "2-5", "--replica_cpus", "4", "--replica_memory", "1.5"),
        *("--replica_resources", "numa:0=1", "--replica_resources", "ib=0.5", "--max_batch_size", "6"),
    )
    replicas = made.replicas
    assert (replicas.least, replicas.most, replicas.cpus, replicas.memory) == (2, 5, 4.0, 1.5)
    assert replicas.resources == {"numa:0": 1.0, "ib": 0.5}
    assert (made.engine.cpu_infer, made.engine.use_cuda) == (4, False)
    assert (made.max_imbalance, made.queue_target) == (3, 6.0)
    assert made.balance().max_batch_size == 6


def test_this_machine_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.cli.serve.cluster_options.usable_cores", lambda: 8)
    assert told("--cluster", "--replicas", "3").replicas.cpus == 2.0
    assert told("--cluster", "--replicas", "16").replicas.cpus == 0.5
    assert told("--cluster").replicas.cpus == 8.0


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--replicas", "2"), "--replicas is about replicas"),
        (("--cluster", "--replicas", "3-2"), "1 <= least <= most"),
        (("--cluster", "--replicas", "many"), "--replicas must be a number"),
        (("--cluster", "--replicas", "0"), "1 <= least <= most"),
        (("--cluster", "--replica_cpus", "0"), "--replica_cpus must be positive"),
        (("--cluster", "--replica_resources", "numa"), "NAME=NUMBER"),
    ],
)
def test_what_cannot_be_is_said(flags: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        told(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        ("--state_dir", "/tmp/x"),
        ("--kv_disk_path", "/tmp/x"),
        ("--profile", "/tmp/x"),
        ("--profile_root", "/tmp/x"),
        ("--otlp_traces_endpoint", "http://127.0.0.1:1"),
        ("--backend_type", "transformers"),
    ],
)
def test_flags_without_a_meaning_for_replicas_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError, match="--cluster"):
        told("--cluster", *flags)


def test_json_carries_all_of_it() -> None:
    limits = {"secret": KeyLimits(name="a", rpm=5)}
    made = told("--cluster", "--replicas", "1-2", api_keys=("secret",), key_limits=limits, sampling={"top_k": 5})
    again = ClusterArgs.model_validate_json(made.model_dump_json())
    assert again == made
    assert again.checked() == made
    assert again.server.key_limits["secret"] == limits["secret"]


def test_the_example_says_what_there_is() -> None:
    (application,) = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["applications"]
    assert application["import_path"] == "ktransformers.cluster:app"
    made = ClusterArgs.model_validate(application["args"]).checked()
    assert (made.replicas.most, made.queue_target) == (3, 8.0)
    assert made.server.model_names
    with pytest.raises(ValidationError, match="replicaz"):
        ClusterArgs.model_validate({"replicaz": {}})


def test_keys_of_a_file_come_behind_the_others(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("of-the-file rpm=3\n", encoding="utf-8")
    file.chmod(0o600)
    made = ClusterArgs.model_validate({"server": {"api_keys": ["first"]}, "api_key_file": file}).checked()
    assert made.server.api_keys == ("first", "of-the-file")
    assert made.server.key_limits["of-the-file"].rpm == 3


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ktransformers.cluster.deployments", raising=False)
    with pytest.raises(ConfigError, match=r"ktransformers-engine\[cluster\]"):
        app(ClusterArgs())
