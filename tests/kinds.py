"""A small model of every kind, made of its family: a new kind is tested like the others."""

from typing import Any

from vit_jax.models.create import MODELS, VARIANTS_OF

_SMALL = {"patch_size": 8, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 100}
_SMALL |= {"stage_widths": (8, 16), "group_width": 8}


def small(kind: str) -> dict[str, Any]:
    """Attributes of a tiny model: those of the kind's first variant, shrunk.

    `modern_vit:FORM` is one of `FORMS`.
    """
    kind, _, form = kind.partition(":")
    sizes = dict(next(iter(VARIANTS_OF[kind].values())))
    for key, value in sizes.items():
        if isinstance(value, tuple) and key not in _SMALL:
            sizes[key] = (1,) * min(len(value), 2)
        elif key.endswith("mlp_dim"):
            sizes[key] = 24
        else:
            sizes[key] = _SMALL.get(key.removeprefix("decoder_"), value)
    told = {key: value for key, value in sizes.items() if key not in MODELS[kind].conventions}
    return {"name": kind, **told, **FORMS.get(form, {})}


# Attributes of `modern_vit` that go together in published models.
DINOV3 = {"num_registers": 2, "position_embedding": "none", "qkv_bias": "qv", "mlp": "swiglu"}
DINOV3 |= {"rope": "centered", "rope_jitter": 2.0, "layer_norm_epsilon": 1e-5}
BEIT = {"relative_bias": True, "qkv_bias": "qv", "position_embedding": "none"}
BEIT |= {"classifier": "gap", "final_norm": "pooled", "layer_scale_init": 0.1}
CLIP = {"pre_norm": True, "patch_bias": False, "gelu": "quick", "attention_norm": True}
AIM = {"norm_kind": "rms", "dense_bias": False, "qkv_bias": "none", "patch_norm": True}
AIM |= {"qk_norm": True, "mlp": "swiglu", "mlp_norm": True, "class_token": False}
AIM |= {"classifier": "map", "map_num_heads": 4, "map_mlp_dim": 32}
MIXED = {"rope": "mixed", "rope_base": 10.0, "norm_after": True, "classifier": "token_gap"}
FORMS = {"DINOv3": DINOV3, "BEiT": BEIT, "CLIP": CLIP, "AIMv2": AIM, "mixed": MIXED}


# What sees images: a batch holds them under that key.
SHAPES = {"image": (16, 16, 3), "text": (4,)}  # of one example


def shape_of(kind: str) -> tuple[int, ...]:
    """Of what a model of that kind is called with, without the batch."""
    return SHAPES[MODELS[kind].input]


OF_IMAGES = [
    kind for kind, family in MODELS.items() if getattr(family, "input", "image") == "image"
]
