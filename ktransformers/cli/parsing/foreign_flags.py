"""Flags of other programs (llama.cpp, vLLM, SGLang with kt-kernel, upstream), as data: what they are called here.

An entry applies to the commands that have the flag which it leads to, where they have none of its own by that name.
What has no counterpart is refused with the name of what there is instead; what is so anyway is taken, with one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ktransformers.cli.parsing.draft_flags import (
    NO_JSON,
    OTHER_DRAFTERS,
    SpeculativeWords,
    method_words,
    spec_type_words,
    speculative_words,
)

__all__ = ["BY_NAME", "FOREIGN_FLAGS", "MODEL", "ForeignFlag"]

MODEL = "MODEL"
"""In place of a flag: the positional argument."""

ANY, NOTHING = "*", ""
"""Keys of ForeignFlag.becomes: any other value, and no value at all."""


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag of another program. names: spellings, with underscores. flag: ours, with dashes, or MODEL.

    becomes: our word by the value that was given ({} stands for it); an empty word means that nothing is to be done.
    is_list: it takes all words up to the next flag, as values with commas between.
    error: said for every other value. note: printed when it is used, if the command has `note_beside` too (or always),
    except for the values of is_plain, which mean here just what they mean there. read: in place of `becomes`, reads a
    value that stands for several flags, or raises ConfigError.
    """

    names: tuple[str, ...]
    flag: str
    becomes: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    note: str = ""
    note_beside: str = ""
    is_list: bool = False
    is_plain: tuple[str, ...] = ()
    read: Callable[[str], SpeculativeWords] | None = None

    def takes_value(self, following: str | None) -> bool:
        """Whether the word that follows the flag on the command line is its value."""
        if self.read is not None:
            return True
        if not self.becomes or set(self.becomes) == {NOTHING}:
            return False
        return NOTHING not in self.becomes or (following is not None and following.lower() in _SWITCH_WORDS)

    def word(self, value: str | None) -> str | None:
        """Return what stands for the flag on our command line, "" for nothing; None when this cannot be had."""
        key = NOTHING if value is None else value.lower()
        if key in self.becomes:
            return self.becomes[key]
        if value is not None and value.lower() in _TRUE and set(self.becomes) == {NOTHING}:
            return self.becomes[NOTHING]  # a switch of another program in a file: `enforce_eager: true`
        if value is None or ANY not in self.becomes:
            return None
        return self.becomes[ANY].replace("{}", value)


_TRUE = ("true", "yes", "on", "1")

_SWITCH_WORDS = (*_TRUE, "false", "no", "off", "0", "auto")
"""What is the value of a flag that may stand alone, rather than MODEL."""


def _alias(names: str, flag: str, note: str = "", note_beside: str = "", **values: str) -> ForeignFlag:
    """The same thing by another name."""
    word = "{}" if flag == MODEL else f"{flag}={{}}"
    return ForeignFlag(tuple(names.split()), flag, {ANY: word} | values, "", note, note_beside)


def _switch(names: str, flag: str, word: str, note: str = "") -> ForeignFlag:
    """A flag without a value that is the word of ours; none when it is so anyway."""
    error = f"it takes no value here; leave it out, or see {flag}"
    return ForeignFlag(tuple(names.split()), flag, {NOTHING: word}, error, note)


def _choice(
    names: str, flag: str, becomes: Mapping[str, str], error: str, note: str = "", plain: str = ""
) -> ForeignFlag:
    """Some values mean something here, the others are refused. plain: values that need no note."""
    return ForeignFlag(tuple(names.split()), flag, becomes, error, note, is_plain=tuple(plain.split()))


def _refused(names: str, flag: str, error: str) -> ForeignFlag:
    """What this program does not have."""
    return ForeignFlag(tuple(names.split()), flag, {}, error)


_WHOLE_CACHE = "taken as --cache_lens, which all requests share; no single request has a limit of its own"
_RULES = "rule files say which module goes where: --optimize_config_path, docs/rules.md"
_ONE_GPU = f"for one GPU set CUDA_VISIBLE_DEVICES, for several use rules ({_RULES})"
_FILL = "experts fill what attention leaves of a GPU by themselves; --gpu_memory GIB limits it"
_ALL_LAYERS = "99 999 9999 -1 all auto"
_TYPES = "weights are computed in the file's own types; --cpu_quant TYPE quantizes experts while loading"

_CONSTRAINED = "ask for it in a request to `ktransformers serve` (response_format), or with SamplingParams in Python"
_NO_LIMIT = f"--max_new_tokens={(1 << 31) - 1}"  # the cache ends the answer then

_TOOL_PARSERS = {ANY: ""} | {
    name: f"--tool_format={ours}"
    for ours, names in {
        "auto": "auto",
        "hermes": "hermes qwen qwen25 granite4",
        "qwen3_coder": "qwen3_coder qwen3_xml",
        "deepseek_v3": "deepseek_v3 deepseekv3",
        "deepseek_r1": "deepseek_r1",
        "deepseek_v31": "deepseek_v31 deepseekv31",
        "deepseek_v32": "deepseek_v32 deepseekv32",
        "deepseek_v4": "deepseek_v4 deepseekv4",
        "glm45": "glm glm45 glm47",
        "kimi_k2": "kimi_k2",
        "minimax_m2": "minimax_m2 minimax-m2",
        "harmony": "harmony openai gpt-oss",
        "mistral": "mistral",
        "llama3_json": "llama3_json llama3 llama4_json",
        "llama4_pythonic": "llama4_pythonic pythonic",
        "gemma4": "gemma4",
        "hunyuan": "hunyuan hunyuan_a13b",
        "ernie": "ernie ernie45",
        "lfm2": "lfm2",
        "seed_oss": "seed_oss",
        "hy_v3": "hy_v3",
        "solar_open": "solar_open",
        "kimi_k3": "kimi_k3",
        "cohere": "cohere cohere_command3 cohere_command4",
        "apertus": "apertus apertus2509",
        "nemotron_v2": "nemotron_v2 nemotron_nano_v2 nemotron_json",
        "granite": "granite",
        "minimax_m1": "minimax_m1 minimax",
        "minimax_m3": "minimax_m3 minimax-m3",
        "muse_glimmer": "muse_glimmer",
        "functionary_v31": "functionary_v31",
        "functionary_v32": "functionary_v32",
        "json": "json",
    }.items()
    for name in names.split()
}
"""What vLLM and SGLang call formats of tool calls."""

_REASONING_PARSERS = {ANY: ""} | {
    name: f"--reasoning_format={ours}"
    for ours, names in {
        "think": "deepseek_r1 deepseek-r1 qwen3 glm45 minimax_m2 hunyuan_a13b kimi_k2",
        "seed_oss": "seed_oss",
        "mistral": "mistral",
        "gemma4": "gemma4",
        "minimax_m3": "minimax_m3 minimax-m3",
        "cohere": "cohere_command3 cohere_command4",
        "apertus": "apertus",
        "hy_v3": "hy_v3",
        "kimi_k3": "kimi_k3",
        "muse_glimmer": "muse_glimmer",
    }.items()
    for name in names.split()
}
"""What they call marks of the reasoning. Those that are found in the template better than named here lead nowhere."""

_MODEL_AND_CACHE = (
    _alias("-m --model -hf --hf_repo", MODEL),
    _alias("--model_dir", "--model_path"),
    _alias("--ctx_size -c --max_total_tokens --max_kv_size", "--cache_lens"),
    _alias("--max_model_len --context_length", "--cache_lens", _WHOLE_CACHE, "--max_batch_size"),
    _alias("--max_num_batched_tokens --chunked_prefill_size --batch_size -b --ubatch_size -ub", "--chunk_size"),
    _alias("-n --predict --n_predict --max_tokens", "--max_new_tokens", **dict.fromkeys(("-1", "-2"), _NO_LIMIT)),
    _switch("--enable_chunked_prefill", "--chunk_size", "", "prompts are always computed in chunks of --chunk_size"),
    _choice("--kv_cache_dtype", "--kv_type",
            {"auto": "", "bfloat16": "--kv_type=bf16", "fp8": "--kv_type=fp8", "fp8_e4m3": "--kv_type=fp8"},
            "keys and values are kept as --kv_type fp32, bf16, int8 or fp8 (e4m3)"),
    _choice("--cache_type_k -ctk --cache_type_v -ctv", "--kv_type", {"auto": ""},
            "keys and values have one type: --kv_type fp32, bf16, int8 (for q8_0) or fp8"),
    _choice("--dtype", "--cpu_quant", {"auto": ""}, _TYPES),
    _choice("--quantization -q", "--cpu_quant", {"gguf": "", "fp8": ""}, _TYPES,
            "the types of weights are read from the model's files"),
    _switch("--mlock", "--gguf_path", "", "nothing is locked; most weights are copied into memory that no file backs"),
    _switch("--no_mmap", "--experts_from", "--experts_from=ram",
            "quantized weights are copied into memory of their own anyway; F32 and F16 stay mapped"),
    _switch("--mmap", "--experts_from", "",
            "experts that do not fit into RAM are read from the file (--experts_from auto), past the page cache"),
    _choice("--load_format", "--gguf_path", {"auto": "", "gguf": "", "safetensors": ""},
            "a model's files are GGUF or safetensors; --gguf_path names them",
            "how weights are stored is read from the files", plain="auto"),
    _alias("--tokenizer --tokenizer_path -tok", "--model_path", "taken as --model_path: a folder with config.json and "
           "the tokenizer"),
    _refused("--revision", "--gguf_path",
             "`ktransformers pull org/name@REVISION` fetches one; MODEL is then the folder that it names"),
    _refused("--download_dir", "--gguf_path", "models are where huggingface_hub keeps them: the variable HF_HOME"),
    _choice("--kv_bits", "--kv_type", {"8": "--kv_type=int8"}, "keys and values are kept as --kv_type fp32, bf16, int8 "
            "or fp8"),
    _switch("--offline", "--gguf_path", "", "nothing is downloaded but by `ktransformers pull`"),
)  # fmt: skip

_DEVICES = (
    _choice("--n_gpu_layers -ngl --gpu_layers", "--use_cuda",
            {"0": "--no_use_cuda"} | dict.fromkeys(_ALL_LAYERS.split(), ""),
            f"{_FILL}; {_RULES}; 0: no GPU; {_ALL_LAYERS.replace(' ', ', ')}: what a GPU has room for",
            "what a GPU has room for goes there by itself; --gpu_memory GIB limits it", plain="0 auto"),
    _choice("--device -dev", "--use_cuda",
            {"cpu": "--no_use_cuda", "none": "--no_use_cuda", "cuda": "--use_cuda", "cuda:0": "--use_cuda", "auto": ""},
            f"cpu or cuda; {_ONE_GPU}"),
    _refused("--main_gpu -mg --tensor_split -ts --split_mode -sm", "--use_cuda", _ONE_GPU),
    _alias("--tensor_parallel_size -tp --tp_size --tp", "--tensor_parallel"),
    _alias("--pipeline_parallel_size -pp --pp_size", "--pipeline"),
    _choice("--data_parallel_size -dp --dp_size", "--use_cuda", {"1": ""},
            "replicas are for `serve --cluster`", "one engine serves; there is nothing to switch off"),
    _refused("--gpu_memory_utilization --mem_fraction_static", "--gpu_memory",
             "it is a share of the GPU; give GiB instead: --gpu_memory 20"),
    _refused("--cpu_offload_gb --swap_space", "--gpu_memory", _FILL),
    _choice("--flash_attn -fa", "--attention_backend", {NOTHING: "", "on": "", "auto": "", "1": "", "true": ""},
            "scores are never stored, and that cannot be switched off; --attention_backend chooses kernels on a GPU",
            "scores are never stored; --attention_backend chooses kernels on a GPU"),
    _switch("--enforce_eager --disable_cuda_graph", "--use_cuda_graph", "--no_use_cuda_graph"),
    _switch("--cpu_moe -cmoe", "--optimize_config_path", "",
            "so it is by default; experts go to a GPU where it has room for them, which --gpu_memory GIB limits"),
    _refused("--n_cpu_moe -ncmoe --override_tensor -ot", "--optimize_config_path", _RULES),
    _alias("-t --threads --n_threads", "--cpu_infer", **{"-1": "--cpu_infer=0"}),
    _alias("-t", "--threads"),
    _refused("--threads_batch -tb", "--cpu_infer", "prompts and answers use the same threads: --cpu_infer"),
    _refused("--numa", "--cpu_infer", "memory nodes are found without a flag; --cpu_infer sets the threads"),
)  # fmt: skip

_KT_KERNEL = (
    _alias("--kt_cpuinfer", "--cpu_infer"),
    _alias("--kt_weight_path", "--gguf_path", "taken as --gguf_path: GGUF, or safetensors as published"),
    _choice("--kt_method", "--cpu_quant", {"llamafile": ""}, _TYPES, "kernels are chosen by the weights' types"),
    _refused("--kt_num_gpu_experts", "--gpu_memory", _FILL),
    _choice("--kt_threadpool_count", "--cpu_infer", {ANY: ""}, "", "memory nodes are found without a flag"),
    _choice("--kt_max_deferred_experts_per_token", "--cpu_infer", {"0": ""},
            "no expert is deferred: answers would change; --cpu_infer sets the threads"),
)  # fmt: skip

_SAMPLING_AND_CHAT = (
    _alias("--temp", "--temperature"),
    _alias("--repeat_penalty", "--repetition_penalty"),
    _choice(
        "--repeat_last_n",
        "--repetition_penalty",
        {"-1": ""},
        "--repetition_penalty looks at the whole text, which is -1",
        "--repetition_penalty looks at the whole text",
    ),
    _alias("-s --random_seed", "--seed"),
    _refused(
        "--seed -s --random_seed", "--max_queue", "a request carries its seed in its own `seed` field, not the server"
    ),
    _alias("-sys --system_prompt", "--system"),
    _alias("-f --file", "--prompt_file"),
    _switch("--single_turn -st", "--prompt", "", "a chat with a --prompt ends after its answer"),
    _switch(
        "--conversation -cnv --interactive -i --interactive_first",
        "--prompt",
        "",
        "a chat without a --prompt goes on; with one it ends after the answer",
    ),
    _refused(
        "--no_conversation -no_cnv --ignore_chat_template --raw",
        "--prompt",
        "prompts go through the model's chat template; LLM.generate and /v1/completions take plain text",
    ),
    _choice(
        "--color -co",
        "--prompt",
        {NOTHING: "", "auto": "", "on": ""},
        "--markdown formats answers",
        "colours are for reasoning and notes, in terminals",
    ),
    _switch(
        "--simple_io --no_display_prompt --nowordwrap -e --escape",
        "--prompt",
        "",
        "a pipe gets the plain answer and nothing else",
    ),
    _refused(
        "--think --hidethinking --reasoning_budget -rea",
        "--prompt",
        "type /set think or /set nothink in the chat; --force_think begins answers with thinking",
    ),
    _refused("--grammar --grammar_file --json_schema -j --format", "--prompt", _CONSTRAINED),
    _switch("--jinja --use_default_chat_template", "--prompt", "", "the model's chat template is always used"),
    _choice("--keepalive", "--prompt", {ANY: ""}, "", "a chat's model is in memory as long as the chat"),
)

_SERVER = (
    replace(_alias("--served_model_name", "--model_name"), is_list=True),
    _alias("--alias -a", "--model_name"),
    _alias("--max_num_seqs --max_running_requests --parallel -np", "--max_batch_size"),
    _switch("--enable_prefix_caching", "--prefix_cache", "--prefix_cache"),
    _switch("--no_enable_prefix_caching --disable_radix_cache", "--prefix_cache", "--no_prefix_cache"),
    _alias("--ssl_key_file", "--ssl_keyfile"),
    _alias("--ssl_cert_file", "--ssl_certfile"),
    _switch("--no_webui", "--web", "--no_web"),
    _switch("--jinja", "--max_queue", "", "the model's chat template is always used"),
    _choice("--tool_call_parser", "--tool_format", _TOOL_PARSERS, "",
            "names that are known here are taken as --tool_format; without one the model's chat template says how it "
            "calls tools"),
    _choice("--reasoning_parser", "--reasoning_format", _REASONING_PARSERS, "",
            "names that are known here are taken as --reasoning_format; without one the model's chat template says how "
            "it reasons"),
    _alias("--chat_template_file", "--chat_template"),
    _switch("--enable_auto_tool_choice", "--max_queue", "", "the model's chat template says how it calls tools"),
    _switch("--verbose -v", "--log_level", "--log_level=debug"),
    _switch("--log_disable", "--log_level", "--log_level=error"),
    _choice("--uvicorn_log_level", "--log_level",
            {one: f"--log_level={one}" for one in ("debug", "info", "warning", "error")},
            "--log_level debug, info, warning or error"),
    _switch("--disable_log_requests --no_enable_log_requests --disable_log_stats --enable_log_requests --log_requests "
            "--enable_metrics --metrics --slots --props --cont_batching -cb --embedding --embeddings --is_embedding",
            "--max_queue", "",
            "each request is a line of the log without its text, and metrics, embeddings and batches are always there"),
    _choice("--threads_http", "--max_queue", {ANY: ""}, "", "connections need no threads of their own"),
    _choice("--allowed_origins", "--cors_origins", {'["*"]': "--cors_origins=*", "*": "--cors_origins=*"},
            "give each one as --cors_origins ORIGIN"),
    _refused("--root_path --api_prefix", "--max_queue",
             "paths are not changed here; let a proxy in front take the prefix away"),
    _refused("--reasoning_budget --chat_template_kwargs --default_chat_template_kwargs", "--max_queue",
             "a request says it: reasoning_effort, or chat_template_kwargs; --force_think is for all requests"),
)  # fmt: skip

_NGRAM = "--speculative=ngram"
_MATCHES = (
    "matches of 2 to 16 tokens are looked for, and how many draft tokens pay is found out; --speculative_tokens "
    "limits them"
)

_OF_NGRAMS = " ".join(
    [f"--spec_ngram_mod_{name}" for name in ("n_match", "n_min", "n_max")]
    + [f"--spec_ngram_{kind}{name}" for kind in ("", "simple_", "map_k_", "map_k4v_")
       for name in ("size_n", "size_m", "min_hits")]
)  # fmt: skip
_GOES_BY_ITSELF = "a draft model goes to the GPU of the model's last layer if that has room, else to the CPU"

_SPECULATIVE = (
    _alias("--draft_max --draft --draft_n --spec_draft_n_max --num_speculative_tokens --num_draft_tokens "
           "--speculative_num_draft_tokens --speculative_config.num_speculative_tokens",
           "--speculative_tokens", **{"0": "--speculative=off"}),
    _choice(f"{_OF_NGRAMS} --draft_min --draft_n_min --draft_p_min --draft_p_split --spec_draft_n_min "
            "--spec_draft_p_min --spec_draft_p_split --ngram_prompt_lookup_max --ngram_prompt_lookup_min "
            "--speculative_ngram_min_match_window_size --speculative_ngram_max_match_window_size "
            "--speculative_ngram_min_bfs_breadth --speculative_ngram_max_bfs_breadth --speculative_ngram_match_type "
            "--speculative_ngram_branch_length --speculative_ngram_capacity --speculative_num_steps "
            "--speculative_config.prompt_lookup_max --speculative_config.prompt_lookup_min",
            "--speculative_tokens", {ANY: ""}, "", _MATCHES),
    ForeignFlag(("--spec_type",), "--speculative", error=OTHER_DRAFTERS, read=spec_type_words),
    _switch("--spec_default", "--speculative", _NGRAM),
    _choice("--speculative_algorithm --speculative_algo", "--speculative",
            {"ngram": _NGRAM, "standalone": "--speculative=draft", "nextn": "--speculative=mtp",
             "dspark": "--speculative=mtp"}, OTHER_DRAFTERS),
    ForeignFlag(("--speculative_config.method",), "--speculative", error=OTHER_DRAFTERS, read=method_words),
    _choice("--speculative_model --speculative_config.model", "--draft_model",
            {"[ngram]": _NGRAM, ANY: "--draft_model={}"}, ""),
    _alias("--model_draft -md --spec_draft_model --hf_repo_draft -hfd -hfrd --spec_draft_hf "
           "--speculative_draft_model_path --speculative_draft_model", "--draft_model"),
    _choice("--n_gpu_layers_draft -ngld --gpu_layers_draft --spec_draft_ngl --device_draft -devd --spec_draft_device "
            "--n_cpu_moe_draft -ncmoed --spec_draft_n_cpu_moe --spec_draft_ncmoe", "--draft_model", {ANY: ""}, "",
            _GOES_BY_ITSELF),
    _switch("--cpu_moe_draft -cmoed --spec_draft_cpu_moe", "--draft_model", "", _GOES_BY_ITSELF),
    _choice("--ctx_size_draft -cd", "--draft_model", {ANY: ""}, "",
            "a draft model's cache has as many tokens as the model's: --cache_lens"),
    _choice("--cache_type_k_draft -ctkd --spec_draft_type_k --cache_type_v_draft -ctvd --spec_draft_type_v",
            "--draft_model", {ANY: ""}, "", "a draft model keeps its keys and values in the type that is usual here"),
    _choice("--threads_draft -td --spec_draft_threads --threads_batch_draft -tbd --spec_draft_threads_batch",
            "--draft_model", {ANY: ""}, "", "a draft model runs on the model's threads: --cpu_infer"),
    _choice("--speculative_eagle_topk", "--speculative_tokens", {"1": ""},
            "draft tokens are one sequence here, not a tree; leave it out, or give 1",
            "draft tokens are one sequence here, not a tree"),
    ForeignFlag(("--speculative_config", "-sc"), "--speculative", error=NO_JSON, read=speculative_words),
)  # fmt: skip

_LORA = "LoRA adapters are not supported here; merge one into the model, and give the result as MODEL"
_PICTURES = "a prompt of the chat has pictures as @picture.png, a request as its dialect has them; no sound is read"
_PROJECTOR = "`ktransformers pull` brings the model's projector along; --mmproj FILE names another one"
_ROPE = "it is read from the model's files, and overriding it is not supported here"

_UNSUPPORTED = (
    _refused("--lora --lora_scaled --lora_base --lora_modules --enable_lora --lora_paths --max_loras --max_lora_rank "
             "--max_loras_per_batch --adapter_path --lora_init_without_apply", "--gguf_path", _LORA),
    _alias("-mm", "--mmproj"),
    _refused("--mmproj_url -mmu", "--mmproj", _PROJECTOR),
    _switch("--mmproj_auto --enable_multimodal", "--tower_device", "",
            "a tower is loaded wherever the files have one; --tower_device none leaves it out"),
    _switch("--no_mmproj --language_model_only", "--tower_device", "--tower_device=none"),
    _switch("--no_mmproj_offload", "--tower_device", "--tower_device=cpu"),
    _refused("--image --audio --model_vocoder -mv", "--gguf_path", _PICTURES),
    _refused("--limit_mm_per_prompt", "--max_images", "--max_images N limits the images of a request"),
    _refused("--image_min_tokens --image_max_tokens --mm_processor_kwargs", "--max_images",
             "the model's files say how large pictures are read; detail: low in a request has them read smaller"),
    _alias("--allowed_media_domains", "--allowed_image_hosts"),
    _refused("--allowed_local_media_path --media_path", "--allowed_image_hosts",
             "files of this machine are read for no request; clients send images as data: URLs"),
    _refused("--rope_scaling --rope_scale --rope_freq_base --rope_freq_scale --yarn_orig_ctx --yarn_ext_factor "
             "--hf_overrides --json_model_override_args --override_kv --rope_theta", "--gguf_path", _ROPE),
    _refused("--control_vector --control_vector_scaled", "--gguf_path",
             "control vectors are not supported here; leave it out"),
    _refused("--rpc", "--pipeline",
             "llama.cpp's RPC is not supported here; --pipeline and --stage_hosts divide a model over machines"),
    _refused("--enable_expert_parallel --ep_size --expert_parallel_size -ep", "--tensor_parallel",
             "experts over several GPUs are not supported here; they are on the CPU and where GPUs have room"),
)  # fmt: skip

FOREIGN_FLAGS = (*_MODEL_AND_CACHE, *_DEVICES, *_KT_KERNEL, *_SAMPLING_AND_CHAT, *_SERVER, *_SPECULATIVE, *_UNSUPPORTED)


def _by_name() -> dict[str, tuple[ForeignFlag, ...]]:
    found: dict[str, tuple[ForeignFlag, ...]] = {}
    for entry in FOREIGN_FLAGS:
        for name in entry.names:
            found[name] = (*found.get(name, ()), entry)
    return found


BY_NAME = _by_name()
"""The entries of each name, in the order in which they are tried."""
