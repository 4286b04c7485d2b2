"""The text towers of transformers' CLIP, SigLIP and their kin: names and settings, both ways.

Those of OpenAI and open_clip have these names too, after `translations.py`. A file of two towers
holds the parts `img` and `txt`.
"""

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.files.paths import reading
from vit_jax.kinds import check_known
from vit_jax.models.description import Description
from vit_jax.models.later.text import BLOCKS, EMBEDDING, POSITIONS
from vit_jax.pretrained.formats.huggingface import CLIP_BLOCK, FIRST_AXIS
from vit_jax.pretrained.formats.huggingface_config import GELUS, WRITTEN_GELUS
from vit_jax.pretrained.formats.names import Names, Part, read_table, write_table
from vit_jax.pretrained.formats.stored import (
    NUMBER,
    Arrays,
    Beside,
    Holds,
    Stored,
    Written,
    positive,
)

TOWER, PROJECTION = "text_model.", "text_projection."
_SIMILARITY = ("logit_scale", "logit_bias")
# What a class computes where `config.json` says nothing; `eos_token_id` is the end of a text.
_CLIP: dict[str, Any] = {
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "num_attention_heads": 8,
    "eos_token_id": 49407,
    "is_causal": True,
    "pooling": "end",
}
_SIGLIP: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "num_attention_heads": 12,
    "is_causal": False,
    "pooling": "last",
}


# Kinds of transformers' models, and the `eos_token_id` for which they take the highest token:
# the first files of CLIP say 2.
_FAMILIES = {"clip": 2, "clipseg": 2, "metaclip_2": None, "open_clip": None, "owlv2": "always"}
_FAMILIES |= {"owlvit": "always", "siglip": None, "siglip2": None, "xclip": "always"}


def _prefix(names: Collection[str]) -> str | None:
    """Of the names of a text tower; None: there is none of these classes."""
    known = (p for p in (TOWER, "") if f"{p}embeddings.token_embedding.weight" in names)
    return next(known, None)


def choose_tower(arrays: Arrays, part: str) -> tuple[Arrays, dict[str, str]]:
    """Of a file with a text tower the arrays of a part, by default of its images if it has some.

    Also what is left out and why. UserError: a tower of another kind is asked for.
    """
    texts = {name for name in arrays if name.startswith((TOWER, PROJECTION))}
    images = arrays.keys() - texts - {*_SIMILARITY}
    if not texts:
        return arrays, {}
    is_text = part == "txt" or not images
    if is_text and _prefix(texts) is None:
        raise UserError(
            f"{min(texts)}: only text towers of CLIP and SigLIP are read, not those of language "
            "models (RoBERTa, mT5, NLLB, Chinese CLIP's)."
        )
    chosen, tower = (texts, "texts'") if is_text else (images, "images'")
    dropped = {name: f"not of the {tower} tower" for name in arrays if name not in chosen}
    return {name: array for name, array in arrays.items() if name in chosen}, dropped


def detect(arrays: Arrays, _: str) -> bool:
    return _prefix(arrays) is not None


def of_texts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of several towers -> those of the one for texts."""
    return {**settings, **(settings.get("text_config") or {})}


def check_class(settings: Mapping[str, Any]) -> None:
    """Raises a UserError for a class of transformers with another tower for texts."""
    if model_type := of_texts(settings).get("model_type"):
        known = str(model_type).removesuffix("_text_model")
        check_known("config.json: model_type of the texts' tower", known, _FAMILIES)


def read(arrays: Arrays, beside: Beside) -> Stored:
    """UserError if the model has a part that ours lacks."""
    prefix, settings = _prefix(arrays) or "", of_texts(beside.settings)
    model_type = str(settings.get("model_type", ""))
    check_class(beside.settings)
    highest = _FAMILIES.get(model_type.removesuffix("_text_model"))
    is_siglip = f"{prefix}head.weight" in arrays or model_type.startswith("siglip")
    is_siglip = is_siglip or f"{PROJECTION}bias" in arrays  # open_clip's
    with reading("config.json"):
        known = {**(_SIGLIP if is_siglip else _CLIP), **settings}
        check_known("config.json: hidden_act", known["hidden_act"], GELUS)
        end = known["eos_token_id"] if known["pooling"] == "end" else None
        if not settings or highest in (end, "always"):
            end = None
        conventions = {
            "gelu": GELUS[known["hidden_act"]],
            "layer_norm_epsilon": float(known["layer_norm_eps"]),
            "causal": bool(known["is_causal"]),
            "pooling": known["pooling"],
            "end_token": end,
        }
        heads = positive(known["num_attention_heads"]) if model_type else None
    stored = Stored("huggingface", conventions=conventions)
    length = len(arrays.get(f"{prefix}embeddings.position_embedding.weight", ()))
    stored.eval_preprocess = _tokenize(beside, is_siglip, settings.get("clean", ""), length)
    width = arrays[f"{prefix}final_layer_norm.weight"].size
    stored.num_heads = beside.heads_of(arrays, heads, width // 64)
    read_table(stored, arrays, _table(prefix, f"{prefix}head."), stored.num_heads)
    if "head/kernel" in stored.params and "head/bias" not in stored.params:
        zeros = np.zeros(stored.params["head/kernel"].shape[-1], np.float32)
        stored.add("head/bias", zeros)
        stored.changed["head/bias"] = "zeros, as there is none"
    return stored


# By preference, and what their libraries do with a text first.
_TOKENIZERS = {"spiece.model": "siglip", "tokenizer.json": "none"}
_TOKENIZERS |= {"bpe_simple_vocab_16e6.txt.gz": "lower"}


def _tokenize(beside: Beside, is_siglip: bool, clean: str, length: int) -> str:
    """The op with the tokenizer beside the weights, cleaning as stated if it is; "" without one."""
    names = ["tokenizer.json", *_TOKENIZERS] if clean else [*_TOKENIZERS]
    names = names if beside.settings else names[-1:]  # beside a lone file others' may be
    path = next((path for path in map(beside.folder.joinpath, names) if path.is_file()), None)
    if path is None or clean == "unknown":
        return ""
    name = str(path.absolute() if isinstance(path, Path) else path)
    usual = _TOKENIZERS[path.name]
    if is_siglip and path.name == "tokenizer.json":  # Gemma's, with capitals; SigLIP 2 saw none
        usual = "lowercase"
    return f"tokenize('caption', {name!r}, {length}, {clean or usual!r})"


def _table(prefix: str, head: str) -> tuple[Part, ...]:
    names: Names = {
        EMBEDDING: "embeddings.token_embedding.weight",
        POSITIONS: ("embeddings.position_embedding.weight", FIRST_AXIS),
        "Encoder_0/encoder_norm/": "final_layer_norm.",
    }
    heads = [Part({"head/": name}) for name in (head, PROJECTION)]
    blocks = Part(CLIP_BLOCK, f"{BLOCKS}_{{}}/", f"{prefix}encoder.layers.{{}}.")
    return Part(names, theirs=prefix), *heads, blocks


def _write(is_siglip: bool, params: Arrays, description: Description, _: Any) -> Written:
    """Arrays and `config.json`; UserError if not representable."""
    model, params = description.model, dict(params)
    end = model["end_token"]
    name, kind = (_SIGLIP_MODEL, "siglip") if is_siglip else (_CLIP_MODEL, "clip")
    if end == 2:  # which CLIP's class takes for the highest id
        name, kind = "MetaClip2TextModelWithProjection", "metaclip_2"
    if not is_siglip and np.any(params.pop("head/bias")):
        raise UserError(f"{name} of transformers has no bias in its head; use --format=npz.")
    head = f"{TOWER}head." if is_siglip else PROJECTION
    config = {
        "architectures": [name],
        "model_type": f"{kind}_text_model",
        "vocab_size": model["vocab_size"],
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["mlp_dim"],
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_heads"],
        "max_position_embeddings": description.image_shape[0],
        "hidden_act": next(act for act in WRITTEN_GELUS if GELUS[act] == model["gelu"]),
        "layer_norm_eps": model["layer_norm_epsilon"],
        "projection_size" if is_siglip else "projection_dim": model["num_classes"],
        "torch_dtype": "float32",
    }
    if not is_siglip:
        config["eos_token_id"] = 2 if end is None else end
    return write_table(_table(TOWER, head), params, "huggingface"), {"config.json": config}


_CLIP_MODEL, _SIGLIP_MODEL = "CLIPTextModelWithProjection", "SiglipTextModel"
TEXTS = (
    Holds(
        "text",
        functools.partial(_write, False),
        {"causal": (True,), "pooling": ("end",), "num_classes": (NUMBER,)},
        name=_CLIP_MODEL,
    ),
    Holds(
        "text",
        functools.partial(_write, True),
        {"causal": (False,), "pooling": ("last",), "num_classes": (NUMBER,)},
        name=_SIGLIP_MODEL,
    ),
)
