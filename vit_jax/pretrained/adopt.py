"""What fine-tuning adopts from its source beyond the parameters: conventions and pixel scaling."""

import contextlib
import copy
import logging
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax.data.ops import Decode, Normalize, ValueRange
from vit_jax.data.preprocess import parse
from vit_jax.data.sized import spell
from vit_jax.errors import UserError, as_user_error
from vit_jax.files.paths import full_path, names_below, read_object, reading
from vit_jax.models.create import MODELS
from vit_jax.pretrained.load import read_source
from vit_jax.wording import unsigned
from vit_jax.workdir.description import CHECKPOINTS, CONFIG_FILE


def adopt(config: ConfigDict, workdir: str, *, rescales: bool = True) -> ConfigDict:
    """Returns a copy of the config with the conventions and normalisation of `pretrained.source`.

    That is each convention of the model's family (GELU, epsilon, ...) except those in
    `pretrained.keep`, and the normalisation of pixels, unless the config has its own or not
    `rescales`: then a difference is reported. A run with checkpoints resumes with what it adopted;
    its source need not exist any more. UserError if it cannot be read, see `read_source`.
    """
    keys, config = config.pretrained, copy.deepcopy(config)
    source, family = keys.source, MODELS[config.model.name]
    folder = full_path(workdir)
    saved: dict[str, Any] = {}
    if names_below(folder / CHECKPOINTS):
        with contextlib.suppress(UserError):  # claim_workdir reports the error
            saved = read_object(folder / CONFIG_FILE, pretrained=dict, model=dict, dataset=dict)
    stated: Mapping[str, Any] = {}
    if saved.get("pretrained", {}).get("source") == unsigned(source):
        stated, spec = saved["model"], saved["dataset"]["eval_preprocess"]
    else:
        heads = config.model.num_heads if "num_heads" in config.model else None
        try:
            stored = read_source(source, default_heads=heads, grid=keys.grid)
        except ValueError as error:
            raise as_user_error(f"pretrained.source={source!r}: {error}", error) from error
        known = stored.description
        spec = known.eval_preprocess if known else stored.eval_preprocess or spell(stored.ops or [])
        # Others do not fit; with the same blocks a decoder or a second token is dropped.
        if MODELS[stored.kind].blocks == family.blocks:
            stated = {**stored.conventions, **(known.model if known else {})}
    taken = []
    of_head = () if keys.reset_head else family.head_conventions
    with reading(f"the model description of {source}"):
        for key in (*family.conventions, *of_head):
            value = stated.get(key, config.model[key])
            if value != config.model[key] and f"model.{key}" not in keys.keep:
                config.model[key] = value
                taken.append(f"model.{key}={value}")
    if family.input == "image" and spec:
        taken += _adopt_scale(config, source, spec, rescales)
    if taken:
        logging.info("Adopted from %s: %s.", source, ", ".join(taken))
    return config


def _scale(spec: str) -> Any:
    """The op that scales pixels to another range than [-1, 1]; None if there is none."""
    ops = [op for op in parse(spec).ops if isinstance(op, Normalize | ValueRange)]
    return ops[-1] if ops and ops[-1] != ValueRange() else None


def _adopt_scale(config: ConfigDict, source: str, spec: str, rescales: bool) -> list[str]:
    """Appends the normalisation of `spec` to every pipeline of the config that has none."""
    theirs = _scale(spec)
    places = {"dataset.preprocess": config.dataset, "dataset.eval_preprocess": config.dataset}
    for key, section in config.evaluators.items():
        if section.preprocess:
            places[f"evaluators.{key}.preprocess"] = section
    taken: list[str] = []
    rows = [list(row) for row in config.dataset.mixture]  # (name, weight, ops, split)
    for row in rows:
        if len(row) > 2 and row[2]:
            places[f"the ops of {row[0]}"] = row
    for key, node in places.items():
        last: Any = 2 if isinstance(node, list) else key.rpartition(".")[2]
        ours, ops = _scale(node[last]), parse(node[last]).ops
        if ours == theirs:
            continue
        is_gray = any(isinstance(op, Decode) and op.channels == 1 for op in ops)
        own = any(isinstance(op, Normalize | ValueRange) for op in ops)
        if own or is_gray or not rescales:
            usual = "the range [-1, 1]"
            text = f"{source} was trained on pixels in {theirs or usual}"
            logging.warning(f"{text}, but {key} has {ours or usual}.")
            continue
        text = spell([theirs])
        node[last] += f"|{text}"
        taken.append(f"{text} in {key}")
    config.dataset.mixture = tuple(map(tuple, rows))
    return taken
