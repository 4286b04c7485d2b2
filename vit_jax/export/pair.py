"""Writes both towers of a source as one model of transformers: CLIP, MetaCLIP 2, SigLIP (2)."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError, naming
from vit_jax.export import convert
from vit_jax.files.paths import check_local, check_utf8, write_json
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.models.description import Similarity, parts_to_json
from vit_jax.pretrained.arrays import write_safetensors
from vit_jax.pretrained.formats.stored import WEIGHTS_FILE
from vit_jax.pretrained.formats.table import FORMATS
from vit_jax.trees import count_parameters, fingerprint, flatten_names
from vit_jax.workdir.description import MODEL_FILE

# By the classes of the towers of texts and of images.
CLASSES = {
    ("clip", "clip"): "CLIPModel",
    ("metaclip_2", "clip"): "MetaClip2Model",
    ("siglip", "siglip"): "SiglipModel",
    ("siglip2", "siglip2"): "Siglip2Model",
}


def convert_pair(
    source: str, destination: str, *, format: str, drop_head: bool = False, **model_options: Any
) -> dict[str, Any]:
    """Like `convert_checkpoint`, for both towers.

    UserError: see there; also for another format than huggingface, without a tower of texts or a
    temperature, or for towers that no class has together.
    """
    if format != "huggingface" or drop_head:
        raise UserError("--both is for --format=huggingface, without --drop_head.")
    check_local("destination", destination)
    check_utf8("destination", destination)
    target = Path(os.path.expanduser(destination))
    convert.check_destination(target, "huggingface")
    images = load_model(source, **model_options)
    if images.load_texts is None or (pair := images.description.similarity) is None:
        raise UserError(f"--both: {source} has no temperature (logit_scale, or t).")
    with naming("--both"):
        texts = images.load_texts()
    with convert.unfinished(target) as path:
        _write(path, images, texts, pair)
        compared = []
        for before, part in ((images, "img"), (texts, "txt")):
            after, inputs = load_model(f"{path}#{part}"), before.sample(2)
            logits = [convert.compute_logits(x.module, x.params, inputs) for x in (before, after)]
            compared.append((before, after, logits))
        tolerance = convert.LOGITS_TOLERANCE * max(
            1.0, *(float(np.std(x[0])) for *_, x in compared)
        )
        pairs = [tuple(logits) for *_, logits in compared]
        check = convert.check_same(pairs, destination, tolerance, "in the embeddings")
        facts = {"Towers": "of images, and of texts (`#txt`)."}
        report = convert.finish(path, target, images, "huggingface", check, facts=facts)
        return {
            **report,
            "num_parameters": sum(count_parameters(model.params) for model in (images, texts)),
            "notes": [],
            "parameters_identical": all(
                fingerprint(before.params) == fingerprint(after.params)
                for before, after, _ in compared
            ),
        }


def _write(path: Path, images: Model, texts: Model, pair: Similarity) -> None:
    arrays: dict[str, np.ndarray] = {}
    files: dict[str, Any] = {}
    configs = []
    for model in (texts, images):
        description, inputs = model.description, convert.input_settings(model.description)[0]
        write = FORMATS["huggingface"].choose(description.model).write
        own, others = write(flatten_names(model.params), description, inputs)
        arrays |= own
        configs.append(others.pop("config.json"))
        files |= others
    kinds = tuple(config["model_type"].partition("_text_model")[0] for config in configs)
    kinds = kinds[0], kinds[1].partition("_vision_model")[0]
    if kinds == ("siglip", "siglip2"):  # the same tower of texts
        kinds, configs[0]["model_type"] = ("siglip2", "siglip2"), "siglip2_text_model"
    if kinds not in CLASSES:
        classes = " and ".join(config["architectures"][0] for config in configs)
        raise UserError(f"--both: transformers has no class of {classes} together.")
    if (pair.bias is not None) != kinds[0].startswith("siglip"):
        loss = "softmax" if pair.bias is None else "sigmoid"
        raise UserError(f"--both: {CLASSES[kinds]} is not for towers of the {loss} loss.")
    shape = (1,) if pair.bias is not None else ()
    arrays["logit_scale"] = np.full(shape, np.log(pair.scale), np.float32)
    if pair.bias is not None:
        arrays["logit_bias"] = np.full(shape, pair.bias, np.float32)
    configs[1]["model_type"] = f"{kinds[0]}_vision_model"
    width = images.description.model["num_classes"] or images.description.model["hidden_size"]
    files["config.json"] = {
        "architectures": [CLASSES[kinds]],
        "model_type": kinds[0],
        "text_config": configs[0],
        "vision_config": configs[1],
        "projection_dim": width,
        "torch_dtype": "float32",
    }
    path.mkdir(parents=True)
    write_safetensors(path / WEIGHTS_FILE, arrays, {"format": "pt"})
    convert.copy_tokenizer(texts.description, path)
    parts = {"img": images.description, "txt": texts.description}
    for name, value in {**files, MODEL_FILE: parts_to_json(parts)}.items():
        write_json(path / name, value)
