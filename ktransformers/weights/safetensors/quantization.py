"""Reads what a config's quantization_config says of weights that the tensors themselves do not, and refuses what cannot
be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ktransformers.errors import UnsupportedError
from ktransformers.models.facts import Quantization

__all__ = ["METHODS", "check_quantization", "scale_block", "scale_names", "weight_groups"]

#: The values of quant_method whose weights can be read. modelopt and compressed-tensors are several formats each.
METHODS = ("fp8", "fbgemm_fp8", "mxfp4", "mxfp8", "nvfp4", "compressed-tensors", "modelopt", "gptq", "awq")
_PACKED_BY_SPARSITY = ("sparse-24-bitmask", "sparse-bitmask", "marlin-24")
_USE_ANOTHER = "use the model's BF16 or FP8 safetensors, or a GGUF of it"
_DEFAULT_BLOCK = (128, 128)


def check_quantization(quantization: Quantization | None) -> None:
    """Raise UnsupportedError, with what to do, for what cannot be read as the library means it."""
    if quantization is None or quantization.method is None:
        return
    method, fields = quantization.method, quantization.fields
    if method not in METHODS:
        raise UnsupportedError(
            f"safetensors quantized with {method!r:.40} are not supported ({', '.join(METHODS)} are); {_USE_ANOTHER}"
        )
    transforms = fields.get("transform_config")
    if transforms and (not isinstance(transforms, Mapping) or transforms.get("config_groups", True)):
        raise UnsupportedError(f"the config's transform_config rotates activations, which is not done; {_USE_ANOTHER}")
    said = str(fields.get("format") or fields.get("checkpoint_format") or "")
    sparsity = fields.get("sparsity_config")
    packed = str(sparsity.get("format")) if isinstance(sparsity, Mapping) else ""
    if method == "gptq" and said.startswith(("marlin", "bitblas")):
        raise UnsupportedError(
            f"GPTQ in the order of {said:.40}'s GPU kernels is not supported; use a checkpoint of the same model whose "
            f"checkpoint_format is gptq (GPTQModel writes those by default), or {_USE_ANOTHER}"
        )
    for one in (said, packed):
        if one in _PACKED_BY_SPARSITY or one.startswith(("marlin", "bitblas")):
            raise UnsupportedError(f"safetensors of the format {one!r:.40} are not supported; {_USE_ANOTHER}")
    version = str(fields.get("version") or "gemm").lower()
    if method == "awq" and version not in ("gemm", "gemv"):
        raise UnsupportedError(
            f"AWQ packed for {version!r:.40} is not supported, only for gemm and gemv; use a checkpoint of the same "
            f"model whose version is gemm (what AutoAWQ and llm-compressor write by default), or {_USE_ANOTHER}"
        )
    algorithm = str(fields.get("quant_algo") or "").upper()
    if method == "modelopt" and ("AWQ" in algorithm or "SVD" in algorithm):
        raise UnsupportedError(f"modelopt's {algorithm:.40} scales activations, which is not done; {_USE_ANOTHER}")


def scale_block(quantization: Quantization | None) -> tuple[int, int]:
    """Return the (rows, columns) of FP8 weights that share a scale."""
    if quantization is None:
        return _DEFAULT_BLOCK
    if quantization.block is not None:
        return quantization.block
    for weights in weight_groups(quantization.fields):
        block = weights.get("block_structure")
        if isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
            return (block[0], block[1])
    return _DEFAULT_BLOCK


def scale_names(weight: str) -> Iterator[str]:
    """Yield the names under which files may hold the scales of a matrix: X.weight_scale_inv (DeepSeek-V3),
    X.weight_scale (other tools), X.scale (DeepSeek-V4) and X.qscale_weight (Mistral Large 4).
    """
    yield f"{weight}_scale_inv"
    yield f"{weight}_scale"
    base, _, kind = weight.rpartition(".")
    if kind == "weight":
        yield f"{base}.scale"
        yield f"{base}.qscale_weight"


def weight_groups(fields: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the settings of compressed-tensors' config for the weights of each of its groups."""
    groups = fields.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights
