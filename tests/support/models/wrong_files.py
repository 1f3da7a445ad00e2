"""Files that are not what they should be: given by mistake, left by a failed download, or broken."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

from tests.support.gguf.writer import write_gguf
from tests.support.models.demo import DEMO_CHECKPOINT
from tests.support.models.tiny_models import tiny_model, write_safetensors

__all__ = ["make_wrong_files"]

LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
GOOD_RULE = (
    "- match: {class: torch.nn.Linear}\n  replace: {class: ktransformers.operators.linear.KTransformersLinear}\n"
)
RULES = {
    "empty.yaml": "",
    "not_a_list.yaml": "match: {name: x}\n",
    "not_yaml.yaml": "- match: {name: x\n  replace: [\n",
    "unknown_class.yaml": "- match: {name: x}\n  replace: {class: ktransformers.operators.linear.KTransformersLiner}\n",
    "foreign_class.yaml": "- match: {name: x}\n  replace: {class: no_such_package.Operator}\n",
    "bad_regex.yaml": "- match: {name: '('}\n  replace: {class: default}\n",
    "unknown_key.yaml": "- match: {nme: x}\n  replace: {class: default}\n",
    "unknown_rule_key.yaml": "- match: {name: x}\n  replcae: {class: default}\n",
    "no_match.yaml": "- replace: {class: default}\n",
    "bad_device.yaml": GOOD_RULE.replace("Linear}\n", "Linear, kwargs: {generate_device: tpu}}\n", 2).replace(
        "torch.nn.Linear, kwargs: {generate_device: tpu}}", "torch.nn.Linear}"
    ),
    "bad_kwarg.yaml": GOOD_RULE.replace("KTransformersLinear}", "KTransformersLinear, kwargs: {nmu_bits: 4}}"),
    "idle.yaml": GOOD_RULE + "- match: {name: no_such_module}\n  replace: {class: default}\n",
    "tag.yaml": "- !!python/object/apply:os.system ['true']\n",
    "twice.yaml": "- match: {name: x}\n  match: {name: y}\n  replace: {class: default}\n",
}
CONFIGS: dict[str, str] = {
    "config_not_json": "{",
    "config_list": "[]",
    "config_pointer": LFS_POINTER,
    "config_html": "<html>Sign in</html>",
    "config_empty": "",
    "config_without_type": "{}",
    "config_unknown_type": '{"model_type": "qwen3_mo"}',
    "config_new_type": '{"model_type": "zzz_unheard_of"}',
    "config_custom_code": '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}',
    "config_image_model": '{"model_type": "clip"}',
    "config_encoder_decoder": '{"model_type": "t5"}',
}


def _pickle_zip() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({}))
    return data.getvalue()


def _plain_zip() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("model.gguf", b"GGUF")
    return data.getvalue()


def _weight_files(folder: Path, gguf: bytes) -> None:
    files = {
        "empty.gguf": b"",
        "text.gguf": b"Entry not found",
        "html.gguf": b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n",
        "xml.gguf": b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
        "pointer.gguf": LFS_POINTER.encode(),
        "pickle.bin": pickle.dumps({"a": 1}, protocol=2),
        "zipped.pt": _pickle_zip(),
        "plain.zip": _plain_zip(),
        "packed.gguf.gz": b"\x1f\x8b\x08\x00" + bytes(20),
        "old.gguf": b"tjgg" + struct.pack("<I", 3) + bytes(64),
        "binary.gguf": b"\x7fELF\x02\x01\x01" + bytes(64),
        "zeros.gguf": bytes(4096),
        "big_endian.gguf": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "version1.gguf": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        "version9.gguf": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
        "four_bytes.gguf": b"GGUF",
        "no_model.gguf": b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
        "truncated.gguf": gguf[: len(gguf) // 2],
        "header_only.gguf": gguf[:1000],
        "is_safetensors.gguf": struct.pack("<Q", 2) + b"{}",
        "pointer.safetensors": LFS_POINTER.encode(),
        "text.safetensors": b"not weights at all, and longer than eight bytes",
        "is_gguf.safetensors": gguf,
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _variant(source: Path, target: Path, **config: Any) -> Path:
    """A copy of the model folder `source` whose config.json says something else."""
    shutil.copytree(source, target)
    values = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(values))
    return target


def _rewritten(path: Path, change: Any) -> None:
    """Rewrite a safetensors file with other tensors; `change` edits {name: tensor} in place."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _model_folders(folder: Path) -> None:
    model = tiny_model("qwen3_moe")
    good = write_safetensors(model, folder / "no_tokenizer")
    (good / "model.safetensors").chmod(0o644)
    for name, text in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
        shutil.copy(good / "model.safetensors", folder / name)
    _variant(good, folder / "config_wrong_field", hidden_size="many")
    _variant(good, folder / "config_no_heads", num_attention_heads=0)
    _variant(good, folder / "config_negative_layers", num_hidden_layers=-1)
    _variant(good, folder / "more_layers", num_hidden_layers=3)
    _variant(good, folder / "wider", hidden_size=128)
    _variant(good, folder / "quip", quantization_config={"quant_method": "quip"})
    name = "model.layers.0.self_attn.q_proj.weight"
    _rewritten(_variant(good, folder / "missing_tensor") / "model.safetensors", lambda t: t.pop(name))
    _rewritten(
        _variant(good, folder / "extra_tensor") / "model.safetensors",
        lambda t: t.update({"model.layers.0.self_attn.z_proj.weight": t[name].clone()}),
    )
    _rewritten(
        _variant(good, folder / "wrong_shape") / "model.safetensors", lambda t: t.update({name: t[name][:3].clone()})
    )
    broken = _variant(good, folder / "truncated_safetensors") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-100_000])
    (_variant(good, folder / "generation_config_broken") / "generation_config.json").write_text("{")
    shutil.copytree(good, folder / "shard_missing")
    (folder / "shard_missing" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}})
    )
    shutil.copytree(good, folder / "index_broken")
    (folder / "index_broken" / "model.safetensors.index.json").write_text("{")
    shutil.copytree(good, folder / "config_missing")
    (folder / "config_missing" / "config.json").unlink()
    _tokenizers(good, folder)


def _tokenizers(good: Path, folder: Path) -> None:
    """Model folders whose tokenizer is broken in several ways."""
    for case, files in {
        "tokenizer_not_json": {"tokenizer.json": "{"},
        "tokenizer_pointer": {"tokenizer.json": LFS_POINTER},
        "tokenizer_other_json": {"tokenizer.json": '{"a": 1}'},
        "tokenizer_config_not_json": {"tokenizer_config.json": "{"},
        "tokenizer_without_vocabulary": {"tokenizer_config.json": "{}"},
        "tokenizer_unknown_class": {"tokenizer_config.json": '{"tokenizer_class": "NoSuchTokenizer"}'},
    }.items():
        shutil.copytree(good, folder / case)
        for name, text in files.items():
            (folder / case / name).write_text(text)
    shutil.copytree(good, folder / "template_broken")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_CHECKPOINT / name, folder / "template_broken")


def _folders(folder: Path, gguf: bytes) -> None:
    (folder / "nothing").mkdir()
    (folder / "prose").mkdir()
    for name in ("README.md", "notes.txt"):
        (folder / "prose" / name).write_text("Hello\n")
    (folder / "pickles").mkdir()
    (folder / "pickles" / "pytorch_model.bin").write_bytes(_pickle_zip())
    (folder / "several").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (folder / "several" / name).write_bytes(gguf)
    (folder / "both").mkdir()
    for name in ("m.gguf", "model.safetensors"):
        (folder / "both" / name).write_bytes(gguf)
    (folder / "shards").mkdir()
    (folder / "shards" / "m-00001-of-00003.gguf").write_bytes(gguf)
    (folder / "config_only").mkdir()
    (folder / "config_only" / "config.json").write_text('{"model_type": "qwen3_moe"}')


def make_wrong_files(folder: Path) -> Path:
    """Write them all below `folder`."""
    good = write_gguf(tiny_model("qwen3_moe"), folder / "good.gguf").read_bytes()
    _weight_files(folder, good)
    _model_folders(folder)
    _folders(folder, good)
    (folder / "rules").mkdir()
    for name, text in RULES.items():
        (folder / "rules" / name).write_text(text)
    (folder / "rules" / "binary.yaml").write_bytes(b"\x00\xff\xfe")
    (folder / "prompt_empty.txt").write_text(" \n")
    (folder / "prompt_binary.txt").write_bytes(b"\xff\xfe\x00")
    with (folder / "prompt_large.txt").open("wb") as file:
        file.truncate((32 << 20) + 1)  # sparse
    (folder / "prompt.txt").write_text("Hello")
    (folder / "keys_empty").write_text("# none\n")
    (folder / "keys_binary").write_bytes(b"\xff\xfe")
    return folder
