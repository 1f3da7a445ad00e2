"""Plain Hugging Face as an engine: the model of `transformers` with dequantized fp32 weights and its own cache.

The reference that our operators are compared with, behind the same scheduler and loop. None of our operators, rules or
kernels is in it. One sequence; on the CPU; weights take four bytes each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from ktransformers.cache.paged import PagedCache
from ktransformers.config import CPU_ACTIVATIONS, CPU_PREFILLS, DEFAULT_CHUNK_SIZE, EngineConfig
from ktransformers.core import Progress
from ktransformers.engine.damage.scan import DamageScan
from ktransformers.engine.load.loaded import LoadedModel, scheduler_limits
from ktransformers.engine.model.fingerprint import ModelIdentity
from ktransformers.engine.model.opened import ModelDescription, OpenedModel, describe_model, open_model
from ktransformers.engine.model.skeleton import restore_buffers
from ktransformers.engine.plan.cache_plan import PAGE_SIZE, cache_len_of
from ktransformers.engine.sampling.constraints import mask_of
from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.engine.step.executor_parts import ExecutorParts
from ktransformers.engine.step.executor_runs import StepTensors
from ktransformers.engine.step.hidden import HiddenStatesHook
from ktransformers.errors import CapacityError, ConfigError, TensorMismatchError, UnsupportedError, reason_of
from ktransformers.kernels import reference
from ktransformers.kernels.blocks import decode_blocks
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import ExpertWeight, Fp8Matrix, GroupType, PackedTensor, RawTensor
from ktransformers.models.layers import named_cache
from ktransformers.models.registry import routed_experts
from ktransformers.operators.experts.routed import read_layout
from ktransformers.optimize.machine import detect_machine
from ktransformers.optimize.tied import TiedSource, tied_names
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.records import ScheduledSequence
from ktransformers.system.cores import usable_cores

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

__all__ = ["ReferenceEngine", "build_reference_engine"]

logger = logging.getLogger(__name__)


class ReferenceRunner:
    """Runs steps of one sequence through a causal LM of `transformers` and its DynamicCache: a StepRunner.

    prefix: the tokens of the sequence before the next step's. Those that the cache does not hold are computed first.
    """

    begins_ahead = runs_apart = False
    held_steps = None
    meanwhile: Callable[[], None] | None = None

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self.hook = HiddenStatesHook(model)
        self.prefix: Sequence[int] = ()
        self._ids: list[int] = []  # in the cache, by position
        self._is_intact = True  # a step that failed left some layers longer than others
        self._cache = self._new_cache()

    def _new_cache(self) -> DynamicCache:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def begin(self, *_: object) -> None:
        """Does nothing: there are no stages before this one."""

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Run a whole sequence at once. Returns the logits of all its rows, fp32 [T, vocab_size]."""
        self._rewind(0)
        return self._append(token_ids, range(len(token_ids)))

    def reduced_step(self, batch: ForwardBatch, needs: Sequence[int] | None) -> torch.Tensor:
        """Run the tokens behind `prefix`. Returns whole logits, fp32 [N, vocab_size], of the rows in `keep`."""
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        shared = _common_prefix_len(self._ids, self.prefix)
        if shared < len(self._ids) or not self._is_intact:
            self._rewind(shared)
        if shared < len(self.prefix):
            self._append(self.prefix[shared:], [])
        return self._append(batch.token_ids.tolist(), batch.keep.tolist())

    def _append(self, token_ids: Sequence[int], keep: Sequence[int]) -> torch.Tensor:
        self._is_intact = False
        logits = self._step(token_ids, len(self._ids), keep)
        self._is_intact = True
        self._ids += token_ids
        return logits

    def _rewind(self, length: int) -> None:
        """Forget what stands at `length` and after. Sliding windows and recurrent layers have forgotten what comes
        before: compute again."""
        written, kept, self._ids = len(self._ids), self._ids[:length], []
        forgets = any(getattr(one, "is_sliding", False) or not hasattr(one, "keys") for one in self._cache.layers)
        if not self._is_intact or forgets:
            self._cache = self._new_cache()
            if kept:
                self._step(kept, 0, [])
        else:
            self._cache.crop(length - written)  # a negative number of tokens to remove: the form all versions know
        self._ids = kept

    @torch.inference_mode()
    def _step(self, token_ids: Sequence[int], start: int, keep: Sequence[int]) -> torch.Tensor:
        output = self._model(
            input_ids=torch.tensor([list(token_ids)]),
            position_ids=torch.arange(start, start + len(token_ids))[None],
            use_cache=True,
            logits_to_keep=torch.tensor(list(keep), dtype=torch.int64),
            **named_cache(self._model, self._cache),
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


class ReferenceExecutor(PagedExecutor):
    """Executes the steps of one sequence at a time. Pages are the scheduler's alone: nothing is kept in them."""

    def __init__(
        self,
        runner: ReferenceRunner,
        cache: PagedCache,
        described: ModelDescription,
        find_damage: Callable[[], str] = str,
    ):
        grammars = described.tokenizer.grammars(described.vocab_size, described.eos_token_ids)
        super().__init__(
            runner,
            cache,
            WorkerPool(1),
            described.vocab_size,
            ExecutorParts(
                mask_of=lambda start: mask_of(grammars, start.params),
                eos_token_ids=described.eos_token_ids,
                find_damage=find_damage,
            ),
        )
        self._reference = runner
        self._run_id, self._ids = 0, list[int]()  # of the run that is computed, and its tokens

    @override
    def _forward(self, rows: Sequence[ScheduledSequence], inputs: StepTensors) -> StepLogits:
        (row,) = rows
        if row.run_id != self._run_id:
            self._run_id, self._ids = row.run_id, list(self._runs[row.run_id].start.token_ids)
        self._ids[row.start : row.start + row.num_tokens] = inputs.batch.token_ids.tolist()
        self._reference.prefix = self._ids[: row.start]
        return super()._forward(rows, inputs)

    def close(self) -> None:
        """Stop its threads."""
        self._pool.close()


class ReferenceEngine(LoadedModel):
    """A loaded reference model that runs the steps of a scheduler, one sequence at a time."""

    def __init__(self, opened: OpenedModel, model: PreTrainedModel, described: ModelDescription):
        cache_len = -(-cache_len_of(opened.config, opened.facts) // PAGE_SIZE) * PAGE_SIZE
        chunk_size = opened.config.chunk_size or DEFAULT_CHUNK_SIZE
        config = replace(opened.config, cache_lens=cache_len, chunk_size=chunk_size)
        cache = PagedCache((), cache_len // PAGE_SIZE, PAGE_SIZE)
        self.runner = ReferenceRunner(model)
        self._steps = ReferenceExecutor(self.runner, cache, described, DamageScan(opened.config).said)
        super().__init__(config, opened.facts, described, self._steps, cache)

    @property
    @override
    def description(self) -> str:
        return f"transformers, fp32: {self.model.description}"

    @property
    @override
    def scheduler_config(self) -> SchedulerConfig:
        return scheduler_limits(self.config, self.model, self.cache, 1)

    @property
    @override
    def identity(self) -> ModelIdentity:
        """Raise UnsupportedError: no files with parts of the cache are written."""
        raise UnsupportedError("the transformers backend does not let its cache be copied to a file")

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Compute the logits behind each token of a text at once, fp32 [T, vocab_size]. Between two steps."""
        return self.runner.logits(token_ids)

    @override
    def close(self) -> None:
        self._steps.close()


def build_reference_engine(config: EngineConfig, progress: Progress | None = None) -> ReferenceEngine:
    """Load a model as `transformers` would. Raises ConfigError, WeightError, CapacityError or UnsupportedError."""
    if config.optimize_config_path is not None:
        logger.warning("--optimize_config_path has no effect: the transformers backend runs the model without rules")
    if config.cpu_quant is not None:
        raise UnsupportedError("--cpu_quant has no meaning here: this backend computes in fp32")
    if config.cpu_prefill != CPU_PREFILLS[0]:
        raise UnsupportedError("--cpu_prefill has no meaning here: this backend computes in fp32")
    if config.cpu_activations != CPU_ACTIVATIONS[0]:
        raise UnsupportedError("--cpu_activations has no meaning here: this backend computes in fp32")
    if config.kv_type not in ("auto", "fp32"):
        raise UnsupportedError(f"--kv_type {config.kv_type} has no meaning here: this backend keeps fp32")
    for flag in ("tensor_parallel", "pipeline"):
        if getattr(config, flag) > 1:
            raise UnsupportedError(f"--{flag} has no meaning here: the transformers backend is one process")
    opened = open_model(config)
    _check_fits(opened.model)
    described = describe_model(opened)
    torch.set_num_threads(opened.config.cpu_infer or usable_cores())
    is_read_by_transformers = opened.gguf is None and opened.facts.composite_type is None
    model = _from_safetensors(opened) if is_read_by_transformers else _filled(opened, progress)
    return ReferenceEngine(opened, model.eval(), described)


def _check_fits(model: PreTrainedModel) -> None:
    needed = 4 * sum(parameter.numel() for parameter in model.parameters())
    free = detect_machine().available_bytes
    if needed > free:
        raise CapacityError(
            f"the reference keeps all weights in fp32, {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; "
            "use --backend_type ktransformers"
        )


def _attention(model: PreTrainedModel) -> str:
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def _from_safetensors(opened: OpenedModel) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    path = opened.config.gguf_path or opened.config.model_path
    folder = path if path is not None and path.is_dir() else Path(str(path)).parent
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            config=opened.hf_config,
            dtype=torch.float32,
            attn_implementation=_attention(opened.model),
            local_files_only=True,
            trust_remote_code=opened.config.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ConfigError(f"transformers cannot load {folder}: {reason_of(error)}") from error


def _filled(opened: OpenedModel, progress: Progress | None) -> PreTrainedModel:
    """The skeleton with `transformers`' own attention, filled with what the files' tensors dequantize to.

    For GGUF, and for the language part of a composite: `transformers` would load the whole.
    """
    model = opened.model
    model.set_attn_implementation(_attention(model))
    source = TiedSource(opened.source, tied_names(model))
    names = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta]
    total = 4 * sum(model.state_dict(keep_vars=True)[name].numel() for name in names)
    done = 0
    for key in routed_experts(model):
        done += _fill_experts(model.get_submodule(key), key, source)
        names = [name for name in names if name.rpartition(".")[0] != key]
        if progress is not None:
            progress(done, total, key)
    for name in names:
        if source.find(name) is None:
            raise TensorMismatchError(f"the tensor {name} is missing from the weight files")
        owner, _, attribute = name.rpartition(".")
        done += _set(model.get_submodule(owner), attribute, source.dense(name))
        if progress is not None:
            progress(done, total, name)
    restore_buffers(model)
    return model


def _set(module: Any, name: str, value: torch.Tensor) -> int:
    """Replace a parameter or buffer of the same shape. Returns its bytes."""
    old = getattr(module, name)
    if tuple(old.shape) != tuple(value.shape):
        raise TensorMismatchError(f"{name} has shape {tuple(value.shape)}, the model wants {tuple(old.shape)}")
    if isinstance(old, torch.nn.Parameter):
        setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
    else:
        module.register_buffer(name, value.to(old.dtype))
    return value.numel() * 4


def _fill_experts(module: Any, key: str, source: TiedSource) -> int:
    layout = read_layout(module, key)
    weights = source.experts(key, layout)

    def matrices(parts: Sequence[ExpertWeight]) -> torch.Tensor:
        return torch.stack([_dequantized(part) for part in parts if not isinstance(part, PackedTensor)])

    def placed(values: torch.Tensor) -> torch.Tensor:
        return values.transpose(1, 2).contiguous() if layout.is_transposed else values

    up, up_bias = matrices(weights.up), weights.up_bias
    first, first_bias = "up_proj", "up_proj_bias"
    if weights.gate is not None:
        first, first_bias = "gate_up_proj", "gate_up_proj_bias"
        up = layout.joined(matrices(weights.gate), up, 1)
        if up_bias is not None and weights.gate_bias is not None:
            up_bias = layout.joined(weights.gate_bias, up_bias, 1)
    nbytes = _set(module, first, placed(up)) + _set(module, "down_proj", placed(matrices(weights.down)))
    if layout.has_bias and up_bias is not None and weights.down_bias is not None:
        nbytes += _set(module, first_bias, up_bias) + _set(module, "down_proj_bias", weights.down_bias)
    return nbytes


def _dequantized(raw: RawTensor | Fp8Matrix) -> torch.Tensor:
    """fp32 [rows, cols] by the `gguf` package or torch, not by our kernels."""
    if isinstance(raw, Fp8Matrix) or isinstance(raw.qtype, GroupType):
        return reference.dequantize(raw)
    blocks = raw.data.numpy().reshape(raw.rows, raw.row_bytes)
    return torch.from_numpy(decode_blocks(blocks, raw.qtype)).view(raw.rows, raw.cols)
