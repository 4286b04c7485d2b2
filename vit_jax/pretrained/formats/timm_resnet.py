"""timm's ResNets with a family of ours, BiT and RegNetY: their names and `config.json`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import bit
from vit_jax.models.create import VARIANTS
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.family import Family
from vit_jax.models.later import regnet
from vit_jax.pretrained.formats import rows
from vit_jax.pretrained.formats.rows import Op, Row, layer, norm, numbers
from vit_jax.pretrained.formats.stored import Holds, Stored
from vit_jax.pretrained.formats.timm_config import to_config

BIT = {
    f"R{size}": f"resnetv2_{size}_bit"
    for size in ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")
}
REGNETS = {
    "RegNetY-400MF": "regnety_004",
    "RegNetY-4GF": "regnety_040",
    "RegNetY-16GF": "regnety_160",
}
BIT_ASSUMED = {"max_pool_padding": "zero", "standardization_epsilon": 1e-8}
# A dense layer as a 1x1 convolution: [out, in, 1, 1] <-> [in, out]
POINTWISE = Op(lambda x, _: x[:, :, 0, 0].T, lambda x: x.T[:, :, None, None])
_FIRST_RESNETV2, _FIRST_REGNET = "stages.0.blocks.0", "s1.b1"
# Parts of some of timm's models that ours do not have ...
_UNSUPPORTED = {
    r"stem\.conv1\.weight": "a stem of three convolutions",
    r"stages\..*\.running_mean": "batch normalisation",
}
# ... and parts without which a RegNet is another.
_REQUIRED = {
    f"{_FIRST_REGNET}.conv1.bn.running_mean": "other norms than batch normalisation",
    f"{_FIRST_REGNET}.se.fc1.weight": "no squeeze-and-excitation (RegNetX)",
    f"{_FIRST_REGNET}.downsample.conv.weight": "no projections (RegNetZ)",
}


def is_resnet(names: Collection[str]) -> bool:
    return f"{_FIRST_RESNETV2}.conv1.weight" in names or _is_regnet(names)


def _is_regnet(names: Collection[str]) -> bool:
    return f"{_FIRST_REGNET}.conv1.conv.weight" in names


def _bit_table(units: Iterable[tuple[int, ...]]) -> list[Row]:
    """The table of BiT for these (stage, unit), numbered from 1."""
    table = [
        Row(("root_block/conv_root/kernel",), "stem.conv.weight", rows.CONV),
        *norm("norm-pre-head", "norm"),
        *layer("head", "head.fc", POINTWISE),
    ]
    for stage, unit in units:
        ours, theirs = f"block{stage}/unit{unit:02}", f"stages.{stage - 1}.blocks.{unit - 1}"
        table += [Row((f"{ours}/conv_proj/kernel",), f"{theirs}.downsample.conv.weight", rows.CONV)]
        for n in (1, 2, 3):
            table += [Row((f"{ours}/conv{n}/kernel",), f"{theirs}.conv{n}.weight", rows.CONV)]
            table += norm(f"{ours}/gn{n}", f"{theirs}.norm{n}")
    return table


def _regnet_table(blocks: Iterable[tuple[int, ...]]) -> list[Row]:
    """The table of RegNetY for these (stage, block), numbered from 1."""

    def conv_norm(folder: str, part: str, theirs: str) -> list[Row]:
        ours = f"{folder}bn{part}"
        return [
            Row((f"{folder}conv{part}/kernel",), f"{theirs}.conv.weight", rows.CONV),
            *norm(ours, f"{theirs}.bn"),
            Row((f"{ours}/mean",), f"{theirs}.bn.running_mean"),
            Row((f"{ours}/var",), f"{theirs}.bn.running_var"),
        ]

    table = [*conv_norm("", "_stem", "stem"), *layer("head", "head.fc")]
    for stage, block in blocks:
        ours, theirs = f"stage{stage}_block{block}/", f"s{stage}.b{block}"
        for n in "123":
            table += conv_norm(ours, n, f"{theirs}.conv{n}")
        table += conv_norm(ours, "_proj", f"{theirs}.downsample")
        table += layer(f"{ours}se/reduce", f"{theirs}.se.fc1", POINTWISE)
        table += layer(f"{ours}se/expand", f"{theirs}.se.fc2", POINTWISE)
    return table


def read_resnet(stored: Stored, arrays: dict[str, np.ndarray]) -> None:
    """Moves `arrays` into `stored`; UserError for a part that our models lack."""
    parts = [
        (n, part)
        for pattern, part in _UNSUPPORTED.items()
        for n in arrays
        if re.fullmatch(pattern, n)
    ]
    if _is_regnet(arrays):
        parts += [(f"no {name}", part) for name, part in _REQUIRED.items() if name not in arrays]
    for name, part in parts:
        raise UserError(f"this ResNet has {part} ({name}), which is not supported.")
    if _is_regnet(arrays):
        stored.conventions = {}
        table = _regnet_table(numbers(r"^s(\d+)\.b(\d+)\.", arrays))
    else:
        stored.conventions = dict(BIT_ASSUMED)
        units = numbers(r"^stages\.(\d+)\.blocks\.(\d+)\.", arrays)
        table = _bit_table((stage + 1, unit + 1) for stage, unit in units)
    rows.read_rows(stored, arrays, table)


def _writer(
    family: Family, known: Mapping[str, str], pattern: str, table: Callable[..., list[Row]]
) -> Callable[..., Any]:
    """(params, description, inputs) -> arrays and `config.json`, see `Holds.convert`."""

    def write(
        params: dict[str, np.ndarray], description: Description, inputs: InputSettings
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        model = description.model
        sizes = {name: VARIANTS[name] for name in known}
        same = [n for n, row in sizes.items() if all(model[key] == row[key] for key in row)]
        if not same:
            raise UserError(
                f"timm has no {family.acronym} of these sizes; --format=timm can write "
                f"{', '.join(known)}."
            )
        args = {"in_chans": description.image_shape[2]}
        config = to_config(description, inputs, known[same[0]], args, "avg")
        config["pretrained_cfg"]["fixed_input_size"] = False
        arrays = rows.write_rows(table(numbers(pattern, params)), params, "timm")
        return arrays, {"config.json": config}

    return write


TIMM_RESNETS = {
    "bit": Holds(
        _writer(bit.FAMILY, BIT, r"block(\d+)/unit(\d+)/", _bit_table), assumed=BIT_ASSUMED
    ),
    "regnet": Holds(_writer(regnet.FAMILY, REGNETS, r"stage(\d+)_block(\d+)/", _regnet_table)),
}
