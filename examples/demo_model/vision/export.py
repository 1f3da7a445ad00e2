"""Write the folder that gives the bundled GGUF its eyes: the tower, the composite's config, processor and tokenizer.

    python examples/demo_model/vision/export.py --weights build/eyes/vision.safetensors

OUT holds no weights of the language model: they are the GGUF's (`--model_path OUT --gguf_path demo-Q4_K_M.gguf`).
With --whole FOLDER it also writes a model of safetensors alone there, which transformers opens. It knows nothing of
training.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from data import NUM_POSITIONS, PLACEHOLDER, with_placeholder
from model import IMAGE_SIZE, composite_config
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

DEMO = Path(__file__).resolve().parents[1]
OUT = DEMO.parents[1] / "ktransformers" / "assets" / "demo" / "demo-Q4_K_M"
# LLaVA's processor pads a picture to a square, where InternVL's own would squeeze or tile it.
IMAGE_PROCESSOR = {
    "image_processor_type": "LlavaImageProcessor", "do_convert_rgb": True, "do_pad": True, "do_resize": True, "resample": 3,
    "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE}, "do_center_crop": False, "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": PLACEHOLDER,
    "patch_size": IMAGE_SIZE // 4,  # of a position: four by four of them
    "num_additional_image_tokens": 0,
    "vision_feature_select_strategy": "full",
}
_PARTS = """{%- macro said(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == "image" %}
                {{- "PLACEHOLDER" }}
            {%- elif part.type == "text" %}
                {{- part.text }}
            {%- else %}
                {{- raise_exception("a part of the type '" + part.type + "' is unknown: use text or image") }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""


def template_with_parts(template: str) -> str:
    """The checkpoint's chat template, for contents that are lists of text and images, too."""
    changed = template.replace("set system = messages[0].content", "set system = said(messages[0].content)")
    changed = changed.replace("+ message.content +", "+ said(message.content) +")
    changed = changed.replace('{{- message.content or "" }}', '{{- said(message.content or "") }}')
    assert changed.count("said(") == 4, "chat_template.jinja has other places of contents than it had"
    return _PARTS.replace("PLACEHOLDER", PLACEHOLDER) + changed


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_folder(checkpoint: Path, weights: Path, out: Path) -> None:
    """All that a composite's folder holds but the language model's weights."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    tokenizer = with_placeholder((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    (out / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    config = composite_config(text, Tokenizer.from_str(tokenizer).token_to_id(PLACEHOLDER))
    content = {key: value for key, value in config.to_diff_dict().items() if key != "transformers_version"}
    # The language model's part stays as the checkpoint has it, and the whole ends texts as it does.
    content |= {"text_config": text, "eos_token_id": text["eos_token_id"], "pad_token_id": text["pad_token_id"]}
    assert config.image_seq_length == NUM_POSITIONS
    write_json(out / "config.json", content)
    write_json(out / "preprocessor_config.json", {**IMAGE_PROCESSOR, "processor_class": PROCESSOR["processor_class"]})
    write_json(out / "processor_config.json", PROCESSOR)
    template = template_with_parts((checkpoint / "chat_template.jinja").read_text(encoding="utf-8"))
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(checkpoint / name, out / name)
    if weights.resolve() != (out / "vision.safetensors").resolve():
        shutil.copy(weights, out / "vision.safetensors")


def write_whole(checkpoint: Path, folder: Path, out: Path) -> None:
    """A folder of the whole model: the files of `folder`, the language model's tensors in the composite's names, and an
    index of both. transformers would take a model.safetensors before the index: there is none."""
    shutil.copytree(folder, out, dirs_exist_ok=True)
    text = load_file(checkpoint / "model.safetensors")
    renamed = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in text.items()}
    save_file(renamed, out / "language.safetensors", metadata={"format": "pt"})
    files = dict.fromkeys(renamed, "language.safetensors")
    files |= dict.fromkeys(load_file(out / "vision.safetensors"), "vision.safetensors")
    size = sum((out / file).stat().st_size for file in set(files.values()))
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": files})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=DEMO / "checkpoint", help="the language model (%(default)s)")
    parser.add_argument("--weights", type=Path, help="vision.safetensors of train.py; without, the folder's own stays")
    parser.add_argument("--out", type=Path, default=OUT, help="%(default)s")
    parser.add_argument("--whole", type=Path, metavar="FOLDER", help="assemble the whole model there")
    options = parser.parse_args(arguments)
    write_folder(options.checkpoint, options.weights or options.out / "vision.safetensors", options.out)
    if options.whole is not None:
        write_whole(options.checkpoint, options.out, options.whole)
    for file in sorted(options.out.iterdir()):
        print(f"{file.stat().st_size:>10} {file.name}")


if __name__ == "__main__":
    main()
