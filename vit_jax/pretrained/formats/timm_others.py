"""timm's Mixers, gMixers, ResMLPs, BiT and RegNetY: their names and `config.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


# By an array that no other model has: the names, and conventions that no `config.json` states.
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
    # A convention that the model does not have is ignored.
    stored.conventions |= conventions
    read_table(stored, arrays, table)
    return stored


def _architecture(
    known: Mapping[str, str], model: Mapping[str, Any], keys: Iterable[str], what: str
) -> str:
    """timm's function for the size that agrees in `keys`; UserError if there is none."""

    def sizes_of(model: Mapping[str, Any]) -> list[Any]:
        has_scale = model.get("layer_scale_init") is not None  # timm knows its start
        return [has_scale, *(model[key] for key in keys)]

    defaults, sizes = variant_defaults(model["name"]), VARIANTS_OF[model["name"]]
    for variant, architecture in known.items():
        if sizes_of({**defaults, **sizes[variant]}) == sizes_of(model):
            return architecture
    raise UserError(f"timm has no {what}; --format=timm can write {', '.join(known)}.")


def _write_mixer(params: Arrays, description: Description, inputs: InputSettings) -> Written:
    """Like `timm_write.write_vit`, for these models."""
    model = description.model
    args: dict[str, Any] = {
        "img_size": list(description.image_shape[:2]),
        "in_chans": description.image_shape[2],
    }
    # What is no argument of timm's functions: of plain Mixers, not the widths of the MLPs.
    keys = ["patch_size", "hidden_size", "num_layers", "norm", "gated"]
    if model["norm"] == "layer" and not model["gated"] and model["tokens_mlp_dim"]:
        widths = (model["tokens_mlp_dim"], model["channels_mlp_dim"])
        args["mlp_ratio"] = [ratio(width, model["hidden_size"]) for width in widths]
    else:
        keys += ["tokens_mlp_dim", "channels_mlp_dim"]
    what = f"Mixer with {', '.join(f'{key}={model[key]}' for key in keys)}"
    architecture = _architecture(MIXERS, model, keys, what)
    config = to_config(description, inputs, architecture, args, "avg")
    table = _RESMLP if model["norm"] == "affine" else _MIXER
    return write_table(table, params, "timm"), {"config.json": config}


def _write_resnet(params: Arrays, description: Description, inputs: InputSettings) -> Written:
    model, is_bit = description.model, description.model["name"] == "bit"
    family, known = MODELS[model["name"]], BITS if is_bit else REGNETS
    keys = variant_defaults(model["name"])
    architecture = _architecture(known, model, keys, f"{family.acronym} of these sizes")
    args = {"in_chans": description.image_shape[2]}
    config = to_config(description, inputs, architecture, args, "avg")
    config["pretrained_cfg"]["fixed_input_size"] = False
    return write_table(_BIT if is_bit else _REGNET, params, "timm"), {"config.json": config}


OTHERS = (
    Holds("mixer", _write_mixer, assumed={"gelu": "exact"}),
    Holds("bit", _write_resnet, assumed=BIT_ASSUMED),
    Holds("regnet", _write_resnet),
)
