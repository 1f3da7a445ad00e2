"""The frozen configuration of one engine, resolved once. Does not read model files and does not import torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ktransformers.errors import ConfigError
from ktransformers.system.cores import cpu_quota, physical_cores, usable_cores, usable_cpus
from ktransformers.system.given_paths import check_given_path
from ktransformers.system.shipped_rules import find_shipped_rules, shipped_names

__all__ = [
    "ATTENTION_BACKENDS",
    "CONTEXT_OVERFLOWS",
    "CPU_PREFILLS",
    "CPU_QUANT_TYPES",
    "DEFAULT_CHUNK_SIZE",
    "DEMO_MODEL_PATH",
    "EXPERTS_FROM",
    "KV_DISK_SIZE_GB",
    "KV_TYPES",
    "SPARSE_ATTENTIONS",
    "TOWER_DEVICES",
    "EngineConfig",
    "bundled_files",
    "bundled_model",
    "check_threads",
    "hot_slots",
    "why_crowded",
]

logger = logging.getLogger(__name__)

DEMO_MODEL_PATH = Path(__file__).resolve().parent / "assets" / "demo"

CPU_QUANT_TYPES = ("q8_0", "q4_0", "q4_k", "q5_k", "q6_k")
"""Types that `--cpu_quant` accepts, by their GGML names in lower case."""

CPU_PREFILLS = ("int8", "bf16")
"""What `--cpu_prefill` accepts, the default first."""

CPU_ACTIVATIONS = ("int8", "int16")
"""What `--cpu_activations` accepts, the default first: bits of each, see WorkerPool."""

CPU_BF16S = ("bf16", "fp32")
"""What `--cpu_bf16` accepts, the default first."""

SPARSE_ATTENTIONS = ("on", "off")
"""What `--sparse_attention` accepts, the default first."""

KV_TYPES = ("auto", "fp32", "bf16", "int8", "fp8")
"""What `--kv_type` accepts, the default first: the type of activations, which is fp32 on the CPU and bf16 on GPUs."""

ATTENTION_PRODUCTS = ("bf16", "kv")
"""What `--attention_products` accepts, the default first: of the type of activations, or of what `--kv_type` keeps."""

PRECISIONS: dict[str, dict[str, str]] = {
    "exact": {
        "cpu_prefill": "int8",
        "cpu_activations": "int8",
        "cpu_bf16": "bf16",
        "kv_type": "auto",
        "attention_products": "bf16",
    },
    "fast": {
        "cpu_prefill": "int8",
        "cpu_activations": "int8",
        "cpu_bf16": "bf16",
        "kv_type": "bf16",
        "attention_products": "kv",
    },
    "close": {
        "cpu_prefill": "int8",
        "cpu_activations": "int16",
        "cpu_bf16": "fp32",
        "kv_type": "fp32",
        "attention_products": "bf16",
    },
}
"""What `--precision` accepts, the default first, and what each makes of the fields that were not given themselves."""

ATTENTION_BACKENDS = ("auto", "triton", "flashinfer")
"""What `--attention_backend` accepts."""

CONTEXT_OVERFLOWS = ("drop", "error")
"""What `--context_overflow` accepts: a conversation that is too long loses its oldest turns, or is refused."""

KV_DISK_SIZE_GB = 20.0
"""GiB of files with pages when nothing is said."""

SPECULATIVES = ("auto", "off", "ngram", "draft", "mtp")
"""What `--speculative` accepts, the default first."""

SPECULATIVE_TOKENS = 7
"""Draft tokens of a sequence in a step at most when nothing is said: with the known token they are eight rows."""

HOT_EXPERTS = ("auto", "off")
"""What `--hot_experts` accepts beside a number, the default first."""

EXPERTS_FROM = ("auto", "ram", "disk")
"""What `--experts_from` accepts, the default first."""

TOWER_DEVICES = ("auto", "cpu", "cuda", "none")
"""What `--tower_device` accepts, the default first."""

DEFAULT_CHUNK_SIZE = 512
"""Tokens of a prefill step on the CPU when nothing is said."""


def bundled_model(advice: str) -> Path:
    """Return the path of the GGUF that comes with the package.

    Raises ConfigError when it is missing; advice: what to do then.
    """
    found = sorted(DEMO_MODEL_PATH.glob("*.gguf"))
    if not found:
        raise ConfigError(
            f"no model given and the bundled one is missing ({DEMO_MODEL_PATH} holds no *.gguf): {advice}"
        )
    return found[0]


def bundled_files(advice: str) -> tuple[Path, Path]:
    """Return the path of the bundled model's GGUF, and of the folder with its tower, processor and tokenizer, which has
    the same name: a server names a model after both.

    Raises ConfigError like `bundled_model`.
    """
    gguf = bundled_model(advice)
    return gguf, gguf.with_suffix("")


def hot_slots(value: str) -> int | None:
    """Return the slots of each layer that `--hot_experts` names; None for a word.

    Raises ConfigError for what is neither.
    """
    if value in HOT_EXPERTS:
        return None
    if not isinstance(value, str) or not value.isascii() or not value.isdigit() or not 1 <= int(value) <= _MAX_COUNT:
        raise ConfigError(f"--hot_experts must be {', '.join(HOT_EXPERTS)} or a number of slots, got {value!r:.40}")
    return int(value)


_MAX_THREADS = 1024  # of the native kernels
_MAX_EXTRA_THREADS = 256


def check_threads(flag: str, number: int) -> None:
    """Raise ConfigError for a number of worker threads that no machine like this one can want. 0 is automatic."""
    if number < 0:
        raise ConfigError(f"--{flag} must be at least 0, got {number}")
    if number > min(usable_cpus() + _MAX_EXTRA_THREADS, _MAX_THREADS):
        raise ConfigError(f"--{flag} {number} is far beyond this machine's {physical_cores()} cores; leave it out")


def why_crowded(number: int) -> str | None:
    """Return in one line what is wrong with `number` worker threads on fewer CPUs; None when there are enough."""
    cpus, quota = usable_cpus(), cpu_quota()
    if number <= cpus:
        return None
    remedy = f"use {usable_cores()}, or leave the flag out"
    if quota is not None and quota < number:
        return f"{number} worker threads share the {quota:g} CPUs of this control group's quota; {remedy}"
    return f"{number} worker threads share {cpus} CPUs and wait for each other, up to fifty times slower; {remedy}"


_MAX_COUNT = (1 << 31) - 1
MAX_DRAFTS = 64
"""Draft tokens of a sequence in a step at most: each has the logits of a whole row."""

_MAX_GB = 1 << 20
_MAX_CACHE_LENS = 1 << 40  # what fits is known from the model; this only keeps sizes in 64 bits


def _check_gb(flag: str, value: float, least: float) -> None:
    """Raises ConfigError for what is no amount of memory."""
    if not least <= value <= _MAX_GB:
        raise ConfigError(f"--{flag} must be between {least:g} and {_MAX_GB} GiB, got {value}")


MAX_GPUS = 16
"""That one model may be cut over."""

MAX_STAGES = 64
"""Of a pipeline."""


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Parse "HOST:PORT,HOST:PORT", IPv6 as "[HOST]:PORT", to (host, port) pairs. Raises ConfigError."""
    found = []
    for each in text.split(","):
        host, _, port = each.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ConfigError(f"--stage_hosts: {each.strip()!r} is not HOST:PORT")
        found.append((host, int(port)))
    return found


def precision_fields(name: str, given: Mapping[str, object]) -> dict[str, str]:
    """Return what `--precision` makes of the fields that are not `given`, without what excludes a given one.

    Raises ConfigError for a name that PRECISIONS lacks.
    """
    if name not in PRECISIONS:
        raise ConfigError(f"precision {name!r} is not one of {', '.join(PRECISIONS)}")
    found = {field: value for field, value in PRECISIONS[name].items() if field not in given}
    if given.get("kv_type", "bf16") != "bf16" and found.get("attention_products") == "kv":
        del found["attention_products"]
    if given.get("cpu_prefill") == "bf16":
        found.pop("cpu_activations", None)
    return found


def parse_layers(text: str) -> list[int]:
    """Parse "20,14,14" to numbers of layers. Raises ConfigError."""
    found = [each.strip() for each in text.split(",")]
    if not all(each.isdecimal() and int(each) for each in found):
        raise ConfigError(f"--pipeline_layers must be numbers of layers with commas between them, got {text!r:.40}")
    return [int(each) for each in found]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration that an engine needs before it reads a model.

    model_path: folder with config.json and tokenizer (and, when gguf_path is absent, safetensors weights).
    gguf_path: a GGUF file, a folder of GGUF files, or a folder of safetensors. One of the two must be given.
    cache_lens: tokens the cache holds; 0 lets the builder take min(model's context, 8192), for each of many sequences.
    cpu_infer: worker threads of the native kernels; 0 lets the builder take one per physical core, less one for the
    thread that serves a GPU where there is one.
    chunk_size: most tokens one prefill step carries; 0 lets the builder choose: 512 on the CPU, up to 4096 on a GPU.
    cpu_quant: GGML type that experts from BF16, F16, F32 or FP8 are quantized to while loading.
    cpu_prefill: how quantized weights on the CPU are multiplied with many rows: int8, exactly as with few, or bf16,
        more precise, slower, and only where the processor has instructions for it; see docs/bench.md.
    cpu_activations: what activations are rounded to before quantized weights on the CPU are multiplied with them, block
        by block: int8, or int16, which keeps their numbers almost as they are and costs about twice the arithmetic.
    cpu_bf16: what activations are rounded to before BF16 weights on the CPU are multiplied with them: bf16, where the
        processor has instructions for it, or fp32 everywhere, which is to say not at all. Routers and attention's
        projections are fp32 always.
    gpu_memory: GiB that may be used of each GPU; 0 means all that is free.
    hot_experts: slots on a GPU for experts of layers on the CPU, which hold those that are used most: a number for
        each layer, "auto" for what is left of the GPU, or "off" for whole layers there; see docs/gpu.md.
    lend_slots: whether these lend memory to long prompts, for steps of more than chunk_size tokens; None: if any can.
    experts_from: where experts of layers on the CPU lie: "ram", all of them; "disk", in the model's files, with those
        that are used most in slots in RAM, of experts_ram GiB together, 0 for what is free (docs/disk.md); "auto",
        there only where they do not fit otherwise.
    chat_template: a file with a chat template, or the template itself, in place of the one in the model's files.
    tool_format, reasoning_format: how the model writes tool calls and its reasoning, names of docs/server.md; "auto":
        as its chat template does.
    trust_rules: whether rule files may name classes of a user's own, whose modules are imported.
    use_cuda: whether modules that rules place on cuda go to a GPU; None where there is one.
    use_cuda_graph: whether decode steps on a GPU are captured once and replayed; None where they are on one.
    attention_backend: kernels of attention on GPUs; "auto" is FlashInfer where it is installed and can, else Triton.
    sparse_attention: "off" lets families whose layers choose the positions that they attend to attend to all of them.
    kv_type: what keys and values are kept in; int8 and fp8 with an fp32 scale for each position and head. "auto": in
        the type of activations, fp32 on the CPU and bf16 on GPUs.
    attention_products: what queries and keys are multiplied in: "bf16" for the type of activations (bf16 on GPUs, fp32
        on the CPU), or "kv" for the type of the keys, which queries are rounded to then: int8 or fp8 in prefill steps
        on GPUs (docs/gpu.md), bf16 in all steps on the CPU (docs/bench.md).
    prefix_cache: whether keys and values of a prompt's beginning are used again when another one begins alike.
    cpu_memory_size_GB: GiB of host memory for pages that the cache has no room for; 0: none.
    kv_disk_path: a folder for them that outlives the process, of at most kv_disk_size_GB GiB; None: there is none.
    spread_layers: layers go over all GPUs there are though optimize_config_path does not say so; set by `resolved`
    where that is one of upstream's files for several GPUs.
    self_check: whether a model of a family that no test covers is compared with transformers once it is loaded.
    pipeline: processes over which the layers are divided, neighbouring ones together.
    pipeline_layers: how many each of them has, in order, "20,14,14"; "" lets the layers' parameters decide.
    stage_hosts: where `ktransformers stage` runs for the stages but the last one, in their order, HOST:PORT,HOST:PORT;
        "" for processes of this machine. stage_key_file: what the driver proves to them that it is one with.
    tensor_parallel: GPUs over which attention and dense parts of every layer are cut, a process each.
    speculative: where draft tokens come from, which steps run behind the known one and which are accepted where they
        are what is sampled anyway: "ngram", what followed the last tokens where they stood before; "draft", from
        draft_model, a smaller model with the same tokens, a GGUF or a folder; "mtp", from the model's own layers for
        multi-token prediction, in its files, or in a GGUF that draft_model names or that is beside it; "auto",
        draft_model if there is one, else as "ngram", but on GPUs only where steps with draft tokens have CUDA graphs;
        "off". Answers are the same.
    speculative_tokens: draft tokens of a sequence in a step at most; as many as pay are taken.
    picture_folder: where the store of pictures is (media/store.py), set by whoever owns it; None: no pictures come.
    tower_device: where the model's tower computes on them: "cpu", "cuda", "auto", a GPU where one has room, or "none":
        it is not loaded.
    mmproj: the GGUF with the tower of a GGUF; None: the one beside it whose name says so, if there is one.
    """

    model_path: Path | None = None
    gguf_path: Path | None = None
    optimize_config_path: Path | None = None
    cache_lens: int = 0
    chunk_size: int = 0
    max_new_tokens: int = 1000
    cpu_infer: int = 0
    cpu_quant: str | None = None
    cpu_prefill: str = CPU_PREFILLS[0]
    cpu_activations: str = CPU_ACTIVATIONS[0]
    cpu_bf16: str = CPU_BF16S[0]
    gpu_memory: float = 0.0
    hot_experts: str = HOT_EXPERTS[0]
    lend_slots: bool | None = None
    experts_from: str = EXPERTS_FROM[0]
    experts_ram: float = 0.0
    strict: bool = False
    trust_remote_code: bool = False
    trust_rules: bool = False
    chat_template: str | None = None
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    use_cuda: bool | None = None
    use_cuda_graph: bool | None = None
    attention_backend: str = "auto"
    sparse_attention: str = SPARSE_ATTENTIONS[0]
    kv_type: str = KV_TYPES[0]
    attention_products: str = ATTENTION_PRODUCTS[0]
    prefix_cache: bool = True
    cpu_memory_size_GB: float = 0.0
    kv_disk_path: Path | None = None
    kv_disk_size_GB: float = KV_DISK_SIZE_GB
    spread_layers: bool = False
    self_check: bool = True
    speculative: str = SPECULATIVES[0]
    speculative_tokens: int = SPECULATIVE_TOKENS
    draft_model: Path | None = None
    picture_folder: Path | None = None
    tensor_parallel: int = 1
    pipeline: int = 1
    pipeline_layers: str = ""
    stage_hosts: str = ""
    stage_key_file: Path | None = None
    tower_device: str = TOWER_DEVICES[0]
    mmproj: Path | None = None

    def resolved(self, *, needs_model: bool = True) -> EngineConfig:
        """Return a checked copy in which paths exist and automatic values are filled in. Raises ConfigError.

        needs_model: False when the weights come from no files.
        """
        if needs_model and self.model_path is None and self.gguf_path is None:
            raise ConfigError("no model given: pass --model_path (a folder) or --gguf_path (a file or folder)")
        for flag in ("model_path", "gguf_path", "draft_model", "mmproj"):
            path = getattr(self, flag)
            if path is not None:
                check_given_path(flag, Path(path))
        self = self._with_rule_file()._with_stages()
        if self.model_path is not None and not Path(self.model_path).is_dir():
            hint = "; a weight file goes to --gguf_path" if Path(self.model_path).suffix != ".json" else ""
            raise ConfigError(f"--model_path {self.model_path} must be a folder that holds config.json{hint}")
        counts = {"cache_lens": 0, "chunk_size": 0, "max_new_tokens": 1, "cpu_infer": 0, "speculative_tokens": 1}
        for flag, least in counts.items():
            value = getattr(self, flag)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"--{flag} must be a whole number, got {value!r:.40}")
            most = {"cache_lens": _MAX_CACHE_LENS, "speculative_tokens": MAX_DRAFTS}.get(flag, _MAX_COUNT)
            if not least <= value <= most:
                limit = f"at most {most}" if value > most else f"at least {least}"
                raise ConfigError(f"--{flag} must be {limit}, got {value}")
        check_threads("cpu_infer", self.cpu_infer)
        if not 0 <= self.gpu_memory < float("inf"):
            raise ConfigError(f"--gpu_memory must be a number of GiB, or 0 for all that is free, got {self.gpu_memory}")
        hot_slots(self.hot_experts)
        _check_gb("cpu_memory_size_GB", self.cpu_memory_size_GB, 0)
        _check_gb("experts_ram", self.experts_ram, 0)
        _check_gb("kv_disk_size_GB", self.kv_disk_size_GB, 0.001)
        if self.cpu_quant is not None and self.cpu_quant.lower() not in CPU_QUANT_TYPES:
            raise ConfigError(f"--cpu_quant {self.cpu_quant} is not one of {', '.join(CPU_QUANT_TYPES)}")
        self._check_choices()
        self._check_parallel()
        self._check_drafter()
        return replace(
            self,
            model_path=None if self.model_path is None else Path(self.model_path),
            gguf_path=None if self.gguf_path is None else Path(self.gguf_path),
            draft_model=None if self.draft_model is None else Path(self.draft_model),
            mmproj=None if self.mmproj is None else Path(self.mmproj),
            kv_disk_path=None if self.kv_disk_path is None else Path(self.kv_disk_path),
            stage_key_file=None if self.stage_key_file is None else Path(self.stage_key_file),
            cpu_quant=None if self.cpu_quant is None else self.cpu_quant.lower(),
        )

    def max_drafts(self, why_not: str | None = None) -> int:
        """Return the most draft tokens of a sequence in a step; 0: none. why_not: what speaks against them where nobody
        asks for any."""
        is_off = self.speculative == "off" or (self.drafter == "auto" and why_not is not None)
        return 0 if is_off else self.speculative_tokens

    @property
    def wants_tower(self) -> bool:
        """Whether the model's tower is to be loaded, if it has one."""
        return self.picture_folder is not None and self.tower_device != "none"

    @property
    def drafter(self) -> str:
        """What drafts: `speculative`, but that a draft model is asked for where one is named, with "mtp" an
        assistant."""
        return "draft" if self.speculative in ("auto", "mtp") and self.draft_model is not None else self.speculative

    def _check_drafter(self) -> None:
        if (self.drafter == "draft") != (self.draft_model is not None):
            missing = f"--speculative {self.speculative} uses no draft model: leave --draft_model out"
            needs = "--speculative draft needs a model that drafts: name it with --draft_model"
            raise ConfigError(needs if self.draft_model is None else missing)
        if self.drafter in ("draft", "mtp") and (self.pipeline > 1 or self.tensor_parallel > 1):
            flag = "pipeline" if self.pipeline > 1 else "tensor_parallel"
            raise ConfigError(f"--{flag} goes with draft tokens from the text alone: take --speculative ngram")

    def _check_choices(self) -> None:
        choices = {"cpu_prefill": CPU_PREFILLS, "cpu_bf16": CPU_BF16S, "attention_backend": ATTENTION_BACKENDS}
        choices |= {"sparse_attention": SPARSE_ATTENTIONS, "kv_type": KV_TYPES, "cpu_activations": CPU_ACTIVATIONS}
        choices |= {"attention_products": ATTENTION_PRODUCTS, "speculative": SPECULATIVES}
        choices |= {"tower_device": TOWER_DEVICES, "experts_from": EXPERTS_FROM}
        for flag, known in choices.items():
            if getattr(self, flag) not in known:
                raise ConfigError(f"--{flag} {getattr(self, flag)} is not one of {', '.join(known)}")
        if self.cpu_prefill == "bf16" and self.cpu_activations == "int16":
            raise ConfigError(
                "--cpu_prefill bf16 rounds to 8 bits what --cpu_activations int16 keeps: choose one of them"
            )
        if self.attention_products == "kv" and self.kv_type not in ("bf16", "int8", "fp8"):
            raise ConfigError(
                "--attention_products kv multiplies what --kv_type bf16 (on the CPU), int8 or fp8 (on a GPU) keeps, "
                f"and --kv_type is {self.kv_type}: give one of these, or leave --attention_products out"
            )
        if self.experts_ram and self.experts_from == "ram":
            raise ConfigError(
                "--experts_ram is for slots of experts in files, and --experts_from ram keeps all of them in RAM: give "
                "--experts_from disk, or leave --experts_ram out"
            )

    def _check_parallel(self) -> None:
        for flag, most in (("tensor_parallel", MAX_GPUS), ("pipeline", MAX_STAGES)):
            value = getattr(self, flag)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"--{flag} must be a number from 1 to {most}, got {value!r}")
        if self.tensor_parallel > 1 and self.pipeline > 1:
            raise ConfigError("--tensor_parallel and --pipeline divide a model in two ways: choose one of them")
        if self.tensor_parallel > 1 and self.use_cuda is False:
            raise ConfigError("--tensor_parallel is for GPUs, and --no_use_cuda wants none")
        is_divided = self.tensor_parallel > 1 or self.pipeline > 1
        if is_divided and self.experts_from == "disk":
            raise ConfigError("--experts_from disk is for one process: leave --tensor_parallel and --pipeline out")
        if is_divided and (self.kv_disk_path is not None or self.cpu_memory_size_GB):
            flag = "tensor_parallel" if self.tensor_parallel > 1 else "pipeline"
            raise ConfigError(
                f"--{flag} keeps pages in the cache alone: leave --kv_disk_path and --cpu_memory_size_GB out"
            )

    def _with_stages(self) -> EngineConfig:
        """A copy with as many stages as there are numbers of layers, or hosts and this process."""
        if self.pipeline_layers:
            wanted = len(parse_layers(self.pipeline_layers))
            if self.pipeline not in (1, wanted):
                raise ConfigError(
                    f"--pipeline {self.pipeline} with --pipeline_layers {self.pipeline_layers}, which are "
                    f"{wanted} stages; leave --pipeline out"
                )
            self = replace(self, pipeline=wanted)
        if not self.stage_hosts:
            return self
        wanted = len(parse_hosts(self.stage_hosts)) + 1
        if self.pipeline not in (1, wanted):
            raise ConfigError(
                f"--pipeline {self.pipeline} with {wanted - 1} --stage_hosts: these are all stages but the last one, "
                f"which runs here; leave --pipeline out for {wanted}"
            )
        if self.stage_key_file is None:
            raise ConfigError(
                "--stage_hosts needs --stage_key_file, the same one that `ktransformers stage` has on those machines"
            )
        return replace(self, pipeline=wanted)

    def _with_rule_file(self) -> EngineConfig:
        """A copy whose rule file exists: the shipped one of the same family for a name of upstream's."""
        path = self.optimize_config_path
        if path is None or Path(path).exists():
            return self
        found = find_shipped_rules(Path(path))
        if found is None:
            raise ConfigError(f"--optimize_config_path {path} does not exist; shipped are {', '.join(shipped_names())}")
        spread = ", with layers over all GPUs" if found.is_spread else ""
        logger.info("--optimize_config_path %s is not there: taking the shipped %s%s", path, found.path.name, spread)
        is_spread = self.spread_layers or found.is_spread  # the first where another machine has resolved the name
        return replace(self, optimize_config_path=found.path, spread_layers=is_spread)
