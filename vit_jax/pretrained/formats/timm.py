"""timm's Vision Transformers, hybrids and DeiTs: their names.

facebookresearch/mae has the same names, and its own for a decoder.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.variants import HYBRIDS, SIZES
from vit_jax.pretrained.formats import rows
from vit_jax.pretrained.formats.mae import check_square, decoder_rows
from vit_jax.pretrained.formats.rows import Row, numbers
from vit_jax.pretrained.formats.stored import ONE_TABLE, Holds, Stored
from vit_jax.pretrained.formats.timm_architectures import architecture_of, arguments_of, usual_heads
from vit_jax.pretrained.formats.timm_config import ASSUMED, GELUS, POOL, ratio, to_config
from vit_jax.pretrained.formats.timm_modern import to_timm_modern
from vit_jax.pretrained.formats.timm_vit import BLOCK, read_vit, table

# timm's architectures, without the resolution; `model_args` has the rest.
_SIZES = {"Ti": "tiny", "S": "small", "M": "medium", "B": "base", "L": "large", "H": "huge"}
_PLAIN = "tiny_16 small_16 small_32 base_8 base_16 base_32 large_14 large_16 large_32 huge_14"
_HYBRIDS = {
    "R+Ti/16": "vit_tiny_r_s16_p8",
    "R26+S/32": "vit_small_r26_s32",
    "R26+B/32": "vit_base_r26_s32",
    "R50+B/16": "vit_base_r50_s16",
    "R50+L/32": "vit_large_r50_s32",
}
# Parts of some timm models that ours do not have.
_UNSUPPORTED = {
    r"blocks\.\d+\.(attn\.)?lambda_.*": "differential attention",
    r"blocks\.\d+\.(in_proj|attns|ffns)\..*": "attention and MLP in parallel",
    r"blocks\.\d+\.attn\.gate\..*": "gated attention",
    r"patch_embed\.backbone\.\d+\..*": "a stem of convolutions and batch norms (MobileCLIP)",
}


def _decoder(names: Collection[str], model_args: Mapping[str, Any]) -> list[Row]:
    return decoder_rows(names, "decoder_blocks", BLOCK, model_args, "decoder_num_heads")


def is_timm(names: Collection[str]) -> bool:
    has_blocks = any(name.startswith("blocks.0.") for name in names)
    return has_blocks and any(name.startswith("patch_embed.") for name in names)


def check_names(arrays: Mapping[str, np.ndarray]) -> None:
    """UserError for a part that our models lack, before anything is guessed."""
    for name, array in arrays.items():
        for pattern, part in _UNSUPPORTED.items():
            if re.fullmatch(pattern, name):
                raise UserError(f"this model has {part} ({name}), which is not supported.")
        if name == "patch_embed.proj.weight" and array.ndim != 4:
            raise UserError(f"{name} of {array.ndim} axes is for videos or volumes, not images.")


def heads_by_name(arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> int | None:
    """The number of heads of the architecture in `settings`; None: there is none."""
    out, after = (arrays.get(f"blocks.0.{name}.weight") for name in ("attn.proj", "mlp.fc2"))
    if not architecture_of(settings) or out is None or after is None:
        return None
    return usual_heads(len(out), after.shape[-1])


def read_timm(
    stored: Stored,
    arrays: dict[str, np.ndarray],
    num_heads: int,
    settings: dict[str, Any],
    grid: tuple[int, int] | None,
) -> None:
    """Moves `arrays` into `stored`; UserError for a part that our models lack."""
    args = arguments_of(settings)
    if not settings:
        _guess(stored, arrays)
    read_vit(stored, arrays, num_heads, args, grid, _decoder(arrays, args))


def _guess(stored: Stored, arrays: Mapping[str, np.ndarray]) -> None:
    """What a file without a `config.json` most likely is; UserError if that would be a gamble."""
    if "norm_pre.weight" in arrays:  # CLIP
        stored.conventions["layer_norm_epsilon"] = 1e-5
    if "fc_norm.weight" in arrays or "cls_token" not in arrays:
        stored.conventions["classifier"] = "gap"
    if "attn_pool.latent" in arrays:
        stored.conventions["classifier"] = "map"
    if "blocks.0.attn.relative_position_bias_table" in arrays:
        return  # BEiT
    eva = any(f"blocks.0.attn.{name}" in arrays for name in ("q_proj.weight", "q_bias"))
    if eva or "pos_embed" not in arrays:
        raise UserError(
            "it may have rotary positions (EVA, DINOv3), which no array shows; put the config.json "
            "of its architecture beside it."
        )


def _architecture(model: dict[str, Any]) -> str:
    """timm's name of the closest model; UserError for a hybrid that timm lacks."""
    if model["name"] == "deit":
        return "deit_base_distilled_patch16_224"
    sizes = tuple(model[key] for key in ("hidden_size", "num_layers", "mlp_dim", "num_heads"))
    size = next((name for name, row in SIZES.items() if row == sizes), "")
    if model.get("resnet_layers") is None:
        name = f"{_SIZES.get(size)}_{model['patch_size']}"
        name = name if name in _PLAIN.split() else "base_16"  # the closest
        return f"vit_{name.replace('_', '_patch')}_224"
    row = (size, tuple(model["resnet_layers"]), model["patch_size"])
    hybrids = {HYBRIDS[name]: known for name, known in _HYBRIDS.items()}
    if row not in hybrids or model["resnet_width_factor"] != 1:
        known = ", ".join(_HYBRIDS)
        raise UserError(f"timm has no such hybrid; --format=timm can write {known}.")
    return f"{hybrids[row]}_224"


def to_timm(
    params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and `config.json` for `timm.create_model("local-dir:FOLDER", pretrained=True)`."""
    model = description.model
    architecture = _architecture(model)
    if "pre_logits/kernel" in params:
        raise UserError(
            "--format=timm has no pre_logits layer, without which the head is meaningless; use "
            "--drop_head to write the model without pre_logits and head."
        )
    pooling = POOL[model["classifier"]]
    height, width, channels = description.image_shape
    args: dict[str, Any] = {
        "img_size": [height, width],
        "in_chans": channels,
        "embed_dim": model["hidden_size"],
        "depth": model["num_layers"],
        "num_heads": model["num_heads"],
        "mlp_ratio": ratio(model["mlp_dim"], model["hidden_size"]),
        "act_layer": {exact: act for act, exact in GELUS.items()}[model["gelu"]],
    }
    if model.get("resnet_layers") is None:
        args["patch_size"] = model["patch_size"]
    if model["name"] != "deit":
        args |= {"global_pool": pooling, "fc_norm": False}
        args["class_token"] = "cls" in params
    config = to_config(description, inputs, architecture, args, pooling)
    return write(params), {"config.json": config}


def to_mae(
    params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays for facebookresearch/mae, and a `config.json` with the arguments of its model."""
    model = description.model
    check_square("timm", description)
    keys = {"embed_dim": "hidden_size", "depth": "num_layers", "num_heads": "num_heads"}
    args = {f"{p}{key}": model[f"{p}{keys[key]}"] for p in ("", "decoder_") for key in keys}
    args |= {"patch_size": model["patch_size"], "in_chans": description.image_shape[2]}
    args |= {"img_size": description.image_shape[0]}
    args["mlp_ratio"] = ratio(model["mlp_dim"], model["hidden_size"])
    if int(args["decoder_embed_dim"] * args["mlp_ratio"]) != model["decoder_mlp_dim"]:
        raise UserError(
            f"--format=timm cannot store model.decoder_mlp_dim={model['decoder_mlp_dim']}: encoder "
            "and decoder there have the same ratio of MLP and width; use --format=huggingface."
        )
    config = to_config(description, inputs, "mae_vit", args, "token")
    return write(params), {"config.json": config}


def write(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our flat names -> timm's; UserError for a parameter without a timm name."""
    found = table(rows.block_numbers(params), numbers(r"block(\d+)/unit(\d+)/", params), ())
    return rows.write_rows([*found, *_decoder(params, {})], params, "timm")


_VALUES = {"classifier": tuple(POOL)}
TIMM = {
    **{name: Holds(to_timm, {**_VALUES, **ONE_TABLE}, ASSUMED) for name in ("vit", "deit")},
    "modern_vit": Holds(to_timm_modern, _VALUES),
    "mae": Holds(to_mae, {"num_classes": (0,)}, {**ASSUMED, "gelu": "exact"}),
}
