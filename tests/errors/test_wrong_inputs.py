"""Every wrong input is one line that points at the right place, with its exit code and nothing on standard output.

Commands run in this process, on real files, up to the point where weights would be loaded or measured: getting there
with a wrong input is a failure. `{}` in a row's arguments is the folder of wrong files.
"""

from __future__ import annotations

import argparse
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ktransformers.cli import build_parser, local_chat_main, main, server_main

QUIET = ("--log_level", "error")
FAILS, USAGE = 1, 2


@dataclass(frozen=True)
class Row:
    """argv: as typed, separated by spaces. says: what the line must contain, parts separated by " | "."""

    argv: str
    says: str
    code: int = USAGE

    def __str__(self) -> str:
        return self.argv


class WouldLoad(Exception):
    """The command was about to load weights, or to measure."""


def _would_load(*args: object, **kwargs: object) -> None:
    raise WouldLoad


@pytest.fixture(autouse=True)
def _no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "ktransformers.engine.load.stages.load_plan",
        "ktransformers.engine.load.reference._from_safetensors",
        "ktransformers.engine.load.reference._filled",
        "ktransformers.server.balance.supervisor.Supervisor.start",
        "ktransformers.bench.operations.machine_facts",
    ):
        monkeypatch.setattr(name, _would_load)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))


PROGRAMS: dict[str, Callable[[Sequence[str]], int]] = {
    "local_chat.py": local_chat_main,
    "main.py": server_main,
}


def run(argv: Sequence[str]) -> int | str | None:
    """The exit code of a command, or of one of the two scripts."""
    try:
        return PROGRAMS[argv[0]](argv[1:]) if argv and argv[0] in PROGRAMS else main(argv)
    except SystemExit as end:
        return end.code


def check(argv: Sequence[str], says: Sequence[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    got = run(argv)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    assert "Traceback" not in err
    assert len(err) < 700, err
    for part in says:
        assert part in err
    assert got == code


def rows(command: str, cases: Sequence[tuple[str, str]], code: int = USAGE) -> list[Row]:
    """One row per (argument, message), `command` with the argument in the place of `@`."""
    codes = {**dict.fromkeys(BROKEN_WEIGHTS, FAILS), **dict.fromkeys(NO_MODELS, USAGE)}
    return [Row(command.replace("@", argument), says, codes.get(argument, code)) for argument, says in cases]


BROKEN_WEIGHTS = (
    "config_only", "more_layers", "wider", "missing_tensor", "extra_tensor", "wrong_shape", "truncated_safetensors",
    "shard_missing", "index_broken",
)  # fmt: skip
"""Folders whose config is right: loading them fails."""

NO_MODELS = ("is_safetensors.gguf", "no_such_file.gguf", "config_missing")
"""What names no model at all."""


WEIGHT_FILES = [
    ("empty.gguf", "empty.gguf is empty"),
    ("text.gguf", "text.gguf is not a GGUF file: it begins with 'Entry not found'"),
    ("html.gguf", "html.gguf is an HTML page: the download failed"),
    ("xml.gguf", "xml.gguf is an XML page: the download failed"),
    ("pointer.gguf", "pointer.gguf is a Git LFS pointer: the file itself was not downloaded; run `git lfs pull`"),
    ("pickle.bin", "pickle.bin is a PyTorch pickle | not read; convert the model to safetensors or GGUF"),
    ("zipped.pt", "zipped.pt is a PyTorch pickle"),
    ("plain.zip", "plain.zip is a zip archive; unpack it"),
    ("packed.gguf.gz", "packed.gguf.gz is a gzip archive; unpack it"),
    ("old.gguf", "old.gguf is a GGML file from before GGUF; convert the model again"),
    ("binary.gguf", "binary.gguf is not a GGUF file: it begins with the bytes 7f 45 4c 46"),
    ("zeros.gguf", "zeros.gguf begins with zeros: its download did not finish"),
    ("big_endian.gguf", "big_endian.gguf: a big-endian GGUF file"),
    ("version1.gguf", "version1.gguf: GGUF version 1 is not supported; convert the model again"),
    ("version9.gguf", "version9.gguf: GGUF version 9 is unknown"),
    ("four_bytes.gguf", "four_bytes.gguf: | truncated or damaged"),
    ("no_model.gguf", "no_model.gguf: | general.architecture"),
    ("truncated.gguf", "truncated.gguf: the file is truncated or damaged: | KiB missing of the 1.4 MiB"),
    ("header_only.gguf", "header_only.gguf: | truncated or damaged"),
    ("is_safetensors.gguf", "holds no config.json"),
    ("pointer.safetensors", "pointer.safetensors is a Git LFS pointer"),
    ("text.safetensors", "text.safetensors is not a safetensors file: it begins with 'not weights"),
    ("no_such_file.gguf", "no_such_file.gguf does not exist"),
]
FOLDERS = [
    ("nothing", "nothing is an empty folder"),
    ("prose", "prose holds neither .gguf nor .safetensors files, only README.md, notes.txt"),
    ("pickles", "pickles holds a PyTorch pickle (pytorch_model.bin), which is not read"),
    ("several", "several: holds 2 GGUF models (a.gguf, b.gguf); pass the path of one file"),
    ("both", "both: holds both GGUF and safetensors weights"),
    ("shards", "m-00002-of-00003.gguf, m-00003-of-00003.gguf of 3 shards missing; download them"),
    ("config_missing", "config_missing holds no config.json"),
]
MODELS = [
    ("config_not_json", "config_not_json/config.json cannot be read as JSON: | line 1"),
    ("config_list", "config_list/config.json holds no JSON object"),
    ("config_empty", "config_empty/config.json is empty"),
    ("config_pointer", "config_pointer/config.json is a Git LFS pointer: the file itself was not downloaded"),
    ("config_html", "config_html/config.json is an HTML page: the download failed"),
    ("config_without_type", "config_without_type/config.json names no model_type"),
    ("config_unknown_type", "does not know model_type 'qwen3_mo'; did you mean qwen3_moe?"),
    ("config_new_type", "does not know model_type 'zzz_unheard_of'; a newer version may know it"),
    ("config_custom_code", "config_custom_code/config.json: the model needs Python code | --trust_remote_code"),
    ("config_image_model", "is no language model that answers in text"),
    ("config_encoder_decoder", "model type t5 is no language model"),
    ("config_wrong_field", "config_wrong_field/config.json cannot be used: | hidden_size"),
    ("config_no_heads", "num_attention_heads 0"),
    ("config_negative_layers", "num_hidden_layers -1"),
    ("config_only", "config_only holds neither .gguf nor .safetensors files, only config.json"),
    ("more_layers", "tensors are missing or of another shape: tensor model.layers.2. | and 7 more"),
    ("wider", "tensor model.embed_tokens.weight has shape (160, 64), the model's config needs (160, 128)"),
    (
        "missing_tensor",
        "1 tensors are missing | model.layers.0.self_attn.q_proj.weight is missing from the",
    ),
    ("extra_tensor", "1 tensors are read by no module: model.layers.0.self_attn.z_proj.weight"),
    ("wrong_shape", "model.layers.0.self_attn.q_proj.weight has shape (3, 64), the model's config needs (128, 64)"),
    ("quip", "quantized with 'quip' are not supported"),
    ("truncated_safetensors", "model.safetensors: the file is truncated or damaged: 97.7 KiB missing of the 1.4 MiB"),
    ("shard_missing", "model-00002-of-00002.safetensors of the 2 files | missing; download them"),
    ("index_broken", "model.safetensors.index.json is not valid JSON"),
    ("generation_config_broken", "generation_config.json cannot be used"),
    ("tokenizer_not_json", "tokenizer_not_json/tokenizer.json cannot be read as JSON"),
    ("tokenizer_pointer", "tokenizer_pointer/tokenizer.json is a Git LFS pointer"),
    ("tokenizer_other_json", "the tokenizer in | tokenizer_other_json cannot be loaded"),
    ("tokenizer_config_not_json", "tokenizer_config.json cannot be read as JSON"),
    ("tokenizer_without_vocabulary", "has no vocabulary; copy tokenizer.json"),
    ("tokenizer_unknown_class", "cannot be loaded: tokenizer.json is missing"),
    ("no_such_folder", "no_such_folder does not exist"),
    ("good.gguf", "good.gguf must be a folder that holds config.json; a weight file goes to --gguf_path"),
]
RULES = [
    ("empty.yaml", "empty.yaml: holds no rules"),
    ("not_a_list.yaml", "not_a_list.yaml:1: must be a list of rules"),
    ("not_yaml.yaml", "not_yaml.yaml:2: is not valid YAML"),
    ("unknown_class.yaml", "unknown_class.yaml:2 (rule 1): | did you mean | KTransformersLinear?"),
    ("foreign_class.yaml", "foreign_class.yaml:2 (rule 1): | no_such_package | --trust_rules"),
    ("bad_regex.yaml", "bad_regex.yaml:1 (rule 1): match.name '(' is not a regular expression"),
    ("unknown_key.yaml", "unknown_key.yaml:1 (rule 1): unknown key 'nme' in match; did you mean name?"),
    ("unknown_rule_key.yaml", "unknown_rule_key.yaml:2 (rule 1): unknown key 'replcae'"),
    ("no_match.yaml", "no_match.yaml:1 (rule 1): a rule needs the key 'match'"),
    ("bad_device.yaml", "bad_device.yaml:2 (rule 1): generate_device must be cpu, cuda or cuda:N, got 'tpu'"),
    ("bad_kwarg.yaml", "bad_kwarg.yaml:2 (rule 1): unknown key 'nmu_bits'"),
    ("idle.yaml", "idle.yaml: no rule replaces the routed experts"),
    ("tag.yaml", "tag.yaml:1 (rule 1): the YAML tag"),
    ("twice.yaml", "twice.yaml:2 (rule 1): the key 'match' stands here twice (first in line 1)"),
    ("binary.yaml", "binary.yaml:1: is not UTF-8 text"),
    ("none.yaml", "--optimize_config_path | rules/none.yaml does not exist"),
    ("", "rules: cannot be read: it is a folder"),
]
PROJECTORS = [
    ("{}/good.gguf", "good.gguf: it holds a model of qwen3moe, not a projector for pictures"),
    ("{}/truncated.gguf", "truncated.gguf: the file is truncated or damaged"),
    ("{}/no_tokenizer/model.safetensors", "model.safetensors is a safetensors file, and a GGUF file is wanted here"),
    ("{}/is_gguf.safetensors", "is_gguf.safetensors: it holds a model of qwen3moe"),
]
SERVE = "serve {}/good.gguf --port 0 "
FLAGS = [
    *rows("@", [("chta", "chta"), ("bench", "WHAT"), ("bench operation", "operation")], USAGE),
    Row("chat --modelpath x", "unknown argument --modelpath; did you mean --model_path?", USAGE),
    Row("main.py --prot 1", "unknown argument --prot; did you mean --port?", USAGE),
    Row("local_chat.py --prompt-fil x", "unknown argument --prompt_fil; did you mean --prompt_file?", USAGE),
    Row("chat --cpu_prefill fp4", "--cpu_prefill: invalid choice: 'fp4'", USAGE),
    Row("chat --log_level loud", "--log_level: invalid choice: 'loud'", USAGE),
    Row("plan {}/good.gguf --attention_backend flash", "--attention_backend: invalid choice: 'flash'", USAGE),
    Row("doctor --cores 3", "unknown argument --cores", USAGE),
    Row("chat --cpu_quant q2_k", "--cpu_quant q2_k is not one of q8_0"),
    Row("chat --mode long_context", "--mode long_context is not supported"),
    Row("bench offline --synthetic nothing", "nothing"),
    Row("bench offline --layers 3", "--layers cuts a --synthetic shape"),
    Row("bench offline {}/good.gguf --decode ,", "--decode must be positive numbers"),
    Row("bench offline {}/no_such_file", "no_such_file does not exist"),
    *rows(
        "chat --gguf_path {}/good.gguf --prompt_file @",
        [
            ("{}/prompt_empty.txt", "prompt_empty.txt is empty"),
            ("{}/prompt_binary.txt", "prompt_binary.txt is not UTF-8 text"),
            ("{}/prompt_large.txt", "prompt_large.txt has more than 32 MiB"),
            ("{}/no_prompt.txt", "no_prompt.txt: No such file"),
            ("{}/nothing", "nothing: it is a folder, not a file"),
            ("/dev/null", "/dev/null"),
        ],
    ),
    *rows(
        SERVE + "@",
        [
            ("--backend_type other", "--backend_type other is not one of"),
            ("--kv_disk_size_GB 5", "--kv_disk_size_GB bounds the files in --kv_disk_path"),
            ("--kv_disk_path {}/good.gguf", "is no folder"),
            ("--model_path {} --gguf_path {}/good.gguf", "together say too much"),
            ("--model_name ,", "--model_name must not be empty"),
            ("--host 256.1.1.1", "cannot listen on 256.1.1.1"),
            ("--port 70000", "--port must be between 0 and 65535, got 70000"),
            ("--api_key a,,b", "an API key must not be empty"),
            ("--api_key_file {}/keys_empty", "keys_empty holds no key"),
            ("--api_key_file {}/keys_binary", "keys_binary cannot be read: it is not UTF-8 text"),
            ("--api_key_file {}/no_keys", "no_keys cannot be read: No such file"),
            ("--ssl_keyfile {}/keys_empty", "TLS needs both --ssl_keyfile and --ssl_certfile"),
            ("--ssl_keyfile {}/none --ssl_certfile {}/keys_empty", "--ssl_keyfile | none is not a file"),
            ("--ssl_keyfile {}/keys_empty --ssl_certfile {}/keys_empty", "cannot be used"),
            ("--backend_type transformers --cpu_quant q8_0", "--cpu_quant has no meaning here"),
            ("--max_batch_size 0", "--max_batch_size must be between 1 and 65536, got 0"),
            ("--max_batch_size 99999999999", "--max_batch_size must be between 1 and 65536"),
            ("--page_size -1", "--page_size must be between 1 and 65536, got -1"),
            ("--page_size 99999999", "--page_size must be between 1 and 65536, got 99999999"),
        ],
    ),
    *rows("serve {}/@ --port 0", [("no_tokenizer", "no_tokenizer holds no tokenizer (tokenizer.json | --model_path")]),
    *rows("main.py --port 0 --backend_type ktransformers --model_path {}/@", [("no_tokenizer", "holds no tokenizer")]),
    *rows("main.py --port 0 --backend_type transformers --model_path {}/@", [("no_tokenizer", "holds no tokenizer")]),
    *rows("serve {}/@ --port 0", [*WEIGHT_FILES[:2], *FOLDERS[:2]], FAILS),
    *rows("local_chat.py --model_path {}/@", [MODELS[0], MODELS[-2]]),
    *rows("bench offline {}/@", [*WEIGHT_FILES[1:3], FOLDERS[0]], FAILS),
    *rows("@", [("plan /dev/null", "/dev/null is a device"), ("chat --model_path /dev/null", "/dev/null is a device")]),
    *rows(
        "@",
        [("serve /dev/null --port 0", "/dev/null is a device"), ("bench offline /dev/null", "/dev/null is a device")],
    ),
    Row("bench operations --only sine", "--only sine is not one of"),
    *rows("bench operations --threads @", [("5000", "--threads 5000 is far beyond this machine's | cores")]),
    *rows("chat --cpu_infer @", [("100000", "--cpu_infer 100000 is far beyond this machine's | cores")]),
]
TABLE = [
    *FLAGS,
    *rows("plan {}/@", WEIGHT_FILES, FAILS),
    *rows("chat --gguf_path {}/@", FOLDERS, FAILS),
    *rows("chat --model_path {}/@", MODELS),
    *rows("chat --gguf_path {}/good.gguf --mmproj @", PROJECTORS[:1]),
    *rows("plan {}/good.gguf --mmproj @", PROJECTORS[::3]),
    *rows("plan {}/good.gguf --mmproj @", PROJECTORS[1:3], FAILS),
    *rows("plan {}/good.gguf --strict --optimize_config_path {}/rules/@", RULES),
]


def filled(text: str, folder: Path) -> list[str]:
    argv = [part.replace("{}", str(folder)) for part in text.split()]
    takes_level = argv[:1] != ["bench"] or argv[1:2] == ["offline"]
    return [*argv, *QUIET] if argv[1:] and takes_level and "--log_level" not in argv else argv


@pytest.mark.every(5)
@pytest.mark.parametrize("row", TABLE, ids=str)
def test_is_one_line_that_points_at_the_place(row: Row, wrong_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(filled(row.argv, wrong_files), row.says.split(" | "), row.code, capsys)


Command = tuple[str, ...]


def _leaves(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command that has no further ones below it, with its parser."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield path, parser
    for action in below:
        for name, child in action.choices.items():
            yield from _leaves(child, (*path, name))


MODEL_OF = {
    ("chat",): ("--gguf_path", "{}/good.gguf"),
    ("serve",): ("{}/good.gguf", "--port", "0"),
    ("plan",): ("{}/good.gguf",),
    ("bench", "operations"): (),
    ("bench", "offline"): ("{}/good.gguf",),
}
WRONG_FOR_BOTH = ("text", "", "nan", "-1")
ALLOWED = {("top_k", "-1"), ("seed", "-1"), ("layers", "-1")}
"""top_k -1 means all; any number is a seed; --layers belongs to --synthetic, which has its own rows."""


def _number_flags() -> list[tuple[tuple[str, ...], str, str, bool]]:
    """(command, flag, wrong value, whether argparse refuses it), for every flag that takes a number."""
    found = []
    for path, parser in _leaves(build_parser()):
        for action in parser._actions if path in MODEL_OF else ():
            if action.type not in (int, float):
                continue
            values = [*WRONG_FOR_BOTH, *(("1.5", "9" * 20) if action.type is int else ("inf",))]
            for value in values:
                if (action.dest, value) not in ALLOWED:
                    is_usage = value in ("text", "") or (action.type is int and value in ("nan", "1.5"))
                    found.append((path, action.option_strings[0], value, is_usage))
    return found


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("path", "flag", "value", "is_usage"),
    _number_flags(),
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else repr(part),
)
def test_flags_that_take_numbers(
    path: tuple[str, ...],
    flag: str,
    value: str,
    is_usage: bool,
    wrong_files: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = filled(" ".join([*path, *MODEL_OF[path]]), wrong_files)
    name = (
        flag if is_usage else flag.removeprefix("--")
    )  # sampling's ranges are the API's too, where there are no dashes
    check([*argv, flag, value], [name], USAGE, capsys)


def test_there_are_as_many_as_were_promised() -> None:
    assert len(TABLE) + len(_number_flags()) >= 130
    assert len(TABLE) >= 130


@contextmanager
def without_privileges() -> Iterator[None]:
    """As a user who is not root, for whom permissions count."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "argv",
    [
        "chat --model_path {}",
        "chat --gguf_path {}",
        "serve {} --port 0",
        "plan {}",
        "bench offline {}",
        "bench offline {}/m.gguf",
        "chat --gguf_path {}/m.gguf",
        "plan {}/m.gguf",
    ],
)
def test_a_folder_without_permission(argv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    (locked / "m.gguf").write_bytes(b"GGUF")
    locked.chmod(0)
    try:
        with without_privileges():
            check(filled(argv, locked), ["locked", "ermission denied"], USAGE, capsys)
    finally:
        locked.chmod(0o700)


def test_a_file_without_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o755)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    with without_privileges():
        check(["plan", str(path), *QUIET], ["m.gguf", "ermission denied"], USAGE, capsys)


def test_a_port_in_use(wrong_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = filled(f"serve {{}}/good.gguf --port {port} --backend_type ktransformers", wrong_files)
        check(argv, [f"cannot listen on 127.0.0.1:{port}", "ddress already in use", "--port"], FAILS, capsys)


def test_a_port_that_needs_privileges(
    wrong_files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("socket.socket.bind", refuse)
    argv = filled("serve {}/good.gguf --port 80 --backend_type ktransformers", wrong_files)
    check(argv, ["cannot listen on 127.0.0.1:80: Permission denied", "--port"], USAGE, capsys)


def test_more_threads_than_cores_is_said(wrong_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ktransformers.config import why_crowded

    assert why_crowded(1) is None
    count = len(os.sched_getaffinity(0)) + 1
    with pytest.raises(WouldLoad):
        run(["chat", "--gguf_path", f"{wrong_files}/good.gguf", "--cpu_infer", str(count)])
    assert f"{count} worker threads share {count - 1} CPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["-m", "ktransformers", "chat", "--model_path", "/no/such"], 2, "error: --model_path /no/such does not exist"),
        (["-m", "ktransformers", "plan", "/dev/null"], 2, "/dev/null is a device"),
        (["-m", "ktransformers", "serve", "--port", "x"], 2, "error: argument --port: invalid int value: 'x'"),
    ],
)
def test_as_a_program(argv: list[str], code: int, says: str) -> None:
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
