"""Comparison of a WeightSource with the Hugging Face model that its files were written from."""

from __future__ import annotations

import gguf.quants
import torch
from transformers import PreTrainedModel

from ktransformers.kernels.reference import dequantize
from ktransformers.kernels.types import RawTensor
from ktransformers.models.registry import routed_experts
from ktransformers.operators.experts.routed import read_layout
from ktransformers.weights.gguf.source import GGUFSource
from ktransformers.weights.safetensors.source import SafetensorsSource
from ktransformers.weights.source import ExpertsLayout

Source = GGUFSource | SafetensorsSource


def values_of(raw: RawTensor) -> torch.Tensor:
    """fp32 values by gguf's own decoder."""
    rows = raw.data.numpy().reshape(raw.rows, -1)
    return torch.from_numpy(gguf.quants.dequantize(rows, raw.qtype).copy()).reshape(raw.shape)


def expert_keys(model: PreTrainedModel) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith(".experts")]


def layout_of(model: PreTrainedModel, key: str) -> ExpertsLayout:
    module = model.get_submodule(key)
    is_transposed = bool(getattr(module, "is_transposed", False))
    count, a, b = module.gate_up_proj.shape
    hidden, inner = (a, b // 2) if is_transposed else (b, a // 2)
    return ExpertsLayout(
        count,
        hidden,
        inner,
        has_bias=bool(getattr(module, "has_bias", False)),
        is_transposed=is_transposed,
        is_concatenated=bool(getattr(module, "is_concatenated", True)),
    )


def expected_experts(model: PreTrainedModel, key: str, layout: ExpertsLayout) -> dict[str, torch.Tensor]:
    """gate, up, down [E, rows, cols] and their biases, cut out of the module's fused parameters."""
    module = model.get_submodule(key)
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if layout.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    inner = layout.intermediate_size

    def split(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (t[:, :inner], t[:, inner:]) if layout.is_concatenated else (t[:, 0::2], t[:, 1::2])

    out = dict(zip(("gate", "up"), split(gate_up), strict=True)) | {"down": down}
    if layout.has_bias:
        gate_bias, up_bias = split(module.gate_up_proj_bias.detach())
        out |= {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": module.down_proj_bias.detach()}
    return out


def check_whole_model(source: Source, model: PreTrainedModel) -> None:
    """Every tensor of the module tree equals what the source gives, both ways, and nothing stored is left over."""
    used: set[str] = set()
    for name, wanted in model.state_dict().items():
        if ".experts." in name:
            continue
        info = source.find(name)
        assert info is not None, name
        assert info.shape == tuple(wanted.shape), name
        used |= set(info.stored_names)
        dense = source.dense(name)
        assert torch.equal(dense, wanted.float()), name
        dense.add_(1)  # a new tensor, not the file
        raw = source.tensor(name)
        assert (raw.qtype, raw.shape, raw.nbytes) == (info.resident_type, info.shape, info.nbytes), name
        assert torch.equal(values_of(raw), wanted.float()), name
    for key in expert_keys(model):
        used |= check_experts(source, model, key)
    assert {name for name in source.stored_names() if name not in used and not source.ignorable(name)} == set()


def check_experts(source: Source, model: PreTrainedModel, key: str) -> set[str]:
    layout = layout_of(model, key)
    info, weights = source.find_experts(key, layout), source.experts(key, layout)
    assert info is not None
    wanted = expected_experts(model, key, layout)
    nbytes = 0
    for part in ("gate", "up", "down"):
        matrices = getattr(weights, part)
        part_info = getattr(info, part)
        assert torch.equal(torch.stack([values_of(raw) for raw in matrices]), wanted[part].float()), (key, part)
        assert all(raw.qtype is part_info.resident_type for raw in matrices)
        assert part_info.shape == tuple(wanted[part].shape)
        assert part_info.nbytes == sum(raw.nbytes for raw in matrices)
        nbytes += part_info.nbytes
        bias = getattr(weights, f"{part}_bias")
        if layout.has_bias:
            assert torch.equal(bias, wanted[f"{part}_bias"].float())
            nbytes += bias.numel() * 4
        else:
            assert bias is None
    assert info.nbytes == nbytes
    return set(info.stored_names)


def fill(model: PreTrainedModel, source: Source) -> set[str]:
    """Give `model` the files' numbers. Returns the names of the tensors that were read."""
    fused, read = routed_experts(model), set()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.rpartition(".")[0] in fused:
                continue
            info = source.find(name)
            assert info is not None, name
            dense, raw = source.dense(name), source.tensor(name)
            assert info.shape == tuple(dense.shape) == tuple(tensor.shape) == raw.shape, name
            assert (raw.qtype, raw.nbytes) == (info.resident_type, info.nbytes), name
            assert torch.equal(values_of(raw).reshape(dense.shape), dense), name
            tensor.copy_(dense)
            read |= set(info.stored_names)
        for key in fused:
            module = model.get_submodule(key)
            layout = read_layout(module, key)
            experts = source.experts(key, layout)
            up = torch.stack([dequantize(raw) for raw in experts.up])
            if layout.has_gate:
                up = torch.cat([torch.stack([dequantize(raw) for raw in experts.gate]), up], dim=1)
            (module.gate_up_proj if layout.has_gate else module.up_proj).copy_(up)
            module.down_proj.copy_(torch.stack([dequantize(raw) for raw in experts.down]))
            read |= set(source.find_experts(key, layout).stored_names)
    return read
