"""Files of a model for pictures and text in the shape of Qwen3-VL-30B-A3B, with random weights, and pictures for it.

text.gguf          language model, Q4_K_M, with the bundled model's vocabulary and the tokens of pictures
mmproj-F16.gguf    tower, as llama.cpp's converter writes it

Both llama.cpp and we read them. Layers share their bytes. Answers mean nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from PIL import Image, ImageDraw

from ktransformers.bench.loading.files import FileShape, write_gguf
from ktransformers.config import bundled_files
from ktransformers.weights.gguf.file import open_gguf

__all__ = ["TEXT_NAME", "TOWER_NAME", "TowerShape", "draw_screenshot", "write_model"]

TEXT_NAME, TOWER_NAME = "text.gguf", "mmproj-F16.gguf"
_PICTURE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEMPLATE = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\\n" }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- "<|vision_start|><|image_pad|><|vision_end|>" if part.type == "image" else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
_FEATURE_GAIN = 20.0
"""Of the last matrix of the tower: features are as large as the embeddings of tokens, so that rows choose different
experts."""


@dataclass(frozen=True, slots=True)
class TowerShape:
    """The tower of Qwen3-VL-30B-A3B. side: patches of a side that it has learned positions for. deepstack: blocks
    behind which features are taken."""

    blocks: int = 27
    hidden: int = 1152
    heads: int = 16
    width: int = 4304
    patch: int = 16
    merge: int = 2
    side: int = 48
    deepstack: tuple[int, ...] = (8, 16, 24)

    @property
    def merged(self) -> int:
        """Width of the patches that become one position."""
        return self.merge**2 * self.hidden

    def flop(self, pixels: int, text_hidden: int) -> float:
        """Return the floating-point operations for a picture of so many pixels: products of matrices only."""
        patches = pixels // self.patch**2
        block = 4 * self.hidden**2 + 2 * self.hidden * self.width
        attention = 2 * patches * self.hidden
        merging = self.merged * (self.merged + text_hidden) // self.merge**2 * (1 + len(self.deepstack))
        inputs = 2 * 3 * self.patch**2 * self.hidden
        return 2.0 * patches * (self.blocks * (block + attention) + merging + inputs)


def write_model(folder: Path, text: FileShape, tower: TowerShape) -> Path:
    """Write both files into a folder, and return the language model's. text.vocab is not looked at."""
    tokens, types, merges = _vocabulary()

    def add_more(writer: gguf.GGUFWriter) -> None:
        half = text.head_dim // 2
        writer.add_rope_dimension_sections([half - 2 * (half * 5 // 16), half * 5 // 16, half * 5 // 16, 0])
        writer.add_uint32("qwen3vlmoe.n_deepstack_layers", len(tower.deepstack))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_eos_token_id(tokens.index("<|im_end|>"))
        writer.add_pad_token_id(tokens.index("<|endoftext|>"))
        writer.add_add_bos_token(False)
        writer.add_chat_template(_TEMPLATE)

    shape = FileShape(
        text.layers, text.hidden, text.experts, text.width, text.heads, len(tokens), text.kv_heads, text.head_dim
    )
    write_gguf(folder / TEXT_NAME, shape, "qwen3vlmoe", add_more)
    _write_tower(folder / TOWER_NAME, tower, text.hidden)
    return folder / TEXT_NAME


def _vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types, and what they are merged of."""
    path, _ = bundled_files("the bundled model has the vocabulary")
    metadata = open_gguf(path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    types = np.asarray(metadata["tokenizer.ggml.token_type"]).tolist()
    added = [token for token in _PICTURE_TOKENS if token not in tokens]
    merges = metadata["tokenizer.ggml.merges"]
    assert isinstance(merges, list)
    return [*tokens, *added], [*types, *(int(gguf.TokenType.CONTROL) for _ in added)], merges


def _write_tower(path: Path, shape: TowerShape, text_hidden: int) -> None:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": shape.side * shape.patch,
        "patch_size": shape.patch,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.width,
        "projection_dim": text_hidden,
        "block_count": shape.blocks,
        "attention.head_count": shape.heads,
        "spatial_merge_size": shape.merge,
    }
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    writer.add_array("clip.vision.is_deepstack_layers", [index in shape.deepstack for index in range(shape.blocks)])
    made: dict[tuple[tuple[int, ...], float], np.ndarray] = {}
    generator = np.random.default_rng(0)
    for name, size, std in _tower_tensors(shape, text_hidden):
        if (size, std) not in made:
            is_half = len(size) > 1 and "position" not in name
            made[size, std] = _drawn(generator, size, std).astype(np.float16 if is_half else np.float32)
        writer.add_tensor(name, made[size, std])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _drawn(generator: np.random.Generator, size: tuple[int, ...], std: float) -> np.ndarray:
    """Numbers of mean 0, those of each row too: what all inputs have in common, as a picture's background, is in no
    output, or else all rows would choose the same experts."""
    if not std:
        return np.ones(size)
    values = generator.standard_normal(size, dtype=np.float32) * np.float32(std)
    return values - values.mean(tuple(range(1, len(size))), keepdims=True) if len(size) > 1 else values


def _tower_tensors(shape: TowerShape, text_hidden: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name, size and standard deviation of every one; 0: ones."""
    hidden, merged, last = shape.hidden, shape.merged, 0.02 * _FEATURE_GAIN
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        yield name, (hidden, 3, shape.patch, shape.patch), 0.02
    yield "v.patch_embd.bias", (hidden,), 0.01
    yield "v.position_embd.weight", (shape.side**2, hidden), 0.5
    modules: list[tuple[str, tuple[int, ...], float]] = [
        ("v.post_ln", (hidden,), 0.0),
        ("mm.0", (merged, merged), 0.02),
        ("mm.2", (text_hidden, merged), last),
    ]
    for index in shape.deepstack:
        modules.append((f"v.deepstack.{index}.norm", (merged,), 0.0))
        modules.append((f"v.deepstack.{index}.fc1", (merged, merged), 0.02))
        modules.append((f"v.deepstack.{index}.fc2", (text_hidden, merged), 0.02))
    for index in range(shape.blocks):
        block = f"v.blk.{index}"
        modules.append((f"{block}.ln1", (hidden,), 0.0))
        modules.append((f"{block}.ln2", (hidden,), 0.0))
        modules.append((f"{block}.attn_qkv", (3 * hidden, hidden), 0.02))
        modules.append((f"{block}.attn_out", (hidden, hidden), 0.02))
        modules.append((f"{block}.ffn_up", (shape.width, hidden), 0.02))
        modules.append((f"{block}.ffn_down", (hidden, shape.width), 0.02))
    for name, size, std in modules:
        yield f"{name}.weight", size, std
        yield f"{name}.bias", size[:1], 0.01


def draw_screenshot(path: Path, number: int, size: int = 1024) -> None:
    """Draw a window with text, buttons and a chart, of size x size pixels. Another number draws another one."""
    drawn = random.Random(number)
    image = Image.new("RGB", (size, size), (240, 240, 244))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, size, size // 24), fill=(40, 44, 52))
    draw.text((8, 8), f"window {number}", fill="white")
    for line in range(size // 16 - 6):
        words = " ".join("".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(2, 9))) for _ in range(12))
        draw.text((size // 32, size // 16 + 16 * line), words, fill=tuple(drawn.choices(range(120), k=3)))
    for bar in range(12):
        left, height = size * 5 // 8 + bar * size // 40, drawn.randint(size // 20, size // 3)
        draw.rectangle(
            (left, size - 40 - height, left + size // 50, size - 40), fill=tuple(drawn.choices(range(256), k=3))
        )
    for button in range(4):
        top = size // 8 + button * size // 10
        draw.rounded_rectangle((size * 3 // 4, top, size - 24, top + size // 16), 8, fill=(60, 120, 216))
    image.save(path)
