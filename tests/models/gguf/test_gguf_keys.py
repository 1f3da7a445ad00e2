"""Every key of a GGUF file is honoured, refused by its name, or says what holds anyway.

The keys are those of the installed `gguf` package and those that llama.cpp reads (LLM_KV_NAMES of its llama-arch.cpp).
"""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import Keys

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.model.opened import describe_model, open_model
from ktransformers.engine.sequence.outputs import default_sampling_params
from ktransformers.errors import FormatError, KTransformersError, UnsupportedError
from ktransformers.models.gguf.compressed import COMPRESSED_FAMILIES
from ktransformers.models.gguf.config import FACTOR_TENSORS, config_from_gguf
from ktransformers.models.gguf.families import FAMILIES
from ktransformers.models.gguf.keys import NEUTRAL
from ktransformers.models.gguf.metadata import Metadata
from ktransformers.models.gguf.recurrent import RECURRENT_FAMILIES
from ktransformers.models.gguf.sampling import sampling_defaults
from ktransformers.weights.gguf.file import open_gguf
from ktransformers.weights.quantize.transcode import dequantize
from tests.models.gguf.test_gguf_architectures import MORE_TYPES, SAME_AS, built, values_of
from tests.support.gguf.newer import write_newer
from tests.support.gguf.newer_metadata import METADATA
from tests.support.gguf.newer_models import CASES, newer_model
from tests.support.gguf.writer import ARCH_OF, write_gguf
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.tiny_models import MODEL_TYPES

MODELS = {ARCH_OF[kind]: kind for kind in (*MORE_TYPES, *reversed(MODEL_TYPES))} | SAME_AS
"""Architecture -> a family that is written as such a file; test_gguf_recurrent.py has the recurrent ones."""

DESCRIBED_ELSEWHERE = (
    r"general\.(alignment|architecture|type)",  # weights/gguf/file.py, models/gguf/config.py
    r"general\.sampling\..*",  # models/gguf/sampling.py: settings that an answer has by default
    r"general\..*",  # names, licences, where it comes from
    r"split\..*",  # weights/gguf/file.py
    r"tokenizer\..*",  # tokenizer/gguf_vocab.py
    r"(adapter|imatrix|clip)\..*",  # files of other kinds, which are no models
    r"diffusion\..*",  # architectures that are refused
    r"xielu\..*",  # Apertus, which is refused
)


def package_keys() -> set[str]:
    """All keys that the `gguf` package names."""

    def of(group: type) -> set[str]:
        found: set[str] = set()
        for name, value in vars(group).items():
            if inspect.isclass(value):
                found |= of(value)
            elif not name.startswith("_") and isinstance(value, str):
                found.add(value)
        return found

    return of(Keys)


_READ = """
vocab_size context_length embedding_length embedding_length_out embedding_length_per_layer_input features_length
block_count leading_dense_block_count attn_res.block_size activation.situ_beta activation.situ_linear_beta
feed_forward_length expert_feed_forward_length expert_shared_feed_forward_length expert_chunk_feed_forward_length
swiglu_clamp_exp swiglu_clamp_shexp use_parallel_residual tensor_data_layout expert_count expert_used_count
expert_shared_count expert_group_count expert_group_used_count expert_weights_scale expert_weights_norm
expert_latent_length expert_gating_func expert_group_scale experts_per_group moe_every_n_layers moe_latent_size
nextn_predict_layers n_deepstack_layers deepstack_mapping hidden_activation pooling_type logit_scale
decoder_start_token_id decoder_block_count attn_logit_softcapping router_logit_softcapping final_logit_softcapping
swin_norm rescale_every_n_layers time_mix_extra_dim time_decay_extra_dim residual_scale embedding_scale adapters.count
token_shift_count interleave_moe_layer_step full_attention_interval num_loops skip_loop_final_norm
hrm.layers_per_stack hrm.h_cycles hrm.l_cycles hrm.prefix_lm attention.head_count attention.head_count_kv
attention.max_alibi_bias attention.clamp_kqv attention.key_length attention.value_length attention.layer_norm_epsilon
attention.layer_norm_rms_epsilon attention.group_norm_epsilon attention.group_norm_groups attention.causal
attention.q_lora_rank attention.kv_lora_rank attention.decay_lora_rank attention.iclr_lora_rank
attention.value_residual_mix_lora_rank attention.gate_lora_rank attention.relative_buckets_count
attention.sliding_window attention.sliding_window_pattern attention.rope_pattern attention.scale
attention.output_scale attention.value_scale attention.temperature_length attention.temperature_scale
attention.key_length_mla attention.value_length_mla attention.key_length_swa attention.value_length_swa
attention.key_length_mla_swa attention.value_length_mla_swa attention.kv_lora_rank_swa attention.indexer.head_count
attention.indexer.key_length attention.indexer.top_k attention.indexer.block_size attention.indexer.local_blocks
attention.indexer.types attention.indexer.kpool attention.indexer.kpool_select_tail attention.output_group_count
attention.output_lora_rank attention.compress_rope_freq_base attention.compress_ratios attention.shared_kv_layers
attention.recurrent_layers hyper_connection.count hyper_connection.sinkhorn_iterations hyper_connection.epsilon
hyper_connection.magnitude hyper_connection.low_rank ple.layers ple.ngram_size hash_layer_count rope.dimension_count
rope.dimension_count_swa rope.dimension_sections rope.freq_base rope.freq_base_swa rope.scale_linear rope.scaling.type
rope.scaling.factor rope.scaling.alpha rope.scaling.attn_factor rope.scaling.original_context_length
rope.scaling.finetuned rope.scaling.yarn_log_multiplier rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor
rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow ssm.conv_kernel ssm.inner_size ssm.state_size
ssm.time_step_rank ssm.group_count ssm.dt_b_c_rms kda.head_dim kda.safe_gate kda.gate_lower_bound wkv.head_size
posnet.embedding_length posnet.block_count convnext.embedding_length convnext.block_count classifier.output_labels
target_layers target_hidden_size norm_before_residual norm_before_fc shortconv.l_cache dense_2_feat_in
dense_2_feat_out dense_3_feat_in dense_3_feat_out
"""
READ_BY_LLAMA_CPP = frozenset(_READ.split())


def test_every_key_was_decided_upon() -> None:
    """A key of a newer package fails here by name: read it in its family, or say in NEUTRAL what it may say unread."""
    own = {key for key in package_keys() if key.startswith("{arch}.")}
    tails = {
        one.format(dense=dense) for key in own for dense in ("dense_2", "dense_3") for one in [key[len("{arch}.") :]]
    }
    assert sorted(tails - NEUTRAL.keys()) == []
    assert sorted(READ_BY_LLAMA_CPP - NEUTRAL.keys()) == []
    others = package_keys() - own
    assert [key for key in sorted(others) if not any(re.fullmatch(one, key) for one in DESCRIBED_ELSEWHERE)] == []


ODD: tuple[object, ...] = (
    0,
    -1,
    "x",
    True,
    0.5,
    np.array([1, 1]),
    np.array([1, -2]),
    np.array([]),
    np.array(["x", "y"]),
    [0.5] * 8,
)


@pytest.mark.parametrize(
    "others", [{}, dict.fromkeys(NEUTRAL, np.array([8, 8])), dict.fromkeys(NEUTRAL, np.array([8, 2]))]
)
def test_any_value_of_any_key_is_judged(others: dict[str, object]) -> None:
    """Also one for each layer, where a key that the judgement asks for has one for each layer too."""
    said = {"general.architecture": "qwen2", **{f"qwen2.{key}": value for key, value in others.items()}}
    gguf = Metadata(said, {"blk.0.ffn_gate_inp.weight": (2, 2)})
    for key, neutral in NEUTRAL.items():
        assert {type(neutral(gguf, value)) for value in ODD} <= {bool, np.bool}, key


def test_a_length_of_keys_for_each_layer_is_one_where_all_are_the_same() -> None:
    gguf = Metadata({"general.architecture": "qwen2", "qwen2.attention.key_length": np.array([16, 16])}, {})
    assert NEUTRAL["rope.dimension_count"](gguf, 16)
    assert not NEUTRAL["rope.dimension_count"](gguf, 8)


# What changes the answer wherever it is read, most often in no more than some families.
PROBES: dict[str, object] = {
    "rope.scaling.factor": 4.0,
    "rope.scale_linear": 4.0,
    "rope.scaling.attn_factor": 1.5,
    "rope.scaling.alpha": 1000.0,
    "rope.scaling.type": "su",  # no kind of scaling
    "rope.freq_base": 12345.0,
    "rope.dimension_sections": np.array([2, 2, 2, 2]),
    "attention.scale": 0.33,
    "attention.output_scale": 0.5,
    "attention.value_scale": 0.5,
    "attention.value_length": 10,
    "attention.key_length_swa": 10,
    "attention.value_length_swa": 10,
    "attention.clamp_kqv": 0.5,
    "attention.causal": False,
    "attention.sliding_window": 3,
    "attention.max_alibi_bias": 8.0,
    "attention.temperature_scale": 0.3,
    "attention.shared_kv_layers": 1,
    "attention.kv_lora_rank": 24,
    "attention.compress_ratios": np.array([4, 4]),
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 5.0,
    "router_logit_softcapping": 5.0,
    "residual_scale": 0.375,
    "embedding_scale": 3.0,
    "logit_scale": 0.5,
    "expert_weights_scale": 1.75,
    "expert_group_scale": 0.5,
    "experts_per_group": 2,
    "moe_latent_size": 16,
    "swiglu_clamp_exp": np.array([1.0, 1.0], dtype=np.float32),
    "swin_norm": True,
    "token_shift_count": 2,
    "rescale_every_n_layers": 6,
    "embedding_length_per_layer_input": 8,
    "hidden_activation": "gelu",
    "decoder_start_token_id": 3,
    "hyper_connection.count": 4,
    "num_loops": 2,
    "ssm.state_size": 16,
    "kda.gate_lower_bound": -5.0,
    "altup.num_inputs": 4,
}
ROTATION = ("rope.scaling.factor", "rope.scale_linear", "rope.freq_base", "rope.scaling.type")
WITHOUT_ROTATION = ("gpt2", "starcoder")
LATENT = ("bailingmoe3", "deepseek2", "deepseek32", "glm-dsa", "glm5-next", "hy_v4", "mistral4")
COHERE = ("cohere2_moe", "cohere2moe")
NOTHING_NEW = {  # what the file says already, or what is of no account in the family
    **{(arch, "rope.scaling.factor"): "it is in the file" for arch in ("mistral3", "deepseek2", "gpt-oss")},
    **{
        (arch, "rope.scale_linear"): "rope.scaling.factor is in the file"
        for arch in ("mistral3", "deepseek2", "gpt-oss")
    },
    **{(arch, "attention.value_length"): "heads have a key of their own" for arch in LATENT},
    **{(arch, f"rope.{key}"): "it says none" for arch in COHERE for key in ("scaling.factor", "scale_linear")},
    **{(arch, "kda.gate_lower_bound"): "it is in the file" for arch in ("bailingmoe3", "glm5-next")},
    ("glm5-next", "rope.freq_base"): "nothing rotates",
}
ALSO_NAMED = {
    ("gemma4", "attention.key_length_swa"): "value_length_swa",  # which says otherwise
    ("phi3", "rope.scale_linear"): "linear",
    ("phimoe", "rope.scale_linear"): "rope_parameters",
    **{("step35", f"rope.{key}"): "rope_freqs" for key in ("scaling.factor", "scale_linear", "freq_base")},
}


@cache
def file_of(arch: str, folder: Path) -> tuple[dict[str, object], dict[str, tuple[int, ...]], dict[str, list[float]]]:
    if arch not in MODELS:
        name = next(name for name, case in CASES.items() if case[0] == arch)
        return read_back(write_newer(newer_model(name), folder / f"{arch}.gguf", arch))
    kind = MODELS[arch]
    values = values_of(arch, kind) if kind not in MODEL_TYPES or arch in ("bailingmoe2",) else {}
    experts = "gate_up" if arch == "gemma4" else "merged"
    return read_back(write_gguf(built(kind, values), folder / f"{arch}.gguf", arch=arch, experts=experts))


def read_back(path: Path) -> tuple[dict[str, object], dict[str, tuple[int, ...]], dict[str, list[float]]]:
    opened = open_gguf(path)
    factors = {n: dequantize(opened.raw(n), n).tolist() for n in FACTOR_TENSORS if n in opened.tensors}
    return dict(opened.metadata), {name: one.shape for name, one in opened.tensors.items()}, factors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def outcome(
    metadata: dict[str, object], shapes: dict[str, tuple[int, ...]], factors: dict[str, list[float]]
) -> dict[str, object] | str:
    """The config as a dictionary, or why there is none."""
    try:
        config: dict[str, object] = config_from_gguf(metadata, shapes, factors).to_dict()
    except KTransformersError as error:
        return str(error)
    return config


@pytest.mark.every(5)
@pytest.mark.parametrize("arch", sorted(set(FAMILIES) - set(RECURRENT_FAMILIES) - set(COMPRESSED_FAMILIES)))
def test_what_changes_the_answer_is_honoured_or_refused_by_name(arch: str, folder: Path) -> None:
    metadata, shapes, factors = file_of(arch, folder)
    plain = config_from_gguf(metadata, shapes, factors).to_dict()
    silent = []
    for key, value in PROBES.items():
        if (arch, key) in NOTHING_NEW or (arch in WITHOUT_ROTATION and key in ROTATION):
            continue
        got = outcome(metadata | {f"{arch}.{key}": value}, shapes, factors)
        named = ALSO_NAMED.get((arch, key), key.rsplit(".", 1)[-1])
        if got == plain or (isinstance(got, str) and named not in got and str(value) not in got):
            silent.append((key, got if isinstance(got, str) else "is ignored"))
    assert silent == []


ROUTERS = {
    "expert_weights_norm": (False, True),
    "expert_gating_func": (1, 2, 4),
    "expert_group_count": (4,),
    "expert_group_used_count": (2,),
}
"""Of each, one value at least is not the family's: that is honoured or refused. Groups: the other key is taken away."""


@pytest.mark.parametrize("key", ROUTERS)
@pytest.mark.parametrize("arch", sorted({*MODELS, *METADATA} - set(RECURRENT_FAMILIES)))
def test_what_a_router_does_is_honoured_or_refused(arch: str, key: str, folder: Path) -> None:
    metadata, shapes, factors = file_of(arch, folder)
    if not any(name.endswith("ffn_gate_inp.weight") for name in shapes):
        return
    given = {one: value for one, value in metadata.items() if ".expert_group_" not in one}
    results = []
    for value in ROUTERS[key]:
        got = outcome(given | {f"{arch}.{key}": value}, shapes, factors)
        assert isinstance(got, dict) or any(one in got for one in (key, "norm", "neither DeepSeek")), got
        results.append(got)
    if key.startswith("expert_group"):
        assert isinstance(results[0], str)
    else:
        assert any(one != results[0] for one in results)


SAID_TWICE: list[tuple[str, dict[str, object]]] = [
    ("llama", {"rope.scaling.factor": 1.0, "rope.scaling.type": "none", "attention.causal": True}),
    ("llama", {"rope.scaling.factor": 0.0, "logit_scale": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0}),
    ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),  # none is none, whatever stands beside it
    ("llama", {"attention.scale": 16**-0.5, "vocab_size": 160}),
    ("qwen3", {"attention.sliding_window": 512, "attention.sliding_window_pattern": np.array([True, False])}),
    ("llama", {"tensor_data_layout": "Meta AI original pth", "expert_count": 0, "expert_used_count": 0}),
    ("llama", {"rope.freq_base_swa": 10000.0, "rope.dimension_sections": np.zeros(4, dtype=np.int32)}),
    ("qwen3moe", {"expert_weights_scale": 1.0, "expert_group_count": 1, "expert_group_used_count": 1}),
    ("qwen3moe", {"expert_gating_func": 1, "expert_shared_feed_forward_length": 0, "swin_norm": False}),
    ("qwen2vl", {"rope.dimension_sections": np.array([3, 3, 2, 0])}),
    ("glm4moe", {"rope.dimension_sections": np.array([3, 3, 2, 0])}),  # GLM-4.5V: text as GLM-4.5-Air reads it
    ("gpt-oss", {"expert_gating_func": 3, "rope.freq_base_swa": 150000.0}),
    ("gemma2", {"rope.scaling.yarn_beta_fast": 32.0, "pooling_type": 1, "classifier.output_labels": ["a"]}),
]


@pytest.mark.parametrize(("arch", "said"), SAID_TWICE)
def test_what_holds_anyway_is_taken(arch: str, said: dict[str, object], folder: Path) -> None:
    metadata, shapes, factors = file_of(arch, folder)
    more = {f"{arch}.{key}": value for key, value in said.items()}
    if "rope.freq_base_swa" in said:
        more[f"{arch}.rope.freq_base_swa"] = metadata[f"{arch}.rope.freq_base"]
    want = config_from_gguf(metadata, shapes, factors).to_dict()
    got = config_from_gguf(metadata | more, shapes, factors).to_dict()
    assert got == want


SCALINGS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # llama.cpp's kind of a file that names none
    ({"type": "linear", "factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
    ({"type": "linear"}, {"rope_type": "default"}),
    ({"type": "yarn", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}),
    (
        {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
        {"rope_type": "yarn", "original_max_position_embeddings": 128, "beta_fast": 16.0, "beta_slow": 2.0},
    ),
    ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": -1.0}, {"rope_type": "yarn"}),
    ({"type": "yarn", "factor": 4.0, "yarn_attn_factor": 1.25}, {"rope_type": "yarn", "attention_factor": 1.25}),
    ({"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 0.1}, {"mscale": 1.0, "mscale_all_dim": 1.0}),
]


@pytest.mark.parametrize(("said", "wanted"), SCALINGS)
def test_scalings_of_rotation(said: dict[str, object], wanted: dict[str, object], folder: Path) -> None:
    metadata, shapes, factors = file_of("llama", folder)
    more = {f"llama.rope.scaling.{key}": value for key, value in said.items()}
    rope = config_from_gguf(metadata | more, shapes, factors).rope_parameters
    assert {key: rope.get(key) for key in wanted} == wanted


def test_the_old_name_of_the_factor(folder: Path) -> None:
    metadata, shapes, factors = file_of("llama", folder)
    rope = config_from_gguf(metadata | {"llama.rope.scale_linear": 8.0}, shapes, factors).rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("linear", 8.0)


REFUSED_SCALINGS: list[tuple[dict[str, object], str]] = [
    ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.5}, "yarn_ext_factor 0.5"),
    ({"attn_factor": 1.2}, "attn_factor 1.2"),
    ({"factor": -2.0}, "factor is -2"),
    ({"type": 3}, "type is no text"),
    ({"type": "longrope"}, "without rope_factors_long.weight"),
]


@pytest.mark.parametrize(("said", "message"), REFUSED_SCALINGS)
def test_scalings_that_are_refused(said: dict[str, object], message: str, folder: Path) -> None:
    metadata, shapes, factors = file_of("llama", folder)
    with pytest.raises(KTransformersError, match=message):
        config_from_gguf(
            metadata | {f"llama.rope.scaling.{key}": value for key, value in said.items()}, shapes, factors
        )


def test_a_factor_beside_longrope_is_refused(folder: Path) -> None:
    """llama.cpp divides positions by it as well; transformers has no such rotation."""
    metadata, shapes, _ = file_of("llama", folder)
    names = ("rope_factors_long.weight", "rope_factors_short.weight")
    said = {"type": "longrope", "factor": 4.0, "original_context_length": 128}
    more = {f"llama.rope.scaling.{key}": value for key, value in said.items()}
    with pytest.raises(UnsupportedError, match=r"llama\.rope\.scaling\.factor 4 beside longrope"):
        config_from_gguf(metadata | more, shapes | dict.fromkeys(names, (8,)), {name: [1.0] * 8 for name in names})


def test_mistral3_says_the_scale_of_attention_as_it_is(folder: Path) -> None:
    """And not a tenth of it, as DeepSeek's files do (llama.cpp's converter of Ministral 3, and its reader)."""
    metadata, shapes, factors = file_of("mistral3", folder)
    rope = config_from_gguf(
        metadata | {"mistral3.rope.scaling.yarn_log_multiplier": 0.75}, shapes, factors
    ).rope_parameters
    assert (rope["mscale"], rope["mscale_all_dim"]) == (1.0, 0.75)


def test_keys_that_nobody_knows_are_named_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata, shapes, factors = file_of("qwen3", folder)
    more = {"qwen3.brand_new": 5, "qwen3.vision.block_count": 27, "qwen3.mm.tokens_per_image": 256}
    with caplog.at_level(logging.INFO):
        config_from_gguf(metadata | more, shapes, factors)
    assert [record.getMessage() for record in caplog.records] == [
        "keys of qwen3 that are not known here were left aside: brand_new"
    ]


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix"])
def test_files_that_hold_no_model_say_so(kind: str, folder: Path) -> None:
    metadata, shapes, factors = file_of("qwen3", folder)
    with pytest.raises(UnsupportedError, match=f"general.type is '{kind}'"):
        config_from_gguf(metadata | {"general.type": kind}, shapes, factors)


OLLAMAS = [
    ({}, 1e6, 10000.0, None),
    ({"rope.global.freq_base": 5e5, "rope.local.freq_base": 2e4}, 5e5, 2e4, None),
    ({"context_length": 131072}, 1e6, 10000.0, 8.0),  # as published; the converter does not write it
    ({"context_length": 131072, "rope.scaling.factor": 1.0}, 1e6, 10000.0, None),
]


@pytest.mark.parametrize(("said", "theta", "local", "factor"), OLLAMAS)
def test_gemma3_of_ollamas_converter(
    said: dict[str, object], theta: float, local: float, factor: float | None, folder: Path
) -> None:
    """Bases of rotation under other names, no epsilon and no scaling."""
    metadata, shapes, factors = file_of("gemma3", folder)
    left_out = re.compile(r"gemma3\.(rope\.freq_base(_swa)?|rope\.scaling\..*|attention\.layer_norm_rms_epsilon)")
    kept = {key: value for key, value in metadata.items() if not left_out.fullmatch(key)}
    config = config_from_gguf(kept | {f"gemma3.{key}": value for key, value in said.items()}, shapes, factors)
    rope = config.rope_parameters
    assert config.rms_norm_eps == 1e-6
    assert (rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"]) == (theta, local)
    assert rope["full_attention"].get("factor") == factor


SAMPLING: list[tuple[dict[str, object], SamplingParams]] = [
    ({}, SamplingParams(temperature=0.0)),
    (
        {"temp": 0.6, "top_k": 20, "top_p": float(np.float32(0.95))},
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    ),
    (
        {"temp": 0.7, "min_p": 0.125, "penalty_repeat": 1.5},
        SamplingParams(temperature=0.7, min_p=0.125, repetition_penalty=1.5),
    ),
    ({"top_p": 0.5}, SamplingParams(top_p=0.5)),
    ({"penalty_repeat": 1.25}, SamplingParams(temperature=0.0, repetition_penalty=1.25)),
]


@pytest.mark.parametrize(("said", "wanted"), SAMPLING)
def test_recommended_sampling_is_the_default(said: dict[str, object], wanted: SamplingParams) -> None:
    defaults = sampling_defaults({f"general.sampling.{key}": value for key, value in said.items()})
    assert default_sampling_params(defaults, None) == replace(wanted, max_tokens=None)


@pytest.mark.parametrize(
    ("key", "value"), [("temp", -1.0), ("temp", "hot"), ("top_p", 1.5), ("min_p", np.nan), ("top_k", True)]
)
def test_absurd_sampling_is_refused(key: str, value: object) -> None:
    with pytest.raises(FormatError, match=rf"general\.sampling\.{key} is "):
        sampling_defaults({f"general.sampling.{key}": value})


def test_sampling_that_nobody_has_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert sampling_defaults({"general.sampling.mirostat": 2, "general.sampling.xtc_threshold": 0.1}) == {}
    assert "mirostat, xtc_threshold are left aside" in caplog.text


def test_an_engine_of_a_gguf_has_them() -> None:
    opened = open_model(EngineConfig(gguf_path=DEMO_GGUF))
    assert opened.gguf is not None
    opened.gguf.metadata = dict(opened.gguf.metadata) | {"general.sampling.temp": 0.5}
    assert describe_model(opened).generation_defaults["temperature"] == 0.5
