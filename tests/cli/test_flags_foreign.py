"""Flags of other programs: what they become here, and what is said about those that become nothing."""

from __future__ import annotations

import argparse
import os
import re

import pytest

from ktransformers.cli import build_parser
from ktransformers.cli.parsing.foreign_flags import ANY, BY_NAME, FOREIGN_FLAGS, MODEL, NOTHING, ForeignFlag
from ktransformers.cli.parsing.parser import ArgumentParser, leaves
from ktransformers.tokenizer.tools import AUTO, TOOL_FORMATS

PARSERS = list(leaves(build_parser()))
OPTIONS = {option for parser in PARSERS for option in parser._option_string_actions}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("KTRANSFORMERS_"):
            monkeypatch.delenv(name)


def value_of(args: argparse.Namespace, name: str) -> object:
    value = getattr(args, name)
    return value if isinstance(value, bool | int | float | list | type(None)) else str(value)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        # llama.cpp
        ("serve -m x.gguf", "model", "x.gguf"),
        ("serve -hf owner/name:Q4_K_M", "model", "owner/name:Q4_K_M"),
        ("serve --model x.gguf", "model", "x.gguf"),
        ("bench offline --model=x.gguf", "model", "x.gguf"),
        ("chat -c 4096", "cache_lens", 4096),
        ("plan --ctx-size 4096", "cache_lens", 4096),
        ("chat -ngl 0", "use_cuda", False),
        ("chat --n-gpu-layers=0", "use_cuda", False),
        ("serve --device none", "use_cuda", False),
        ("chat -t 8", "cpu_infer", 8),
        ("chat --threads -1", "cpu_infer", 0),
        ("bench operations -t 8", "threads", 8),
        ("bench load --threads 8", "threads", 8),
        ("chat -n 64", "max_new_tokens", 64),
        ("chat --n-predict 64", "max_new_tokens", 64),
        ("chat --temp 0.5", "temperature", 0.5),
        ("chat --repeat-penalty 1.1", "repetition_penalty", 1.1),
        ("chat -s 7", "seed", 7),
        ("serve -a some", "model_name", ["some"]),
        ("serve --alias some --model_name other", "model_name", ["some", "other"]),
        ("serve -np 4", "max_batch_size", 4),
        ("serve -b 512", "chunk_size", 512),
        ("serve --ssl-key-file k", "ssl_keyfile", "k"),
        ("serve -fa x.gguf", "model", "x.gguf"),
        ("serve -fa on x.gguf", "model", "x.gguf"),
        ("serve --flash-attn auto", "model", None),
        ("serve --cpu-moe x.gguf", "model", "x.gguf"),
        ("serve --mlock --no-mmap x.gguf", "model", "x.gguf"),
        ("serve --no-mmap x.gguf", "experts_from", "ram"),
        ("chat --mmap x.gguf", "experts_from", "auto"),
        ("serve -v", "log_level", "debug"),
        # vLLM
        ("serve --max-model-len 8192", "cache_lens", 8192),
        ("serve --max-num-seqs 8", "max_batch_size", 8),
        ("serve --max-num-batched-tokens 2048", "chunk_size", 2048),
        ("serve --served-model-name some", "model_name", ["some"]),
        ("serve --served-model-name some a/b --port 1", "model_name", ["some,a/b"]),
        ("serve --served-model-name some other x.gguf", "model", "x.gguf"),
        ("serve --enforce-eager", "use_cuda_graph", False),
        ("serve --enable-prefix-caching x.gguf", "prefix_cache", True),
        ("serve --no-enable-prefix-caching", "prefix_cache", False),
        ("serve -tp 1 x.gguf", "model", "x.gguf"),
        ("serve --dtype auto --quantization gguf x.gguf", "model", "x.gguf"),
        ("serve --host h --port 1 --api-key k --trust-remote-code", "trust_remote_code", True),
        # SGLang and kt-kernel
        ("serve --context-length 8192", "cache_lens", 8192),
        ("serve --chunked-prefill-size 4096", "chunk_size", 4096),
        ("serve --disable-radix-cache", "prefix_cache", False),
        ("serve --max-running-requests 8", "max_batch_size", 8),
        ("serve --kt-cpuinfer 60", "cpu_infer", 60),
        ("serve --kt-weight-path /w", "gguf_path", "/w"),
        ("serve --kt-threadpool-count 2 x.gguf", "model", "x.gguf"),
        ("serve --kt-method LLAMAFILE x.gguf", "model", "x.gguf"),
        ("serve --tool-call-parser hermes x.gguf", "tool_format", "hermes"),
        ("serve --tool-call-parser=qwen25", "tool_format", "hermes"),
        ("serve --tool_call_parser openai", "tool_format", "harmony"),
        ("serve --tool-call-parser deepseekv31", "tool_format", "deepseek_v31"),
        ("serve --tool-call-parser granite", "tool_format", "granite"),
        ("serve --tool-call-parser jamba", "tool_format", "auto"),
        ("serve --reasoning-parser minimax-m3", "reasoning_format", "minimax_m3"),
        ("serve --reasoning-parser step3", "reasoning_format", "auto"),
        ("serve --chat-template-file t.jinja", "chat_template", "t.jinja"),
        ("chat --chat-template t.jinja --reasoning-format none", "reasoning_format", "none"),
        ("serve --reasoning-parser qwen3 x.gguf", "model", "x.gguf"),
        # drafts
        ("serve --draft-max 8", "speculative_tokens", 8),
        ("chat --draft 8", "speculative_tokens", 8),
        ("chat --draft-n 8 --spec-type ngram-mod", "speculative", "ngram"),
        ("serve --draft-max 0", "speculative", "off"),
        ("serve --spec-type none", "speculative", "off"),
        ("serve --spec-type ngram-simple", "speculative", "ngram"),
        ("serve --spec-type draft", "speculative", "draft"),
        ("serve --spec-default x.gguf", "model", "x.gguf"),
        ("serve --spec-default", "speculative", "ngram"),
        ("serve --spec-type ngram-mod,ngram-map-k4v", "speculative", "ngram"),
        ("serve --spec-type draft-mtp,ngram-mod --spec-draft-n-max 2", "speculative", "mtp"),
        ("serve --spec-type ngram-mod,draft-mtp --spec-draft-n-max 2", "speculative_tokens", 2),
        ("serve --spec-ngram-mod-n-match 24 --spec-ngram-mod-n-min 8 --spec-ngram-mod-n-max 32 m", "model", "m"),
        ("serve --spec-ngram-map-k4v-size-n 12 --spec-ngram-simple-min-hits 1 x.gguf", "model", "x.gguf"),
        ("serve --spec-draft-model f.gguf", "draft_model", "f.gguf"),
        ("serve --spec-draft-hf o/n --spec-draft-ngl all --spec-draft-device CUDA0", "draft_model", "o/n"),
        ("serve -md f.gguf -ctkd q8_0 --cache-type-v-draft q8_0 -td 4 -cmoed", "draft_model", "f.gguf"),
        ('serve --speculative-config {"method":"mtp","model":"o/n"}', "draft_model", "o/n"),
        ('serve --speculative-config {"method":"gemma4_mtp","model":"o/n"}', "speculative", "mtp"),
        ("serve -md f.gguf", "draft_model", "f.gguf"),
        ("chat --draft-model f.gguf", "draft_model", "f.gguf"),
        ("plan x.gguf -hfd o/n", "draft_model", "o/n"),
        ("serve -md f.gguf -ngld 99 -cd 4096", "draft_model", "f.gguf"),
        ("serve --speculative-algorithm STANDALONE", "speculative", "draft"),
        ("serve --speculative-algorithm NEXTN --speculative-eagle-topk 1", "speculative", "mtp"),
        ("serve --speculative-draft-model-path o/n", "draft_model", "o/n"),
        ("serve --speculative-model o/n", "draft_model", "o/n"),
        ('serve --speculative-config {"model":"o/n","num_speculative_tokens":5}', "draft_model", "o/n"),
        ('serve --speculative-config {"method":"draft_model","model":"o/n"}', "draft_model", "o/n"),
        ('serve --speculative-config {"method":"mtp"}', "speculative", "mtp"),
        ('serve --speculative-config {"method":"qwen3_next_mtp"}', "speculative", "mtp"),
        ('serve --speculative-config {"method":"dspark","num_speculative_tokens":5}', "speculative", "mtp"),
        ("serve --speculative-algorithm DSPARK", "speculative", "mtp"),
        ("serve --spec-type draft-dspark", "speculative", "mtp"),
        ("serve --draft-min 2 --draft-p-min 0.5 x.gguf", "model", "x.gguf"),
        ("serve --speculative-algorithm NGRAM", "speculative", "ngram"),
        ("serve --speculative-num-draft-tokens 8 --speculative-num-steps 3", "speculative_tokens", 8),
        ('serve --speculative-config {"method":"ngram"} x.gguf', "model", "x.gguf"),
        ('serve --speculative-config={"method":"ngram"}', "speculative", "ngram"),
        ('serve -sc {"method":"ngram","num_speculative_tokens":5}', "speculative_tokens", 5),
        ('serve -sc {"model":"[ngram]","num_speculative_tokens":5}', "speculative", "ngram"),
        ("serve --speculative-model [ngram] --num-speculative-tokens 5", "speculative_tokens", 5),
        ("serve --speculative-config.method ngram", "speculative", "ngram"),
        ("serve --speculative_config.method deepseek_mtp", "speculative", "mtp"),
        ("serve --speculative-config.num-speculative-tokens 5", "speculative_tokens", 5),
        ("serve --speculative-config.method draft_model --speculative-config.model o/n", "draft_model", "o/n"),
        # upstream
        ("serve --model_dir /m", "model_path", "/m"),
        ("serve --device cpu", "use_cuda", False),
        ("serve --device cuda:0", "use_cuda", True),
    ],
)
def test_what_it_becomes(line: str, name: str, value: object) -> None:
    assert value_of(build_parser().parse_args(line.split()), name) == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chat -ngl 20", "error: -ngl: experts fill what attention leaves of a GPU by themselves; --gpu_memory GIB"),
        ("serve -dp 2", "error: -dp: replicas are for `serve --cluster`"),
        ("serve --gpu-memory-utilization 0.9", "error: --gpu_memory_utilization: it is a share of the GPU; give GiB"),
        ("serve -ot exps=CPU", "error: -ot: rule files say which module goes where: --optimize_config_path"),
        ("serve --dtype float16", "error: --dtype: weights are computed in the file's own types; --cpu_quant"),
        ("serve --seed 1", "error: --seed: a request carries its seed"),
        ("serve --kt-num-gpu-experts 8", "error: --kt_num_gpu_experts: experts fill"),
        ("serve -fa off", "error: -fa: scores are never stored, and that cannot be switched off; --attention_backend"),
        ("serve --flash-attn=off", "error: --flash_attn: scores are never stored"),
        ("serve -c", "error: -c: expected a value"),
        ("serve -c 1 --cache_lens 2", "error: -c and --cache_lens both mean --cache_lens; leave one out"),
        ("serve -b 1 -ub 2", "error: -b and -ub both mean --chunk_size; leave one out"),
        ("serve -m a --model b", "error: -m and --model both mean MODEL; leave one out"),
        ("serve -m a b", "error: unexpected argument b; MODEL is given already"),
    ],
)
def test_what_is_refused(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(line.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(message)


CHAT = {"model": "x.gguf"}


@pytest.mark.parametrize(
    ("line", "values"),
    [
        # llama-cli and llama-server, as their help, their model cards and blogs write them
        ("chat -m x.gguf -p hi", CHAT | {"prompt": "hi"}),
        ("chat -p hi -m x.gguf", CHAT | {"prompt": "hi"}),
        ("chat -m x.gguf --prompt hi -n 128", CHAT | {"prompt": "hi", "max_new_tokens": 128}),
        ("chat -m x.gguf -p hi -n -1 -t 4 -c 512", CHAT | {"prompt": "hi", "cpu_infer": 4, "cache_lens": 512}),
        ("chat -hf o/n:Q4_K_M -p hi -st", {"model": "o/n:Q4_K_M", "prompt": "hi"}),
        ("chat -m x.gguf -cnv -sys be-brief", CHAT | {"system": "be-brief", "prompt": None}),
        ("chat -m x.gguf --jinja --color -ngl 99 -fa on", CHAT),
        ("chat -m x.gguf -f p.txt --temp 0.7 --top-k 40 --top-p 0.9", CHAT | {"temperature": 0.7, "top_k": 40}),
        ("chat -m x.gguf -p hi --no-display-prompt --no-mmap -co", CHAT | {"prompt": "hi"}),
        ("serve -m x.gguf -c 8192 -t 8 -ngl 99 --host h --port 1", CHAT | {"cache_lens": 8192, "host": "h", "port": 1}),
        ("serve -m x.gguf -ngl -1 -np 4 -cb --metrics --jinja", CHAT | {"max_batch_size": 4}),
        ("serve -m x.gguf -a some --api-key k -ngl all", CHAT | {"api_key": ["k"], "model_name": ["some"]}),
        # ollama run, whose prompt is an argument
        ("run x.gguf hello", CHAT | {"prompt_text": "hello"}),
        ("run x.gguf --verbose hello", CHAT | {"prompt_text": "hello", "log_level": "debug"}),
        ("run --keepalive 5m x.gguf hello", CHAT | {"prompt_text": "hello"}),
        ("chat -m x.gguf -n 5 hello", CHAT | {"prompt_text": "hello", "max_new_tokens": 5}),
        ("chat hello -n 5 -m x.gguf", CHAT | {"prompt_text": "hello", "max_new_tokens": 5}),
        ("chat --markdown x.gguf --temperature -0.0 hello", CHAT | {"prompt_text": "hello", "markdown": True}),
        ("chat -n 5 -m x.gguf -- --hello", CHAT | {"prompt_text": "--hello", "max_new_tokens": 5}),
        ("chat -n 5 -- x.gguf -hello", CHAT | {"prompt_text": "-hello"}),
        # mlx_lm.generate
        ("chat --model x.gguf --prompt hi --max-tokens 100 --temp 0.5", CHAT | {"prompt": "hi", "temperature": 0.5}),
        ("chat --model x.gguf --max-kv-size 512 --kv-bits 8", CHAT | {"cache_lens": 512, "kv_type": "int8"}),
        # vLLM and SGLang
        ("serve x.gguf --dtype auto --max-model-len 99 --api-key k", CHAT | {"cache_lens": 99}),
        ("serve x.gguf --disable-log-requests --load-format gguf", CHAT),
        ("serve x.gguf --tokenizer dir --uvicorn-log-level error", CHAT | {"model_path": "dir", "log_level": "error"}),
        ('serve x.gguf --allowed-origins ["*"]', CHAT | {"cors_origins": ["*"]}),
        ("serve --model-path dir --tp 2 --context-length 99", {"model_path": "dir", "tensor_parallel": 2}),
        # lists and what may follow them
        ("bench speed --prompt_lens 4 8 --url u", {"prompt_lens": [4, 8], "url": "u"}),
    ],
)
def test_whole_lines(line: str, values: dict[str, object]) -> None:
    """Lines as users of other programs type them, flags and arguments in any order."""
    args = build_parser().parse_args(line.split())
    assert {name: value_of(args, name) for name in values} == values


def test_texts_are_no_flags() -> None:
    args = build_parser().parse_args(["chat", "-n", "5", "x.gguf", "- what is this = that?"])
    assert (args.model, args.prompt_text) == ("x.gguf", "- what is this = that?")
    args = build_parser().parse_args(["chat", "-p", "--no idea what", "-m", "x.gguf"])
    assert (args.model, args.prompt) == ("x.gguf", "--no idea what")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chat --lora a.gguf", "LoRA adapters are not supported here; merge one"),
        ("chat -m x.gguf --adapter-path dir", "LoRA adapters are not supported here"),
        ("serve --lora-modules a=b c=d", "LoRA adapters are not supported here"),
        ("serve --enable-lora --max-loras 4", "LoRA adapters are not supported here"),
        ("serve --lora-paths a", "LoRA adapters are not supported here"),
        ("serve --mmproj-url http://a/f.gguf", "`ktransformers pull` brings the model's projector along"),
        ("chat --image f.png", "a prompt of the chat has pictures as @picture.png"),
        ("serve --limit-mm-per-prompt image=2", "--max_images N limits the images of a request"),
        ("serve --allowed-local-media-path /pictures", "files of this machine are read for no request"),
        (
            "serve --spec-type eagle3",
            "--spec_type: draft tokens come from the text",
        ),
        ("serve --speculative-algorithm EAGLE", "EAGLE, Medusa and others are not supported here"),
        ("serve --speculative-config.method eagle3", "EAGLE, Medusa and others are not supported here"),
        ("serve --speculative-eagle-topk 4", "draft tokens are one sequence here, not a tree"),
        ("serve -md f.gguf --draft-model g.gguf", "both mean --draft_model; leave one out"),
        ("serve --draft-max some", "--speculative_tokens"),
        ("serve --draft-max 8 --speculative_tokens 8", "both mean --speculative_tokens; leave one out"),
        ("serve --spec-type ngram-simple --draft-max 0", "both mean --speculative; leave one out"),
        (
            'serve --speculative-config {"method":"eagle3","model":"o/n"}',
            "method 'eagle3', model 'o/n': draft",
        ),
        ("serve --spec-type draft-mtp,draft-dflash", "EAGLE, Medusa and others are not supported here"),
        ("serve --spec-type draft-mtp,draft-simple", "one can be had, and with draft or mtp n-grams are looked at"),
        ("serve --spec-type none,ngram-mod", "of 'none,ngram-mod' one can be had"),
        ("serve --spec-type", "--spec_type: expected a value"),
        ('serve --speculative-config {"method":"mtp","model":3}', "EAGLE, Medusa and others are not supported"),
        ('serve --speculative-config {"method":"draft_model"}', "method 'draft_model' needs a model"),
        ('serve --speculative-config {"method":"ngram","model":"o/n"}', "EAGLE, Medusa and others are not supported"),
        ('serve --speculative-config {"method":["ngram"]}', "EAGLE, Medusa and others are not supported"),
        ('serve --speculative-config {"num_speculative_tokens":4}', "it names no method; it must be a JSON object"),
        ('serve --speculative-config ["ngram"]', "--speculative_config: it must be a JSON object, such as"),
        ("serve --speculative-config ngram", "--speculative_config: it must be a JSON object, such as"),
        ("serve --speculative-config", "--speculative_config: expected a value"),
        *(
            (
                f'serve --speculative-config {{"method":"ngram","num_speculative_tokens":{count}}}',
                "num_speculative_tokens must be a whole number above 0",
            )
            for count in ("0", "true", '"5"', "1.5")
        ),
        ("serve --rope-scaling yarn", "it is read from the model's files"),
        ("serve --rpc 10.0.0.1:50052", "llama.cpp's RPC is not supported here"),
        ("serve --enable-expert-parallel", "experts over several GPUs are not supported here"),
        ("chat -no-cnv -p hi", "prompts go through the model's chat template"),
        ("run x.gguf --format json hi", "ask for it in a request"),
    ],
)
def test_what_is_not_supported_is_said(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(line.split())
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_other_meanings_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    build_parser().parse_args(["serve", "--max_model_len", "5"])
    assert capsys.readouterr().err.startswith("note: --max_model_len: taken as --cache_lens, which all requests share")
    build_parser().parse_args(["chat", "--max_model_len", "5", "--temp", "1"])  # one request at a time: the same thing
    assert capsys.readouterr().err == ""


def test_what_of_drafting_has_no_effect_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"prompt_lookup_max":4,"method":"ngram","prompt_lookup_min":2,"model":null}'
    build_parser().parse_args(["serve", "--speculative-config", config])
    said = capsys.readouterr().err
    assert said.startswith("note: --speculative_config: prompt_lookup_max, prompt_lookup_min: without effect")
    build_parser().parse_args(["serve", "--speculative-config", '{"method":"ngram","num_speculative_tokens":5}'])
    assert capsys.readouterr().err == ""
    build_parser().parse_args(["serve", "--draft-min", "2"])
    assert capsys.readouterr().err.startswith("note: --draft_min: matches of 2 to 16 tokens are looked for")


def test_every_parser_is_a_format_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = BY_NAME["--tool_call_parser"]
    formats = {word.removeprefix("--tool_format=") for word in entry.becomes.values() if word}
    assert formats == {AUTO, *TOOL_FORMATS}
    assert all(entry.becomes[name] == f"--tool_format={name}" for name in TOOL_FORMATS)
    build_parser().parse_args(["serve", "--tool_call_parser", "hermes"])
    said = capsys.readouterr().err
    assert said.startswith("note: --tool_call_parser: names that are known here are taken as --tool_format")


def users(entry: ForeignFlag, name: str) -> list[ArgumentParser]:
    """The commands to which an entry applies by this name, and that can be called without anything else."""
    found = [parser for parser in PARSERS if not parser.has_option(name) and parser._foreign(name) is entry]
    return [parser for parser in found if not any(action.required for action in parser._actions)]


@pytest.mark.parametrize("entry", FOREIGN_FLAGS, ids=lambda entry: entry.names[0])
def test_the_whole_table(entry: ForeignFlag, capsys: pytest.CaptureFixture[str]) -> None:
    """Each name applies somewhere; each value becomes what the parser takes; the rest is refused, and never silent."""
    assert entry.flag == MODEL or entry.flag in OPTIONS
    for named in re.findall(r"--\w+", f"{entry.error} {entry.note}"):
        assert named in OPTIONS, f"{entry.names[0]} names {named}, which no command has"
    for name in entry.names:
        assert users(entry, name), f"{name} applies to no command"
        assert name == name.replace("-", "_").replace("__", "--", 1) or re.fullmatch(r"-\w+", name)
        parser = users(entry, name)[0]
        for value, word in entry.becomes.items():
            given = {ANY: [name, "5"], NOTHING: [name]}.get(value, [name, value])
            args = parser.parse_args(given)
            flag = word.partition("=")[0]
            target = parser._option_string_actions[flag].dest if flag.startswith("--") else "model"
            assert args.value_sources == ({target: "command line"} if word else {})
            assert bool(word) or entry.note or value in ("0", "auto", "gguf", "fp8"), f"{name} is taken in silence"
            capsys.readouterr()
        if ANY not in entry.becomes:
            with pytest.raises(SystemExit):
                parser.parse_args([f"{name}=nonsense"])
            assert entry.error
            assert capsys.readouterr().err.startswith(f"error: {name}: {entry.error}")
