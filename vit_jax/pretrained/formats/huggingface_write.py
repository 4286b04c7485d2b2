"""Writes Vision Transformers as the class of transformers that computes the same."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.later import modern_vit
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.formats import vit_parts
from vit_jax.pretrained.formats.huggingface import PACKED, TOWER, names_table
from vit_jax.pretrained.formats.huggingface_config import to_settings
from vit_jax.pretrained.formats.names import write_table
from vit_jax.pretrained.formats.stored import NUMBER, ONE_TABLE, Arrays, Holds, Written


class _Class(NamedTuple):
    """A class of transformers without a head, and one with."""

    kind: str  # of their names, see `huggingface`
    model_type: str
    stem: str
    ends: tuple[str, str] = ("Model", "ForImageClassification")

    @property
    def prefix(self) -> str:
        """Of the names of a model with a head."""
        known = {"clip_vision_model": TOWER, "dinov3_vit": "", "vit_mae": "vit."}
        known |= dict.fromkeys(("siglip_vision_model", "siglip2_vision_model"), TOWER)
        return known.get(self.model_type, f"{self.model_type}.")


_VIT = _Class("vit", "vit", "ViT")
_DEIT = _Class("vit", "deit", "DeiT", ("Model", "ForImageClassificationWithTeacher"))
_MAE = _Class("vit", "vit_mae", "ViTMAE", ("ForPreTraining", ""))
_BEIT = _Class("vit", "beit", "Beit")
_CLIP = _Class("clip", "clip_vision_model", "CLIPVision", ("Model", "ModelWithProjection"))
_SIGLIP = _Class("siglip", "siglip_vision_model", "SiglipVision", ("Model", ""))
_SIGLIP2 = _Class("siglip", "siglip2_vision_model", "Siglip2Vision", ("Model", ""))
_DINOV2 = _Class("dinov2", "dinov2", "Dinov2")
_REGISTERS = _Class("dinov2", "dinov2_with_registers", "Dinov2WithRegisters")
_DINOV3 = _Class("dinov3", "dinov3_vit", "DINOv3ViT")
_RECTANGLES = (_VIT, _DEIT, _DINOV3)  # whose images and patches need not be square


def write(cls: _Class, params: Arrays, description: Description, inputs: InputSettings) -> Written:
    """Arrays in the classic naming, and the files beside them; UserError if not representable."""
    model, params, others = description.model, dict(params), dict[str, np.ndarray]()
    name, width = cls.stem + cls.ends[bool(model["num_classes"])], model["hidden_size"]
    if "pre_logits/kernel" in params and "head/kernel" in params:
        raise UserError("transformers has no layer between pooling and head; use --drop_head.")
    if cls is _SIGLIP2 and inputs.patchify is None:
        raise UserError(f"{name} takes images in patches; --preprocess='decode|patchify(256)'.")
    if cls not in _RECTANGLES:
        vit_parts.check_square("huggingface", description, name)
    if modern_vit.POSITIONS in params:  # a row for the class token is part of that token here
        positions = params.pop(modern_vit.POSITIONS)
        params[POSITIONS] = np.pad(positions, ((0, 0), (1, 0), (0, 0)))  # [1, 1 + h*w, D]
    folder = f"{cls.prefix}encoder.layer.{{}}.attention.attention.relative_position_bias"
    others |= vit_parts.write_relative_biases(params, folder)
    if cls is _CLIP and np.any(params.pop("head/bias", np.zeros(1))):
        raise UserError(f"{name} of transformers has no bias in its head; use --drop_head.")
    if cls is _DINOV3:
        params.setdefault("registers", np.zeros((1, 0, width), np.float32))
        others["embeddings.mask_token"] = np.zeros((1, 1, width), np.float32)
    if cls is _REGISTERS:
        others[f"{cls.prefix}embeddings.mask_token"] = np.zeros((1, width), np.float32)
    forms = [PACKED] if cls.kind == "dinov2" and model["mlp"] == "swiglu" else []
    head = {_DEIT: "cls_classifier.", _CLIP: "visual_projection."}.get(cls, "classifier.")
    table = names_table(cls.kind, cls.prefix, *forms, head=head)
    arrays = write_table(table, params, "huggingface") | others
    if cls is _SIGLIP2:  # a layer of patches: [D, C, h, w] -> [D, h * w * C]
        kernel = f"{TOWER}embeddings.patch_embedding.weight"
        arrays[kernel] = arrays[kernel].transpose(0, 2, 3, 1).reshape(width, -1)
    if not model["num_classes"] and cls not in (_CLIP, _SIGLIP, _SIGLIP2, _MAE):  # the bare model
        arrays = {theirs.removeprefix(cls.prefix): array for theirs, array in arrays.items()}
    own = _settings(model, cls) if model["name"] == "modern_vit" else {}
    own |= {"num_patches": math.prod(model["position_grid"])} if cls is _SIGLIP2 else {}
    return arrays, to_settings(description, inputs, cls.model_type, name, **own)


def _ratio(model: dict[str, Any]) -> int:
    """DINOv2's `mlp_ratio`, of which SwiGLU takes 2 / 3, rounded up to 8."""
    for ratio in range(1, 33):
        width = ratio * model["hidden_size"]
        width = (int(width * 2 / 3) + 7) // 8 * 8 if model["mlp"] == "swiglu" else width
        if width == model["mlp_dim"]:
            return ratio
    text = f"--format=huggingface cannot store model.mlp_dim={model['mlp_dim']}"
    raise UserError(f"{text}, no multiple of the width as in DINOv2; use --format=npz or orbax.")


def _settings(model: dict[str, Any], cls: _Class) -> dict[str, Any]:
    """The settings of this class alone."""
    if cls is _CLIP:
        return {"projection_dim": model["num_classes"] or model["hidden_size"]}
    gated, init = model["mlp"] == "swiglu", model["layer_scale_init"]
    of_dino = {"layerscale_value": init, "num_register_tokens": model["num_registers"] or 0}
    if cls.kind == "dinov2":
        return of_dino | {
            "mlp_ratio": _ratio(model),
            "qkv_bias": model["qkv_bias"] == "qkv",
            "use_swiglu_ffn": gated,
            "use_mask_token": False,
        }
    if cls.kind == "dinov3":
        return of_dino | {
            **({"hidden_act": "silu"} if gated else {}),
            "use_gated_mlp": gated,
            **{f"{name}_bias": name[0] in model["qkv_bias"] for name in ("query", "key", "value")},
            **vit_parts.renamed(model, "rope_theta=rope_base pos_embed_rescale=rope_jitter"),
            **vit_parts.renamed(model, "proj_bias=dense_bias mlp_bias=dense_bias"),
        }
    if cls is _VIT:
        return {"qkv_bias": model["qkv_bias"] == "qkv"}
    return {
        "use_mean_pooling": model["classifier"] == "gap",
        "use_relative_position_bias": model["relative_bias"],
        "use_absolute_position_embeddings": model["position_embedding"] == "learned",
        "layer_scale_init_value": init or 0.0,
    }


# ViT and DeiT there classify from their tokens and patchify the image directly.
_PLAIN: dict[str, tuple[Any, ...]] = {"classifier": ("token",), "position_grid": (None,)}
_PLAIN |= {"resnet_layers": (None,), **ONE_TABLE}
_POOLED: dict[str, tuple[Any, ...]] = {"classifier": ("map",), "num_classes": (0,)}
_POOLED |= {"representation_size": (None,), "resnet_layers": (None,), **ONE_TABLE}
_NATIVE = {"position_grid": (NUMBER,), "position_resize": (None, "bilinear")}
# A class of today's has the defaults of these, unless it is said below.
_MODERN = vit_parts.defaults(
    "class_token num_registers position_embedding position_grid relative_bias rope patch_bias "
    "patch_norm pre_norm norm_kind norm_after final_norm qkv_bias dense_bias qk_norm "
    "attention_norm mlp_norm mlp layer_scale_init classifier pool_prefix"
)
_MODERN |= {"num_classes": (0, NUMBER)}
_OF_DINOV2 = {
    "qkv_bias": ("qkv", "none"),
    "mlp": tuple(modern_vit.FAMILY.choices["mlp"]),
    "layer_scale_init": (NUMBER,),
}
_BARE = _OF_DINOV2 | {"num_classes": (0,)}
_HEAD = _OF_DINOV2 | {"num_classes": (NUMBER,), "classifier": ("token_gap",)}
_OF_DINOV3 = _BARE | {
    "num_registers": (None, NUMBER),
    "position_embedding": ("none",),
    "rope": ("centered",),
    "qkv_bias": ("qkv", "qv", "none"),
    "dense_bias": (True, False),
}
_OF_BEIT = {
    "position_embedding": ("learned", "none"),
    "relative_bias": (False, True),
    "qkv_bias": ("qv",),
    "layer_scale_init": (None, NUMBER),
}
_MEAN = _OF_BEIT | {"classifier": ("gap",), "final_norm": ("pooled",)}
_WITH = {"num_registers": (NUMBER,)}


def _todays(cls: _Class, values: dict[str, tuple[Any, ...]]) -> Holds:
    writer = functools.partial(write, cls)
    return Holds("modern_vit", writer, _MODERN | values, name=f"{cls.stem}Model")


HUGGINGFACE = (
    Holds("vit", functools.partial(write, _VIT), _PLAIN),
    Holds("deit", functools.partial(write, _DEIT), _PLAIN),
    Holds("mae", functools.partial(write, _MAE), {**_PLAIN, "num_classes": (0,)}),
    Holds("vit", functools.partial(write, _SIGLIP), {**_POOLED, "position_grid": (None,)}),
    Holds("vit", functools.partial(write, _SIGLIP2), {**_POOLED, **_NATIVE}),
    _todays(_VIT, {"qkv_bias": ("qkv", "none")}),
    _todays(_CLIP, {"patch_bias": (False,), "pre_norm": (True,)}),
    _todays(_DINOV2, _BARE),
    _todays(_DINOV2, _HEAD),
    _todays(_REGISTERS, _BARE | _WITH),
    _todays(_REGISTERS, _HEAD | _WITH),
    _todays(_DINOV3, _OF_DINOV3),
    _todays(_BEIT, _OF_BEIT),
    _todays(_BEIT, _MEAN),
)
