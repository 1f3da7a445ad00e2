"""Turn trained weights into what ships: one BF16 safetensors, its configs, and a quantized GGUF.

    python examples/demo_model/export.py --weights build/demo --out examples/demo_model/checkpoint

OUT must hold the tokenizer and chat_template.jinja already; the GGUF goes to --gguf_out, where the package has it.
Gate and up projections of the experts become Q4_K, everything else that is multiplied Q6_K,
norms and routers F32. It knows nothing of training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import torch
from model import Shape
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from ktransformers.config import DEMO_MODEL_PATH
from ktransformers.kernels.types import QuantType
from ktransformers.weights.quantize.write import quantize

GGUF_NAME = "demo-Q4_K_M.gguf"
# The tensors of one decoder layer: HF name -> (GGUF name, type).
LAYER_TENSORS = {
    "input_layernorm": ("attn_norm", QuantType.F32),
    "self_attn.q_proj": ("attn_q", QuantType.Q6_K),
    "self_attn.k_proj": ("attn_k", QuantType.Q6_K),
    "self_attn.v_proj": ("attn_v", QuantType.Q6_K),
    "self_attn.o_proj": ("attn_output", QuantType.Q6_K),
    "self_attn.q_norm": ("attn_q_norm", QuantType.F32),
    "self_attn.k_norm": ("attn_k_norm", QuantType.F32),
    "post_attention_layernorm": ("ffn_norm", QuantType.F32),
    "mlp.gate": ("ffn_gate_inp", QuantType.F32),
}
EXPERT_TYPES = {"gate": QuantType.Q4_K, "up": QuantType.Q4_K, "down": QuantType.Q6_K}


def merged(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files in `folder`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"export.py: no *.safetensors in {folder}: train first, or give another --weights")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state.update(load_file(file))
    return state


def write_safetensors(state: dict[str, torch.Tensor], shape: Shape, tokenizer: Tokenizer, out: Path) -> None:
    """model.safetensors, config.json and generation_config.json."""
    eos, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    save_file(dict(sorted(state.items())), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(shape.hf_config(eos, pad), indent=2) + "\n")
    generation = {"eos_token_id": [eos, pad], "pad_token_id": pad, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, qtype: QuantType) -> None:
    """One tensor of any rank, its rows quantized to `qtype`."""
    values = tensor.float().numpy()
    if qtype == QuantType.F32:
        writer.add_tensor(name, values)
        return
    packed = quantize(values.reshape(-1, values.shape[-1]), qtype)
    writer.add_tensor(name, packed.reshape(*values.shape[:-1], -1), raw_dtype=qtype)


def add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name("ktransformers demo")
    writer.add_license("apache-2.0")
    writer.add_size_label("16x0.9M")
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(2 * shape.moe_intermediate_size)
    writer.add_expert_feed_forward_length(shape.moe_intermediate_size)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.num_experts_per_tok)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, template: str) -> None:
    """Byte-level BPE as llama.cpp stores it: tokens by id, their types, merges, and the name of the splitting rule."""
    content = json.loads(tokenizer.to_str())
    added = {t["id"]: t for t in content["added_tokens"]}
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [
        (gguf.TokenType.CONTROL if added[i]["special"] else gguf.TokenType.USER_DEFINED)
        if i in added
        else gguf.TokenType.NORMAL
        for i in range(len(tokens))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_pad_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)


def write_gguf(state: dict[str, torch.Tensor], shape: Shape, tokenizer: Tokenizer, template: str, file: Path) -> None:
    """A qwen3moe GGUF with merged experts; the output head is the token embedding."""
    writer = gguf.GGUFWriter(file, "qwen3moe")
    add_metadata(writer, shape)
    add_tokenizer(writer, tokenizer, template)
    add_tensor(writer, "token_embd.weight", state["model.embed_tokens.weight"], QuantType.Q6_K)
    add_tensor(writer, "output_norm.weight", state["model.norm.weight"], QuantType.F32)
    for layer in range(shape.num_hidden_layers):
        source, target = f"model.layers.{layer}.", f"blk.{layer}."
        for name, (gguf_name, qtype) in LAYER_TENSORS.items():
            add_tensor(writer, f"{target}{gguf_name}.weight", state[f"{source}{name}.weight"], qtype)
        for part, qtype in EXPERT_TYPES.items():
            names = [f"{source}mlp.experts.{e}.{part}_proj.weight" for e in range(shape.num_experts)]
            add_tensor(writer, f"{target}ffn_{part}_exps.weight", torch.stack([state[n] for n in names]), qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="folder with the *.safetensors of train.py")
    parser.add_argument("--out", type=Path, required=True, help="folder with the tokenizer and the chat template")
    parser.add_argument("--gguf_out", type=Path, default=DEMO_MODEL_PATH, help="folder of the GGUF (%(default)s)")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
    template = (options.out / "chat_template.jinja").read_text(encoding="utf-8")
    state = merged(options.weights)
    write_safetensors(state, Shape(), tokenizer, options.out)
    write_gguf(state, Shape(), tokenizer, template, options.gguf_out / GGUF_NAME)
    for file in [*sorted(options.out.iterdir()), options.gguf_out / GGUF_NAME]:
        print(f"{file.stat().st_size:>10} {file.name}")


if __name__ == "__main__":
    main()
