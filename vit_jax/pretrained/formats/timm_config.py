"""timm's `config.json`: what it says of a model and of its images.

The files on the hub have an architecture's name, whose arguments timm states in its code alone.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from vit_jax.data.ops import IMAGENET_MEAN, IMAGENET_STD
from vit_jax.files.paths import reading
from vit_jax.kinds import check_known
from vit_jax.models.description import PILLOW_METHODS, Description, InputSettings
from vit_jax.models.variants import SIZES
from vit_jax.pretrained.formats.stored import Stored, native_ops, pair, pillow_ops, positive

POOL = {"token": "token", "gap": "avg", "map": "map"}
GELUS = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}
ASSUMED = {"layer_norm_epsilon": 1e-6}
# Of images, where a `pretrained_cfg` leaves it out.
_USUAL: dict[str, Any] = {
    "interpolation": "bicubic",
    "crop_pct": 0.875,
    "crop_mode": "center",
    "mean": IMAGENET_MEAN,
    "std": IMAGENET_STD,
}
ROPES = {"cat": "grid", "dinov3": "centered", "mixed": "mixed"}

_ROPE: dict[str, Any] = {"use_rot_pos_emb": True, "rope_type": "cat", "rope_temperature": 10_000.0}
_NAVER = _ROPE | {"rope_grid_indexing": "xy", "rope_temperature": 100.0}
_META = _ROPE | {"rope_grid_indexing": "xy", "rope_grid_offset": 1.0, "attn_pool_num_heads": 8}
_DINOV3 = _ROPE | {"rope_type": "dinov3", "rope_temperature": 100.0, "rope_rotate_half": True}
# By the architecture's name, of all that match; later ones replace earlier ones. `epsilon` stands
# for that of the `norm_layer`.
_ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"vit_.*_clip_.*|beit3_.*|aimv2_.*|vit_pe_.*|.*_(?:dinov3|lingbot).*", {"epsilon": 1e-5}),
    (r".*_quickgelu_.*", {"act_layer": "quick_gelu"}),
    (
        r"vit_(base_patch32|so400m_patch16|giantopt_patch16)_siglip_.*"
        r"|vit_large_patch16_siglip_(gap_)?512",
        {"act_layer": "gelu_tanh"},
    ),
    (r"eva02_(?!enormous).*|vit_.*_rope_reg\d_.*", _ROPE | {"ref_feat_shape": [16, 16]}),
    (r"vit_.*_rope(_ape)?_224", _NAVER),
    (r"vit_.*_rope_mixed(_ape)?_224", _NAVER | {"rope_type": "mixed", "rope_temperature": 10.0}),
    (r"vit_.*_rope(_mixed)?_ape_224", {"no_embed_class": True}),
    (r"vit_.*_(?:dinov3(?:_qkvb)?|lingbot|sapiens2)", _DINOV3),
    (r"vit_pe_core_base_.*", _META | {"ref_feat_shape": [14, 14]}),
    (r"vit_pe_core_(?:tiny|small|large)_.*", _META | {"ref_feat_shape": [24, 24]}),
    (r"vit_pe_(?:(?:lang|spatial)|core_gigantic)_.*", _META | {"ref_feat_shape": [32, 32]}),
    (r"vit_pe_.*_gigantic_.*", {"rope_grid_offset": 0.0, "num_heads": 16}),
    (r"vit_pe_core_.*|test_vit3", {"pool_include_prefix": True}),
    (r"eva02_enormous_.*|vit_base_patch16_rpn_.*", {"use_post_norm": True}),
    # Heads that follow from no other model of these sizes: their number, or width.
    (r"vit_base_patch16_gap_224|eva02_enormous_.*", {"num_heads": 16}),
    (r"vit_giant_patch16_(?:radio_v3|sapiens2)", {"num_heads": 24}),
    (r"vit_(?:7b_patch16_dinov3|5b_patch16_sapiens2)", {"num_heads": 32}),
    (r"vit_huge_plus_patch16_dinov3.*", {"head_width": 64}),
    (r"aimv2_.*", {"head_width": 128}),
    (r"test_vit\d?", {"head_width": 32}),
    (r"naflexvit_.*", {"pos_embed_interp_mode": "bicubic"}),
    (r"naflexvit_.*_par(fac)?_.*", {"pos_embed_ar_preserving": True}),
    (
        r"naflexvit_.*_siglip",
        {"pos_embed_interp_mode": "bilinear", "act_layer": "gelu_tanh", "global_pool": "map"},
    ),
)
# NaFlexVit's ways of interpolating positions: mode, antialiased, to a square.
POSITION_RESIZES = {
    "bilinear": ("bilinear", True, False),
    "bicubic": ("bicubic", True, False),
    "bicubic_square": ("bicubic", True, True),
    "linear": ("bilinear", False, False),
    "linear_square": ("bilinear", False, True),
}


def read_native(
    stored: Stored, args: Mapping[str, Any], grid: Any, patch: Any, by_axis: bool
) -> None:
    """Of NaFlexVit: images in shapes of their own, positions of `grid` interpolated for each."""
    mode = args.get("pos_embed_interp_mode", "bicubic"), args.get("pos_embed_antialias", True)
    found = *mode, args.get("pos_embed_ar_preserving", False)
    found = ("bilinear", False, found[2]) if by_axis else found
    kinds = {theirs: ours for ours, theirs in POSITION_RESIZES.items()}
    check_known("config.json: pos_embed_interp_mode, _antialias, _ar_preserving", found, kinds)
    stored.conventions |= {"position_grid": grid, "position_resize": kinds[found]}
    height, width = stored.image_size or (384, 384)
    stored.ops = native_ops(stored.ops, (height // patch) * (width // patch), patch)
    stored.image_size = None


def architecture_of(settings: Mapping[str, Any]) -> str:
    """The name in a `config.json`; "" if there is none."""
    inputs = settings.get("pretrained_cfg") or {}
    return str(settings.get("architecture") or inputs.get("architecture") or "")


def arguments_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the architecture, and those in the file's `model_args`."""
    architecture, stated = architecture_of(settings), dict[str, Any]()
    for pattern, arguments in _ARGUMENTS:
        if re.fullmatch(pattern, architecture):
            stated |= arguments
    return stated | (settings.get("model_args") or {})


def usual_heads(args: Mapping[str, Any], width: int, mlp_dim: int) -> int:
    """Of an architecture whose arguments do not say it."""
    heads = {(width, mlp_dim): heads for width, _, mlp_dim, heads in SIZES.values()}
    known = None if "head_width" in args else heads.get((width, mlp_dim))
    return known or max(width // args.get("head_width", 64), 1)


def read_settings(settings: dict[str, Any]) -> Stored:
    """Reads timm's `config.json`; UserError if the model is not supported."""
    with reading("config.json"):
        args = arguments_of(settings)
        inputs = settings.get("pretrained_cfg") or settings  # timm < 0.8 wrote them as one
        activation = args.get("act_layer") or "gelu"
        check_known("config.json: act_layer", activation, GELUS)
        block = args.get("block_fn") or "Block"
        check_known("config.json: block_fn", block, ["Block", "ResPostBlock"])
        pooling = args.get("global_pool") or settings.get("global_pool") or "token"
        check_known("config.json: global_pool", pooling, POOL.values())
        # The class Eva, which has these arguments, pools all tokens by attention.
        pools_all = pooling == "map" and "num_reg_tokens" in args
        conventions = {
            "layer_norm_epsilon": float(args.get("epsilon", ASSUMED["layer_norm_epsilon"])),
            "gelu": GELUS[activation],
            "position_embedding": "learned",
            "classifier": next(ours for ours, theirs in POOL.items() if theirs == pooling),
            "pool_prefix": pools_all or args.get("pool_include_prefix") is True,
            "norm_after": args.get("use_post_norm") is True or block == "ResPostBlock",
            **_rope(args),
        }
        size = args.get("img_size") or (inputs.get("input_size") or [None])[1:]
        image_size = pair(size) if size else None
        names = settings.get("label_names") or inputs.get("label_names") or inputs.get("labels")
        heads = args.get("num_heads")
        ops, assumed = _read_inputs(inputs, image_size or (224, 224))
        return Stored(
            "timm",
            posemb="bicubic",
            conventions=conventions,
            num_heads=positive(heads) if heads else None,
            image_size=image_size,
            class_names=tuple(map(str, names or ())),
            ops=ops if settings else None,
            assumed=assumed if settings else [],
        )


def _rope(args: dict[str, Any]) -> dict[str, Any]:
    """Our attributes of timm's rotary positions; see `models/later/rotary.py`."""
    if not args.get("use_rot_pos_emb"):
        return {"rope": "none"}
    check_known("config.json: rope_type", args.get("rope_type", "cat"), ROPES)
    grid = args.get("ref_feat_shape")
    return {
        "rope": ROPES[args.get("rope_type", "cat")],
        "rope_base": float(args.get("rope_temperature", 10_000.0)),
        "rope_grid": pair(grid) if grid else None,
        "rope_offset": float(args.get("rope_grid_offset", 0.0)),
    }


def _read_inputs(inputs: Mapping[str, Any], size: tuple[int, int]) -> tuple[list[Any], list[str]]:
    """The ops of a `pretrained_cfg` for images of (height, width), and what is assumed of them.

    What it leaves out is timm's default.
    """
    known = {key: inputs.get(key) or usual for key, usual in _USUAL.items()}
    assumed = [f"{key}={known[key]}" for key in known if not inputs.get(key) and key != "crop_mode"]
    for key, values in (("interpolation", PILLOW_METHODS), ("crop_mode", ("center", "squash"))):
        if known[key] not in values:
            assumed += [f"{_USUAL[key]!r} for {key}={known[key]!r}"]
            known[key] = _USUAL[key]
    share = float(known["crop_pct"])
    if not 0 < share <= 1:
        assumed += [f"1.0 for crop_pct={share}"]
        share = 1.0
    resized, covers = [math.floor(side / share) for side in size], known["crop_mode"] == "center"
    method, mean, std = known["interpolation"], known["mean"], known["std"]
    return pillow_ops(InputSettings(method, pair(resized), size, mean, std, covers)), assumed


def to_config(
    description: Description,
    inputs: InputSettings,
    architecture: str,
    model_args: dict[str, Any],
    pooling: str,
) -> dict[str, Any]:
    """The `config.json`; `model_args` are those of one kind of model."""
    height, width, channels = description.image_shape
    model, num_classes = description.model, description.model["num_classes"]
    resize = inputs.resize or (height, width)
    if isinstance(resize, tuple):
        share, mode = crop_pct(height, resize[0]), "center" if inputs.covers else "squash"
    else:
        share, mode = crop_pct(min(height, width), resize), "center"
    return {
        "architecture": architecture,
        "num_classes": num_classes,
        **({"num_features": model["hidden_size"]} if "hidden_size" in model else {}),
        "global_pool": pooling,
        "model_args": model_args,
        **({"label_names": list(description.class_names)} if description.class_names else {}),
        "pretrained_cfg": {
            "input_size": [channels, height, width],
            "fixed_input_size": True,
            "interpolation": inputs.method,
            "crop_pct": share,
            "crop_mode": mode,
            "mean": list(inputs.mean),
            "std": list(inputs.std),
            "num_classes": num_classes,
        },
    }


def crop_pct(size: int, resized: int) -> float:
    """The ratio for which timm, which divides and rounds down, gets exactly `resized`."""
    share = size / resized
    return share if math.floor(size / share) == resized else size / (resized + 0.5)


def ratio(width: int, hidden_size: int) -> float:
    """The ratio for which timm, which multiplies and truncates, gets exactly `width`."""
    ratio = width / hidden_size
    return ratio if int(hidden_size * ratio) == width else (width + 0.5) / hidden_size
