"""Every config key with its default. Recipes start from `get_config` and override.

The config is locked: keys that are not here cannot be set. A section with a `name` (model,
objective, optimizer, schedule, gradient, each evaluator) holds the keys of that kind only: its
keyword-only parameters (a model's attributes), which are documented there.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Container, Mapping
from types import NoneType, UnionType
from typing import Any, get_args

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

from vit_jax.errors import UserError, check_keys, check_known, check_local
from vit_jax.evaluators.create import EVALUATORS, EvaluatorKeys
from vit_jax.models.create import MODELS, VARIANTS, create_model, get_variant
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.training.optimizer import OPTIMIZERS, create_optimizer
from vit_jax.training.schedule import SCHEDULES, create_schedule
from vit_jax.training.step import GRADIENTS

# The sections without kinds. Each key has its default, or the type of one that may be None, and
# what --help says of it.
KEYS: dict[str, dict[str, tuple[Any, str]]] = {
    "duration": {  # of the training
        "steps": (int, "updates; of steps, examples and epochs the first that is set counts"),
        "examples": (int, "images, counting repeats"),
        "epochs": (float, "passes over dataset.split"),
    },
    "dataset": {
        "name": (
            "glyphs",
            "TFDS name | path of images, see data/datasets.py | digits | glyphs(...)",
        ),
        "data_dir": ("", "where TFDS sets are prepared; '' is TFDS_DATA_DIR or its default"),
        "split": ("train", "training split, such as train[:98%]"),
        "label_key": ("", "feature that holds the label; '' finds it; vtab_... computes it"),
        "batch_size": (512, "examples per update over all devices and hosts"),
        "repeated_augmentation": (1, "draws of each example in a batch (DeiT: 3)"),
        "balance": (0.0, "0: classes as stored; to 1: all drawn equally often in training"),
        "preprocess": ("official_train(224)", "ops for training, see data/preprocess.py"),
        "eval_preprocess": ("official_eval(224)", "ops for evaluators without their own"),
        "on_bad_image": ("error", "error | skip: files that cannot be decoded"),
    },
    "loader": {  # none of these changes a batch
        "num_threads": (2, "reading threads per worker; 0 reads in the main thread"),
        "num_workers": (0, "processes; 0 reads in the training process"),
        "prefetch": (4, "batches read ahead"),
    },
    "mix": {  # of images and labels, in the step; see training/mixing.py
        "mixup_alpha": (0.0, "of the Beta distribution; 0 is no mixup"),
        "cutmix_alpha": (0.0, "of the Beta distribution; 0 is no CutMix"),
        "probability": (1.0, "of mixing a batch at all"),
        "cutmix_probability": (0.5, "of CutMix in a mix, where both are on"),
        "per_example": (False, "draw for each example, not once per batch"),
    },
    "train_step": {
        "accumulation_steps": (1, "parts that a batch is cut into to save memory"),
        "polyak_decay": (0.0, "of the average of parameters (0.9999); 0: no average"),
    },
    "mesh": {  # devices per axis; -1 is what the others leave
        "data": (-1, "copies of the model"),
        "fsdp": (1, "parameters and optimizer state split so; 0: over a slice or host"),
        "tensor": (1, "heads, MLP width and classes split over so many devices"),
    },
    "processes": {  # of a run of several; see multihost/watchdog.py
        "arrival_timeout_seconds": (300, "until all have started"),
        "heartbeat_timeout_seconds": (30.0, "unheard of for so long: lost, all stop"),
        "step_timeout_seconds": (1800.0, "no progress for so long: a hang; 0: never"),
        "start_timeout_seconds": (7200.0, "the same before the first update is done"),
    },
    "checkpoint": {
        "every_steps": (1000, "and always after the last step"),
        "keep": (2, "newest checkpoints kept"),
        "best_metric": ("", "also keep the best by this, such as 'test/accuracy'"),
        "best_mode": ("max", "max | min"),
        "keep_best": (1, "how many of the best"),
    },
    "early_stopping": {  # ends the run before its duration; see training/early_stopping.py
        "metric": ("", "such as test/accuracy, of an evaluator with every_steps; '' is off"),
        "patience": (5, "evaluations in a row without an improvement that end the run"),
        "min_delta": (0.0, "a gain up to this is no improvement; accuracies are from 0 to 1"),
    },
    "pretrained": {
        "source": ("", "file, folder, gs://, https://, hf:// or zoo name; '': scratch"),
        "keep": ((), "keys as model.gelu that stay where the source states otherwise"),
        "grid": (tuple, "(rows, columns) of its tokens, if no square"),
        "reset_head": (True, "new zero head; False keeps the checkpoint's"),
        "posemb": ("bilinear", "bilinear (official) | bicubic (antialiased, timm)"),
        "resize_patches": (False, "allow another patch size, by pseudo-inverse"),
        "channels": ("", "another number of input channels: sum | mean | tile"),
        "class_token": ("", "class token in one of both only: add | drop"),
    },
    "lora": {  # low-rank adapters of query and value; see parameters/lora.py
        "rank": (0, "of adapters that are trained with the head, and all else is frozen; 0: none"),
        "alpha": (16.0, "adapters are multiplied by alpha / rank"),
    },
    "sweep": {  # read by scripts/sweep.py alone
        "learning_rates": ((), "to choose from; with one there is nothing to choose"),
        "train_split": ("", "what the candidates train on; dataset.split less ..."),
        "validation_split": ("", "... what they are scored on"),
        "published": ("", "accuracy in percent to compare with, and where it is from"),
    },
    "log": {
        "every_steps": (50, "console, metrics.jsonl, TensorBoard"),
        "every_seconds": (30.0, "also at least so often, and 10 s after the start; 0: never"),
        "tensorboard": (True, "write event files"),
        "wandb": ("", "project on Weights & Biases; '' is off"),
        "profile_steps": ((0, 0), "trace from the first to the second into WORKDIR/profile"),
    },
}
SEED = (0, "weights, dropout, data order and augmentation are functions of it")


def get_config() -> ConfigDict:
    """All keys with their defaults."""
    config = ConfigDict({"seed": SEED[0]})
    for name, keys in KEYS.items():
        config[name] = ConfigDict()
        for key, (default, _) in keys.items():
            config[name][key] = placeholder(default) if isinstance(default, type) else default
    config.model = section("model", **get_variant("Ti/16"))
    config.objective = section("objective", "classification")
    config.gradient = section("gradient", "plain")
    config.optimizer = section("optimizer", "adamw")
    config.schedule = section("schedule", "cosine")
    config.evaluators = ConfigDict({"test": evaluator(split="test")})
    return config.lock()


# Of a section: its table of kinds, and the functions whose keys all of them have.
KINDS: dict[str, tuple[Mapping[str, Any], tuple[Callable[..., Any], ...]]] = {
    "model": (MODELS, (create_model,)),
    "objective": (OBJECTIVES, ()),
    "gradient": ({name: row.create for name, row in GRADIENTS.items()}, ()),
    "optimizer": (OPTIMIZERS, (create_optimizer,)),
    "schedule": (SCHEDULES, (create_schedule,)),
    "evaluators.*": (EVALUATORS, (EvaluatorKeys,)),
}
# Parameters that the loop hands over.
HANDED_OVER = ("num_classes", "total_steps", "schedule", "task", "objective")
# Lowest value of the keys that nothing below would check in time.
AT_LEAST = {
    r"loader\.num_\w+|evaluators\..+\.every_steps|log\.every_seconds": 0,
    r"early_stopping\.min_delta|lora\.rank": 0,
    r"loader\.prefetch|log\.every_steps|early_stopping\.patience": 1,
}
LARGEST_FLOAT = 3.4e38
# The first that matches counts: beyond these, sizes of arrays overflow.
AT_MOST = {
    r"model\.num_layers|model\.resnet_layers": 10_000,
    r"model\..+|.+\.batch_size|loader\..+|mesh\..+|train_step\..+|lora\..+": 2**20,
    r".+": 2**53,
}


def section(key: str, name: str, **values: Any) -> ConfigDict:
    """The section `key` for the kind called `name`: its keys with their defaults, or `values`."""
    keys = kind_keys(key, name)
    check_keys(key, name, values, keys)
    values = {each: values.get(each, default) for each, (_, default) in keys.items()}
    missing = [f"{key}.{each}" for each, value in values.items() if value is dataclasses.MISSING]
    if missing:
        or_row = ", or a variant as name, such as B/16" if key == "model" else ""
        raise UserError(
            f"{key}.name={name!r} has no default for {', '.join(missing)}; give what is "
            f"missing{or_row}."
        )
    fields = {each: _field(keys[each][0], value) for each, value in values.items()}
    return ConfigDict({"name": name, **fields})


def evaluator(split: str, name: str = "objective", **values: Any) -> ConfigDict:
    """One entry of `config.evaluators`; its key there is the prefix of its metrics."""
    return section("evaluators.*", name, split=split, **values)


def set_kind(
    config: ConfigDict, key: str, name: str, later: Container[str] = (), /, **values: Any
) -> None:
    """Replaces a section by that of another kind.

    Keys that both kinds have, with values of one type, keep them. A model's `name` may be a row of
    `create.VARIANTS`, which replaces all sizes. `values` win over both; keys of `later`, such as
    `model.num_layers`, the caller sets afterwards.
    """
    parent, _, last = key.rpartition(".")
    node = config[parent] if parent else config
    kept = dict(node[last])
    old_keys = kind_keys(key, kept["name"])
    if key == "model" and name not in MODELS:
        try:
            values = {**get_variant(name), **values}
        except UserError as error:
            raise UserError(f"model.name={name!r} is not {' | '.join(MODELS)}; {error}") from error
        name = values.pop("name")
        for size in {each for row in VARIANTS.values() for each in row}:
            kept.pop(size, None)
    for each, (annotation, default) in kind_keys(key, name).items():
        if each in kept and old_keys.get(each, (None,))[0] == annotation:
            values.setdefault(each, kept[each])
        elif default is dataclasses.MISSING and f"{key}.{each}" in later:
            values.setdefault(each, None)
    new = section(key, name, **values)
    with config.unlocked():
        node[last] = new


def check_config(config: ConfigDict) -> None:
    """Raises UserError for what nothing below would notice in time.

    That is a section with a key too many or too few, a number that makes no sense, or a data set
    on a server.
    """
    _check_kinds(config)
    for key, value in flatten(config).items():
        _check_value(key, value)
    if not 0 <= config.seed < 2**32:  # JAX would drop the higher bits: 2**32 would be 0
        raise UserError(f"seed={config.seed} must be from 0 to {2**32 - 1}.")
    steps = config.log.profile_steps
    if len(steps) != 2 or not all(isinstance(step, int) for step in steps) or steps[0] > steps[1]:
        raise UserError(f"log.profile_steps={steps} must be (FIRST, LAST), such as (100, 110).")
    check_local("dataset.name", config.dataset.name)


def _check_kinds(config: ConfigDict) -> None:
    sections = {key: config[key] for key in KINDS if "." not in key}
    sections |= {f"evaluators.{key}": config.evaluators[key] for key in config.evaluators}
    for key, node in sections.items():
        known = {"name": None, **kind_keys(key, node.name)}
        check_keys(key, node.name, node, known)
        for missing in known.keys() - set(node):
            raise UserError(f"{key}.{missing} is missing; {key}.name={node.name!r} reads it.")


def _check_value(key: str, value: Any) -> None:
    if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
        raise UserError(f"{key}={value} must be a finite number of float32.")
    for pattern, low in AT_LEAST.items():
        if re.fullmatch(pattern, key) and value < low:
            raise UserError(f"{key}={value} must be at least {low}.")
    high = next(high for pattern, high in AT_MOST.items() if re.fullmatch(pattern, key))
    numbers = value if isinstance(value, tuple | list) else (value,)
    if any(isinstance(number, int) and abs(number) > high for number in numbers):
        raise UserError(f"{key}={value} must be at most {high:,}.")


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """All values by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        is_section = hasattr(value, "items")
        found |= flatten(value, f"{prefix}{key}.") if is_section else {prefix + key: value}
    return found


def optional_keys(config: ConfigDict) -> set[str]:
    """The keys that may be None, as `section.key`."""
    found = {
        f"{name}.{key}"
        for name, keys in KEYS.items()
        for key, (default, _) in keys.items()
        if isinstance(default, type)
    }
    for name in (name for name in KINDS if "." not in name):
        keys = kind_keys(name, config[name].name).items()
        found |= {f"{name}.{key}" for key, (hint, _) in keys if NoneType in get_args(hint)}
    return found


def kind_keys(key: str, name: str) -> dict[str, tuple[Any, Any]]:
    """Of a kind: (type, default) of each key."""
    found: dict[str, tuple[Any, Any]] = {}
    for function in functions_of(key, name):
        if key == "model" and inspect.isclass(function):
            hints = typing.get_type_hints(function)
            found |= {each: (hints[each], f.default) for each, f in MODELS[name].keys.items()}
            continue
        hints = typing.get_type_hints(function)
        for each in inspect.signature(function).parameters.values():
            if each.kind is each.KEYWORD_ONLY and each.name not in HANDED_OVER:
                found[each.name] = hints[each.name], each.default
    return found


def functions_of(key: str, name: str) -> list[Callable[..., Any]]:
    """Whose parameters, or attributes, are the keys of a kind; each documents its own."""
    table, shared = KINDS["evaluators.*" if "." in key else key]
    check_known(f"{key}.name", name, table)
    kind = table[name]
    if key == "model":
        return [*shared, kind.module]
    if not inspect.isclass(kind):
        return [*shared, kind]
    # A class also has the keys of its bases.
    own = [vars(base)["__init__"] for base in reversed(kind.__mro__) if "__init__" in vars(base)]
    return [*shared, *own[1:]]


def _field(annotation: Any, value: Any) -> Any:
    """`value` as a config holds it, with its type; None and unions keep the types of the key."""
    if isinstance(value, list):
        value = tuple(value)
    if value is not None and not isinstance(annotation, UnionType):
        return value
    options = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    types = {typing.get_origin(each) or each for each in options} - {NoneType}
    return FieldReference(value, field_type=types.pop() if len(types) == 1 else object)
