"""A model's files, opened: config, skeleton, weights' headers, tokenizer. Reads no weights and decides no placement.

A synthetic model has no files: its config is made in code, its weights are random, and it has no tokenizer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.config import EngineConfig
from ktransformers.core import RECOMMENDED_FIELDS
from ktransformers.engine.model.assistant import (
    as_gemma4,
    assistant_gguf_names,
    assistant_names,
    build_assistant,
)
from ktransformers.engine.model.card import ModelCard, card_of
from ktransformers.engine.model.config_checks import check_layers, check_parameters
from ktransformers.engine.model.draft_model import check_same_tokens, draft_config, mtp_layer_config
from ktransformers.engine.model.dspark import build_dspark, dspark_names
from ktransformers.engine.model.file_layouts import note_layout
from ktransformers.engine.model.mtp import build_mtp
from ktransformers.engine.model.mtp_file import joined_with_layers, resolve_drafter
from ktransformers.engine.model.mtp_names import MtpNames, with_names
from ktransformers.engine.model.skeleton import build_skeleton, check_kinds, check_model_type, load_hf_config
from ktransformers.engine.model.tower import OpenedTower
from ktransformers.engine.model.tower_files import open_projector, open_tower_of, tower_folder, with_projector
from ktransformers.errors import (
    ConfigError,
    FormatError,
    UnsupportedError,
    WeightError,
    reason_of,
)
from ktransformers.media.torchvision import prepare_torchvision
from ktransformers.models.assistant_config import GGUF_ARCH, assistant_config, config_of_assistant, is_assistant
from ktransformers.models.composite import take_text_config, text_config_of
from ktransformers.models.config_fields import token_ids
from ktransformers.models.dspark_config import DsparkFacts, dspark_config, has_dspark
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf.config import FACTOR_TENSORS, config_from_gguf
from ktransformers.models.gguf.sampling import sampling_defaults
from ktransformers.models.heads import settle_head
from ktransformers.models.mtp_config import mtp_config, mtp_family
from ktransformers.models.registry import ignorable_tensors
from ktransformers.operators.partial_sums import PartialSums
from ktransformers.system.file_kinds import wrong_start
from ktransformers.tokenizer import Tokenizer, has_tokenizer_files, load_tokenizer, read_chat_template
from ktransformers.weights.digests.states import FileState, states_of
from ktransformers.weights.gguf.file import GGUFModel, open_gguf
from ktransformers.weights.gguf.source import GGUFSource
from ktransformers.weights.loader import WeightFormat, weight_format
from ktransformers.weights.quantize.transcode import dequantize
from ktransformers.weights.safetensors.file import SafetensorsModel, open_safetensors
from ktransformers.weights.safetensors.source import SafetensorsSource
from ktransformers.weights.source import WeightSource
from ktransformers.weights.synthetic import ROUTINGS, SyntheticSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "ModelDescription",
    "OpenedModel",
    "config_of_model",
    "describe_model",
    "folder_without_tokenizer",
    "open_model",
    "open_synthetic",
]


logger = logging.getLogger(__name__)

_StoredModel = GGUFModel | SafetensorsModel
"""The opened files of a model's weights."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Facts of a model that need no weights, for processes that talk to an engine in another one.

    num_extra_ids: ids behind the vocabulary that prompts may have, and no answer has.
    context_len: most tokens of one sequence that the model was made for; None: it does not say.
    architecture: the class name in its config.json. generation_defaults: see generation_config.json.
    """

    tokenizer: Tokenizer
    vocab_size: int
    context_len: int | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, Any]
    architecture: str | None
    description: str
    card: ModelCard = field(default_factory=ModelCard)
    num_extra_ids: int = 0


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """The model's files, opened, and the skeleton that they will fill. files: those with weights, which get mapped.

    states: of these files when they were opened, and of the code that came with the model where it is run.
    shares: what of its modules' results are shares of sums, where it is one process's part of a model that is cut.
    hf_config: for transformers' own modules; everything else asks `facts`. stored: bytes in the files by type.
    has_head: whether the files say what follows a text; without, the model makes embeddings only. draft: the model that
    drafts for this one, None without. dspark: of a model that is a DSpark head; None of others. tower: of its pictures;
    None where none come, or it has none.
    """

    config: EngineConfig
    hf_config: PretrainedConfig
    facts: ModelFacts
    gguf: GGUFModel | None
    model: PreTrainedModel
    source: WeightSource
    files: tuple[Path, ...] = ()
    states: tuple[FileState, ...] = ()
    stored: Mapping[str, int] = field(default_factory=dict)
    partial_sums: PartialSums | None = None
    has_head: bool = True
    draft: OpenedModel | None = None
    dspark: DsparkFacts | None = None
    tower: OpenedTower | None = None


def open_model(config: EngineConfig, target: OpenedModel | None = None) -> OpenedModel:
    """Open a model's files and build its skeleton. Reads headers only. Raises ConfigError or WeightError. target: the
    model that it is to draft for; None: it is to run alone."""
    config = config.resolved()
    prepare_torchvision()
    path, kind = _weights_of(config)
    gguf, layers = open_gguf(path) if kind == "gguf" else None, None
    if gguf is not None and target is None:
        config, layers = resolve_drafter(config, gguf)
    whole = _hf_config(config, gguf, path)
    whole, projector = (whole, None) if gguf is None else with_projector(config, whole, gguf)
    stored: _StoredModel = gguf or open_safetensors(path)
    if target is not None and is_assistant(whole):
        return _open_assistant(replace(config, self_check=False), whole, stored, target)
    tensors = stored.tensors
    shapes = [tensor.shape for tensor in tensors.values()]
    shows_pictures = gguf is None and config.picture_folder is not None
    hf_config = take_text_config(whole, tensors.keys(), shows_pictures=shows_pictures)
    has_head = settle_head(hf_config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if not has_head:
        logger.warning("the files hold no output head (lm_head): the model makes embeddings and generates no text")
    facts = _facts_of(whole, config.trust_remote_code)
    check_layers(facts, shapes)
    if gguf is not None:
        note_layout(hf_config, facts, gguf)
    model = build_skeleton(hf_config, config.trust_remote_code)
    source, files, tower = _source_of(stored, facts, model), [file.path for file in stored.files], None
    if isinstance(stored, SafetensorsModel) and isinstance(source, SafetensorsSource):
        tower = open_tower_of(config, whole, stored, source, facts)
    elif projector is not None:
        tower = open_projector(config, whole, projector)
    elif (folder := tower_folder(config, whole)) is not None:
        beside = open_safetensors(folder)
        tower = open_tower_of(config, whole, beside, _safetensors_source(beside, facts, model), facts)
    check_parameters(model, source, shapes)
    _log_unread(model, source)
    states, nbytes = _states(config, files), _bytes_by_type(stored)
    opened = OpenedModel(
        config, model.config, facts, gguf, model, source, tuple(files), states, nbytes, has_head=has_head, tower=tower
    )
    if config.drafter == "draft":
        return replace(opened, draft=_open_draft(opened))
    if config.drafter != "mtp":
        return opened
    if isinstance(stored, SafetensorsModel) and has_dspark(stored.tensors):
        return _with_dspark(opened, stored)
    with_layers = opened if layers is None else _with_layers(opened, layers)
    return replace(opened, draft=_open_mtp(with_layers, with_layers.gguf or stored))


def _log_unread(model: PreTrainedModel, source: WeightSource) -> None:
    """Say what the files hold besides the model, where its class says what that is."""
    unread = getattr(model, "UNREAD", None)
    count = sum(map(ignorable_tensors(model), source.stored_names())) if unread else 0
    if count:
        logger.info("%d tensors are left unread: %s", count, unread)


def _source_of(stored: _StoredModel, facts: ModelFacts, model: PreTrainedModel) -> WeightSource:
    """The source of a skeleton's weights, whose parameters say how safetensors are read."""
    if isinstance(stored, GGUFModel):
        return GGUFSource(stored, facts)
    return _safetensors_source(stored, facts, model)


def _safetensors_source(stored: SafetensorsModel, facts: ModelFacts, model: PreTrainedModel) -> SafetensorsSource:
    return SafetensorsSource(stored, facts, {name: one.shape for name, one in model.named_parameters()})


def _with_layers(opened: OpenedModel, layers: GGUFModel) -> OpenedModel:
    """A model as if its GGUF held the layers for multi-token prediction of another file. Raises ConfigError."""
    assert opened.gguf is not None
    config, joined = opened.config, joined_with_layers(opened.gguf, layers, opened.facts)
    hf_config = take_text_config(_hf_config(config, joined, joined.files[0].path), joined.tensors.keys())
    files = tuple(file.path for file in layers.files)
    return replace(opened, hf_config=hf_config, gguf=joined, files=files, states=_states(config, files))


def _open_mtp(target: OpenedModel, stored: _StoredModel) -> OpenedModel:
    """The target's own layer for multi-token prediction, as a model. Where there are several, each drafts the token
    behind that of the one whose `draft` it is. Raises UnsupportedError where the target has none."""
    num_layers, config = target.facts.num_layers, target.hf_config
    if isinstance(stored, GGUFModel):
        found = MtpNames.of_gguf(stored.tensors, num_layers, config)
    else:
        found = MtpNames.of_safetensors(stored.tensors, num_layers, config)
    why_not = mtp_family(target.facts.model_type).why_not
    if why_not is not None or not found:
        held = f"one that is not run: {why_not}" if why_not else "none, or one of a kind that is not known here"
        if any("markov" in name for name in stored.tensors):
            held = "a DSpark head, which is read from safetensors alone"
        beside = "" if target.gguf is None or why_not else ", and no mtp-*.gguf is beside them"
        raise UnsupportedError(
            f"--speculative mtp: of layers for multi-token prediction, the files of this model "
            f"({target.facts.model_type}) hold {held}{beside}; take --speculative ngram, or --draft_model"
        )
    used, draft = found[: target.config.speculative_tokens], None
    for index, names in reversed(list(enumerate(used))):
        draft = replace(_open_mtp_layer(target, stored, names, index), draft=draft)
    assert draft is not None
    return draft


def _open_mtp_layer(target: OpenedModel, stored: _StoredModel, names: MtpNames, index: int) -> OpenedModel:
    """Layer `index` for multi-token prediction of a model. Raises UnsupportedError."""
    config = mtp_layer_config(target.config)
    hf_config = mtp_config(target.hf_config, has_experts=names.has_experts, index=index)
    facts = _facts_of(hf_config, config.trust_remote_code)
    stored = with_names(stored, names.names)
    gguf = stored if isinstance(stored, GGUFModel) else None
    if gguf is not None:
        note_layout(hf_config, facts, gguf)
    model = build_mtp(hf_config, config.trust_remote_code, has_head=names.has_head)
    source = _source_of(stored, facts, model)
    return replace(target, config=config, hf_config=model.config, facts=facts, gguf=gguf, model=model, source=source)


def _with_dspark(target: OpenedModel, stored: SafetensorsModel) -> OpenedModel:
    """The target with its DSpark head, which drafts as many tokens as it can at most. Raises UnsupportedError where it
    is of another family than DeepSeek-V4, ConfigError for numbers that no such head has."""
    if target.facts.model_type != "deepseek_v4":
        raise UnsupportedError(
            f"--speculative mtp: the files hold a DSpark head, of which that of DeepSeek-V4 is known, and the model's "
            f"type is {target.facts.model_type}; take --speculative ngram, or --draft_model"
        )
    names = dspark_names(stored.tensors)
    found = DsparkFacts.of(target.hf_config, names)
    most = min(target.config.speculative_tokens, found.block_size)
    target = replace(target, config=replace(target.config, speculative_tokens=most))
    config, hf_config = mtp_layer_config(target.config), dspark_config(target.hf_config, found)
    facts = _facts_of(hf_config, config.trust_remote_code)
    model = build_dspark(hf_config, found, config.trust_remote_code)
    source = _safetensors_source(with_names(stored, names), facts, model)
    draft = replace(
        target, config=config, hf_config=model.config, facts=facts, model=model, source=source, dspark=found
    )
    return replace(target, draft=draft)


def _open_assistant(
    config: EngineConfig, whole: PretrainedConfig, stored: _StoredModel, target: OpenedModel
) -> OpenedModel:
    """An assistant of Gemma 4, as the model that drafts. Raises UnsupportedError for another target than its own."""
    hf_config = assistant_config(whole)
    facts = ModelFacts.of(hf_config)
    model = build_assistant(whole, hf_config, facts, target.facts)
    files = tuple(file.path for file in stored.files)
    if isinstance(stored, GGUFModel):
        stored = gguf = with_names(as_gemma4(stored), assistant_gguf_names(stored.tensors))
    else:
        stored, gguf = with_names(stored, assistant_names(stored.tensors, whole)), None
    source = _source_of(stored, facts, model)
    return OpenedModel(config, model.config, facts, gguf, model, source, files, _states(config, files))


def _open_draft(target: OpenedModel) -> OpenedModel:
    """The model that drafts. Raises as `open_model`, and UnsupportedError for one that cannot."""
    config = target.config
    assert config.draft_model is not None
    try:
        opened = open_model(draft_config(config), target)
    except (ConfigError, WeightError) as error:
        kind = UnsupportedError if isinstance(error, UnsupportedError) else ConfigError
        raise kind(f"--draft_model {config.draft_model}: {error}") from error
    if config.speculative == "mtp" and not opened.facts.is_borrowing:
        raise ConfigError(
            f"--speculative mtp: --draft_model {config.draft_model} is no assistant of Gemma 4; take --speculative "
            "draft for a smaller model, or leave it out for the model's own layer"
        )
    if opened.facts.has_states:
        raise UnsupportedError(
            f"--draft_model {config.draft_model} ({opened.facts.model_type}) has recurrent layers, whose states cannot "
            "go back to the last right token; take a model with attention alone"
        )
    if not opened.has_head:
        raise UnsupportedError(f"--draft_model {config.draft_model} makes embeddings and generates no text")
    return opened


def _states(config: EngineConfig, files: Sequence[Path]) -> tuple[FileState, ...]:
    """Raises WeightError."""
    code = sorted(config.model_path.glob("*.py")) if config.trust_remote_code and config.model_path is not None else []
    return states_of([*files, *code])


def _bytes_by_type(stored: _StoredModel) -> Counter[str]:
    counts: Counter[str] = Counter()
    if isinstance(stored, GGUFModel):
        for tensor in stored.tensors.values():
            counts[tensor.qtype.name] += tensor.nbytes
    else:
        for part in stored.tensors.values():
            counts[part.dtype] += part.nbytes
    return counts


def _weights_of(config: EngineConfig) -> tuple[Path, WeightFormat]:
    path = config.gguf_path or config.model_path
    assert path is not None
    # A model's own folder may hold a GGUF beside its safetensors; a path given as weights must be unambiguous.
    return path, weight_format(path, None if config.gguf_path is not None else "safetensors")


def folder_without_tokenizer(config: EngineConfig) -> Path | None:
    """The folder that should hold the model's tokenizer and does not; None when it does, or when a GGUF may have it.

    Raises ConfigError or WeightError for paths that hold no model.
    """
    config = config.resolved()
    path, kind = _weights_of(config)
    if kind == "gguf":
        return None
    folder = config.model_path or (path if path.is_dir() else path.parent)
    return None if has_tokenizer_files(folder) else folder


def open_synthetic(
    config: EngineConfig, hf_config: PretrainedConfig, routing: str = ROUTINGS[0], *, stands_for_files: bool = False
) -> OpenedModel:
    """Open a model of `hf_config` with random weights, which are made when operators load them. config names no files.
    With --speculative mtp it has a layer for multi-token prediction of such weights, as its family's layers are.

    routing, stands_for_files: see SyntheticSource.

    Raises ConfigError or UnsupportedError.
    """
    if config.model_path is not None or config.gguf_path is not None:
        raise ConfigError("random weights come from no files: leave the model's path out")
    config = config.resolved(needs_model=False)
    model = build_skeleton(hf_config)
    opened = _of_random_weights(config, model, routing, stands_for_files)
    facts = opened.facts
    if facts.experts is not None and not any(layer.has_experts for layer in facts.layers):
        logger.warning(
            "the first %d layers of this %s have no experts, those behind have: take more (--layers)",
            facts.num_layers,
            facts.model_type,
        )
    if config.drafter != "mtp":
        return opened
    model = build_mtp(
        mtp_config(opened.hf_config, has_experts=opened.facts.experts is not None), config.trust_remote_code
    )
    return replace(opened, draft=_of_random_weights(mtp_layer_config(config), model, routing, stands_for_files))


def _of_random_weights(
    config: EngineConfig, model: PreTrainedModel, routing: str, stands_for_files: bool
) -> OpenedModel:
    facts = _facts_of(model.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    source = SyntheticSource(shapes, facts, routing, stands_for_files=stands_for_files)
    return OpenedModel(config, model.config, facts, None, model, source)


def _facts_of(hf_config: PretrainedConfig, trust_remote_code: bool = False) -> ModelFacts:
    """Raises ConfigError, or UnsupportedError for what cannot run whatever its weights are."""
    check_model_type(text_config_of(hf_config), trust_remote_code)
    facts = ModelFacts.of(hf_config)
    check_kinds(facts)
    return facts


def config_of_model(model: GGUFModel) -> PretrainedConfig:
    """Return the config of an opened GGUF model. Raises FormatError or UnsupportedError."""
    if model.architecture == GGUF_ARCH:
        return config_of_assistant(model.metadata, config_of_model(as_gemma4(model)))
    stored = [name for name in FACTOR_TENSORS if name in model.tensors]
    factors = {name: dequantize(model.raw(name), name).flatten().tolist() for name in stored}
    shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
    return config_from_gguf(model.metadata, shapes, factors)


def _hf_config(config: EngineConfig, gguf: GGUFModel | None, path: Path) -> PretrainedConfig:
    """--model_path's config.json, else what the GGUF's metadata say, else the config.json beside the weights."""
    folder = config.model_path
    if gguf is not None and (folder is None or (folder == path and not (folder / "config.json").is_file())):
        try:
            return config_of_model(gguf)
        except (FormatError, UnsupportedError) as error:
            raise type(error)(f"{gguf.files[0].path}: {error}") from error
    folder = folder or (path if path.is_dir() else path.parent)
    return load_hf_config(folder, config.trust_remote_code)


def describe_model(opened: OpenedModel) -> ModelDescription:
    """Describe an opened model by its facts, its tokenizer loaded. Raises ConfigError."""
    tokenizer, defaults = _load_tokenizer(opened), _generation_defaults(opened)
    if opened.draft is not None and opened.config.draft_model is not None:
        theirs = _load_tokenizer(opened.draft)
        if theirs.has_vocabulary or not opened.draft.facts.is_borrowing:  # else widths and layers say whose it is
            check_same_tokens(tokenizer, theirs, str(opened.config.draft_model))
    facts = opened.facts
    return ModelDescription(
        tokenizer=tokenizer,
        vocab_size=facts.vocab_size,
        num_extra_ids=facts.num_extra_ids,
        context_len=facts.context_len,
        eos_token_ids=_eos_token_ids(facts, defaults, tokenizer),
        generation_defaults=defaults,
        architecture=facts.architecture,
        description=f"{facts.model_type}, {opened.source.describe()}",
        card=card_of(opened),
    )


def _load_tokenizer(opened: OpenedModel) -> Tokenizer:
    """The tokenizer in the model's folder, else the one in its GGUF file. Raises ConfigError."""
    config = opened.config
    tokenizer = load_tokenizer(
        _tokenizer_path(opened),
        None if opened.gguf is None else opened.gguf.metadata,
        trust_remote_code=config.trust_remote_code,
        vocab_size=opened.facts.vocab_size,
    )
    if config.chat_template is not None:
        tokenizer.use_chat_template(read_chat_template(config.chat_template))
    tokenizer.use_tool_format(config.tool_format, config.reasoning_format)
    return tokenizer


def _tokenizer_path(opened: OpenedModel) -> Path | None:
    """The folder with the tokenizer's files: --model_path, or the safetensors folder itself."""
    if opened.config.model_path is not None:
        return opened.config.model_path
    path = opened.config.gguf_path
    if path is None or opened.gguf is not None:
        return None
    return path if path.is_dir() else path.parent


def _generation_defaults(opened: OpenedModel) -> dict[str, Any]:
    """Sampling settings that the authors recommend (generation_config.json, or in the GGUF), as far as we know them."""
    from transformers import GenerationConfig

    folder = _tokenizer_path(opened)
    if folder is None or not (folder / "generation_config.json").is_file():
        return {} if opened.gguf is None else sampling_defaults(opened.gguf.metadata)
    try:
        values = GenerationConfig.from_pretrained(folder, local_files_only=True).to_diff_dict()
    except Exception as error:  # whatever transformers does with values of the wrong type
        path = folder / "generation_config.json"
        why = wrong_start(path.read_bytes()) or f"cannot be used: {reason_of(error)}; mend it, or move it away"
        raise ConfigError(f"{path} {why}") from error
    known = (*RECOMMENDED_FIELDS, "eos_token_id", "do_sample")
    return {name: values[name] for name in known if values.get(name) is not None}


def _eos_token_ids(facts: ModelFacts, defaults: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end an answer, by the generation config, the model's config and the tokenizer together."""
    return tuple(sorted({*token_ids(defaults.get("eos_token_id")), *facts.eos_token_ids, *tokenizer.eos_token_ids}))
