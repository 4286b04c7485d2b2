"""timm's Mixers, gMixers, ResMLPs, BiT and RegNetY: their names and `config.json`."""

from collections.abc import Mapping
from typing import Any

from vit_jax.errors import UserError
from vit_jax.models.create import MODELS, VARIANTS_OF, variant_defaults
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.later import mixer
from vit_jax.pretrained.formats.names import POINTWISE, Names, Op, Part, read_table, write_table
from vit_jax.pretrained.formats.stored import Arrays, Beside, Holds, Stored, Written
from vit_jax.pretrained.formats.timm import UNIT, check_names
from vit_jax.pretrained.formats.timm_config import ratio, read_settings, to_config

# timm's functions by our sizes.
MIXERS = {
    **{f"Mixer-{size}/{p}": f"mixer_{size.lower()}{p}_224" for size in "SBL" for p in (32, 16)},
    **{f"gMixer-{depth}/16": f"gmixer_{depth}_224" for depth in (12, 24)},
    **{f"ResMLP-S{depth}/16": f"resmlp_{depth}_224" for depth in (12, 24, 36)},
    "ResMLP-B24/8": "resmlp_big_24_224",
}
BITS = {
    f"R{size}": f"resnetv2_{size}_bit"
    for size in ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")
}
REGNETS = {
    "RegNetY-400MF": "regnety_004",
    "RegNetY-4GF": "regnety_040",
    "RegNetY-16GF": "regnety_160",
}
BIT_ASSUMED = {"max_pool_padding": "zero", "standardization_epsilon": 1e-8}

_PER_FEATURE = Op(lambda x, _: x.reshape(-1), lambda x: x[None, None])  # [1, 1, D] <-> [D]


def _affine(ours: str, theirs: str) -> Names:
    leaves = {"scale": "alpha", "bias": "beta"}.items()
    return {f"{ours}/{leaf}": (f"{theirs}.{other}", _PER_FEATURE) for leaf, other in leaves}


_BLOCK = f"{mixer.BLOCKS}_{{}}/", "blocks.{}."
_MIXER = (
    Part({"stem/": "stem.proj.", "pre_head_layer_norm/": "norm.", "head/": "head."}),
    Part(
        {
            "LayerNorm_0/": "norm1.",
            "LayerNorm_1/": "norm2.",
            "LayerScale_0/gamma": "ls1",
            "LayerScale_1/gamma": "ls2",
            "token_mixing/Dense_0/": "mlp_tokens.fc1.",
            "token_mixing/Dense_1/": "mlp_tokens.fc2.",
            "channel_mixing/Dense_0/": "mlp_channels.fc1.",
            "channel_mixing/Dense_1/": "mlp_channels.fc2.",
        },
        *_BLOCK,
    ),
)
_AFFINES = {**_affine("Affine_0", "norm1"), **_affine("Affine_1", "norm2")}
_RESMLP = (
    Part(_affine("pre_head_layer_norm", "norm")),
    Part({**_AFFINES, "token_mixing/Dense_0/": "linear_tokens."}, *_BLOCK),
    *_MIXER,
)
_BIT = (
    Part(
        {
            "root_block/conv_root/kernel": "stem.conv.weight",
            "norm-pre-head/": "norm.",
            "head/": ("head.fc.", POINTWISE),
        }
    ),
    Part(UNIT, "block{}/unit{:02}/", "stages.{}.blocks.{}.", shift=1),
)
_REGNET = (
    Part({"conv_stem/kernel": "stem.conv.weight", "bn_stem/": "stem.bn.", "head/": "head.fc."}),
    Part(
        {
            **{f"conv{n}/kernel": f"conv{n}.conv.weight" for n in "123"},
            **{f"bn{n}/": f"conv{n}.bn." for n in "123"},
            "conv_proj/kernel": "downsample.conv.weight",
            "bn_proj/": "downsample.bn.",
            "se/reduce/": ("se.fc1.", POINTWISE),
            "se/expand/": ("se.fc2.", POINTWISE),
        },
        "stage{}_block{}/",
        "s{}.b{}.",
    ),
)


# By an array that no other model has: the names, and what no `config.json` states.
_READ: dict[str, tuple[tuple[Part, ...], Mapping[str, Any]]] = {
    "blocks.0.mlp_channels.fc1.weight": (_RESMLP, {}),
    "stages.0.blocks.0.conv1.weight": (_BIT, BIT_ASSUMED),
    "s1.b1.conv1.conv.weight": (_REGNET, {}),
}
# What a RegNet is without an array.
_OF_REGNETY = {
    "s1.b1.conv1.bn.running_mean": "other norms than batch normalisation",
    "s1.b1.se.fc1.weight": "no squeeze-and-excitation (RegNetX)",
    "s1.b1.downsample.conv.weight": "no projections (RegNetZ)",
}


def detect(arrays: Arrays, _: str) -> bool:
    return any(name in arrays for name in _READ)


def read(arrays: Arrays, beside: Beside) -> Stored:
    """UserError for a part that our models lack."""
    check_names(arrays)
    table, conventions = next(row for name, row in _READ.items() if name in arrays)
    if table is _REGNET:
        for name, part in _OF_REGNETY.items():
            if name not in arrays:
                raise UserError(f"this model has {part} (no {name}), which is not supported.")
    stored = read_settings(beside.settings)
    stored.conventions |= conventions
    read_table(stored, arrays, table)
    return stored


def _write(params: Arrays, description: Description, inputs: InputSettings) -> Written:
    """Like `timm_write.write_vit`, for these models; UserError for a size that timm lacks."""
    model, kind = description.model, description.model["name"]
    is_affine = model.get("norm") == "affine"
    architectures, table = {
        "mixer": (MIXERS, _RESMLP if is_affine else _MIXER),
        "bit": (BITS, _BIT),
        "regnet": (REGNETS, _REGNET),
    }[kind]
    args: dict[str, Any] = {"in_chans": description.image_shape[2]}
    keys = dict.fromkeys(variant_defaults(kind))
    if kind == "mixer":
        args["img_size"] = list(description.image_shape[:2])
        if not is_affine and not model["gated"] and model["tokens_mlp_dim"]:  # an argument there
            widths = [model[key] for key in ("tokens_mlp_dim", "channels_mlp_dim")]
            args["mlp_ratio"] = [ratio(width, model["hidden_size"]) for width in widths]
            del keys["tokens_mlp_dim"], keys["channels_mlp_dim"]

    def sizes_of(model: Mapping[str, Any]) -> list[Any]:
        # timm knows how a LayerScale starts.
        return [model[key] is None if key == "layer_scale_init" else model[key] for key in keys]

    for variant, architecture in architectures.items():
        if sizes_of({**variant_defaults(kind), **VARIANTS_OF[kind][variant]}) == sizes_of(model):
            config = to_config(description, inputs, architecture, args, "avg")
            config["pretrained_cfg"]["fixed_input_size"] = kind == "mixer"
            return write_table(table, params, "timm"), {"config.json": config}
    sizes = ", ".join(f"{key}={model[key]}" for key in keys)
    known = ", ".join(architectures)
    title = MODELS[kind].acronym
    raise UserError(f"timm has no {title} with {sizes}; --format=timm can write {known}.")


OTHERS = (
    Holds("mixer", _write, assumed={"gelu": "exact"}),
    Holds("bit", _write, assumed=BIT_ASSUMED),
    Holds("regnet", _write),
)
