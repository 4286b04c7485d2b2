"""Every config key with its default. Recipes start from `get_config` and override it.

The config is locked: unknown keys cannot be set. A section with a `name` (model,
objective, optimizer, schedule, gradient, each evaluator) has only the keys of that kind: its
keyword-only parameters (a model's attributes), which are documented there.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Container, Mapping
from types import NoneType, UnionType
from typing import Any, get_args

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

from vit_jax.errors import UserError
from vit_jax.evaluators.create import EVALUATORS, EvaluatorKeys
from vit_jax.kinds import check_keys, check_known
from vit_jax.models.create import MODELS, VARIANTS, create_model, get_variant
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.training.gradients import GRADIENTS
from vit_jax.training.optimizer import OPTIMIZERS, create_optimizer
from vit_jax.training.schedule import SCHEDULES, create_schedule
from vit_jax.wording import unknown_key

# Sections without kinds. Each key has its default, or the type if it may be None, and
# its line in --help.
KEYS: dict[str, dict[str, tuple[Any, str]]] = {
    "duration": {  # of training
        "steps": (int, "updates; setting one of the three unsets the others"),
        "examples": (int, "images, counting repeats"),
        "epochs": (float, "passes over dataset.split"),
    },
    "dataset": {
        "name": ("glyphs", "TFDS name | path | address, see docs/data.md | digits | glyphs(...)"),
        "data_dir": ("", "folder of prepared TFDS sets; '' is TFDS_DATA_DIR or its default"),
        "split": ("train", "training split, such as train[:98%]"),
        "label_key": ("", "feature or column with the label or numbers; vtab_... computes it"),
        "batch_size": (512, "examples per update over all devices and hosts"),
        "repeated_augmentation": (1, "copies of each example in a batch (DeiT: 3)"),
        "balance": (0.0, "0: class frequencies as stored; to 1: equal frequencies in training"),
        "mixture": ((), "further sets, rows (name, weight[, ops[, split]]); this one weighs 1"),
        "preprocess": ("decode|random_resized_crop(224)|flip_lr", "ops, see data/preprocess.py"),
        "eval_preprocess": ("huggingface_eval(224)", "ops for evaluators without their own"),
        "cache_gib": (64.0, "of files on servers, what is kept on disk; see data/remote.py"),
        "on_bad_image": ("error", "error | skip: files that cannot be decoded"),
    },
    "loader": {  # none of these changes a batch
        "num_threads": (2, "reading threads per worker; 0 reads in the main thread"),
        "num_workers": (0, "processes; 0 reads in the training process"),
        "prefetch": (4, "batches read ahead"),
    },
    "mix": {  # of images and labels, in the step; see training/mixing.py
        "mixup_alpha": (0.0, "of the Beta distribution; 0 disables mixup"),
        "cutmix_alpha": (0.0, "of the Beta distribution; 0 disables CutMix"),
        "probability": (1.0, "of mixing a batch"),
        "cutmix_probability": (0.5, "of CutMix when mixing, if both are enabled"),
        "per_example": (False, "draw per example, not once per batch"),
    },
    "train_step": {
        "accumulation_steps": (1, "parts to split a batch into to save memory"),
        "polyak_decay": (0.0, "decay of the parameter average (0.9999); 0: no average"),
        "patch_sizes": ((), "one is drawn per update, evaluators use the first (FlexiViT)"),
    },
    "mesh": {  # devices per axis; -1 is the rest
        "data": (-1, "copies of the model"),
        "fsdp": (1, "shards of parameters and optimizer state; 0: a slice or host"),
        "tensor": (1, "shards of heads, MLP width and classes"),
    },
    "processes": {  # with several; see multihost/watchdog.py
        "arrival_timeout_seconds": (300, "for all processes to start"),
        "heartbeat_timeout_seconds": (30.0, "a process silent for longer is lost, all stop"),
        "step_timeout_seconds": (1800.0, "without progress for longer: a hang; 0: never"),
        "start_timeout_seconds": (7200.0, "the same, before the first update is done"),
    },
    "checkpoint": {
        "every_steps": (1000, "and always after the last step"),
        "keep": (2, "newest checkpoints to keep"),
        "best_metric": ("", "also keep the best by this, such as 'test/accuracy'"),
        "best_mode": ("auto", "max | min | auto: min for losses and errors, by the metric's name"),
        "keep_best": (1, "number of best checkpoints to keep"),
    },
    "early_stopping": {  # ends the run before its duration; see training/early_stopping.py
        "metric": ("", "such as test/accuracy, of an evaluator with every_steps; '' is off"),
        "patience": (5, "consecutive evaluations without improvement before the run ends"),
        "min_delta": (0.0, "gains up to this are not improvements; accuracies are from 0 to 1"),
    },
    "pretrained": {
        "source": ("", "file, folder, gs://, https://, hf:// or zoo name; '': from scratch"),
        "keep": ((), "keys such as model.gelu to keep even if the source differs"),
        "grid": (tuple, "(rows, columns) of its tokens, if not square"),
        "reset_head": (True, "new zero head; False keeps the checkpoint's"),
        "posemb": ("auto", "as its library | bilinear | bicubic | transformers | dinov2 | siglip2"),
        "resize_patches": (False, "allow another patch size, by pseudo-inverse"),
        "channels": ("", "if the number of input channels differs: sum | mean | tile"),
        "class_token": ("", "if only one of both has a class token: add | drop"),
    },
    "lora": {  # low-rank adapters of query and value; see parameters/lora.py
        "rank": (0, "of adapters, trained with the head while the rest is frozen; 0: none"),
        "alpha": (16.0, "adapters are multiplied by alpha / rank"),
    },
    "sweep": {  # used only by scripts/sweep.py
        "learning_rates": ((), "candidates; with one there is no grid"),
        "train_split": ("", "split to train candidates on: dataset.split less ..."),
        "validation_split": ("", "... the split to evaluate them on"),
        "published": ("", "accuracy in percent to compare with, and its source"),
    },
    "log": {
        "every_steps": (50, "console, metrics.jsonl, TensorBoard"),
        "every_seconds": (30.0, "at least this often, and 10 s after the start; 0: never"),
        "tensorboard": (True, "write event files"),
        "wandb": ("", "project on Weights & Biases; '' is off"),
        "profile_steps": ((0, 0), "trace from the first to the second into WORKDIR/profile"),
    },
}
SEED = (0, "determines weights, dropout, data order and augmentation")


def get_config() -> ConfigDict:
    """All keys with their defaults."""
    config = Section({"seed": SEED[0]})
    for name, keys in KEYS.items():
        config[name] = Section(key=name)
        for key, (default, _) in keys.items():
            config[name][key] = placeholder(default) if isinstance(default, type) else default
    config.model = section("model", **get_variant("Ti/16"))
    config.objective = section("objective", "classification")
    config.gradient = section("gradient", "plain")
    config.optimizer = section("optimizer", "adamw")
    config.schedule = section("schedule", "cosine")
    config.evaluators = Section({"test": evaluator(split="test")}, key="evaluators")
    return config.lock()


# For each section: its table of kinds, and the functions whose keys all kinds have.
KINDS: dict[str, tuple[Mapping[str, Any], tuple[Callable[..., Any], ...]]] = {
    "model": (MODELS, (create_model,)),
    "objective": (OBJECTIVES, ()),
    "gradient": ({name: row.create for name, row in GRADIENTS.items()}, ()),
    "optimizer": (OPTIMIZERS, (create_optimizer,)),
    "schedule": (SCHEDULES, (create_schedule,)),
    "evaluators.*": (EVALUATORS, (EvaluatorKeys,)),
}
# Parameters that the loop passes.
HANDED_OVER = ("num_classes", "total_steps", "schedule", "table", "task", "objective")
# What numbers must be, also those in a list, that are not checked elsewhere.
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "at least 0": (
        lambda number: number >= 0,
        r"loader\.num_\w+|evaluators\..+\.(every_steps|batch_size)|log\.every_seconds|gradient\..+"
        r"|mix\..+_alpha|early_stopping\.min_delta|lora\.rank|optimizer\.(final_)?weight_decay"
        r"|objective\.gram_\w+"
        r"|processes\.(step|start)_timeout_seconds|schedule\.learning_rate",
    ),
    "at least 1": (
        lambda number: number >= 1,
        r"loader\.prefetch|log\.every_steps|early_stopping\.patience|dataset\.batch_size"
        r"|checkpoint\.(every_steps|keep|keep_best)|train_step\.accumulation_steps",
    ),
    "more than 0": (
        lambda number: number > 0,
        r"dataset\.cache_gib|objective\.\w+_temperature|processes\.(arrival|heartbeat)_timeout_seconds|schedule\.timescale_steps"
        r"|optimizer\.(eps|clip_norm|factored_decay|trust_coefficient)",
    ),
    "in [0, 1)": (
        lambda number: 0 <= number < 1,
        r"optimizer\.(momentum|b1|b2)|train_step\.polyak_decay",
    ),
    "in [0, 1]": (lambda number: 0 <= number <= 1, r"mix\..*probability|objective\.\w+_momentum"),
    "in (0, 1)": (lambda number: 0 < number < 1, r"schedule\.decay_at"),
}
# The first match counts: beyond these, array sizes overflow.
AT_MOST = {
    r"model\.num_layers|model\.(resnet|stage)_layers": 10_000,
    r"model\..+|.+\.batch_size|loader\..+|mesh\..+|train_step\..+|lora\..+": 2**20,
    r".+": 2**53,
}


class Section(ConfigDict):
    """The config or a section of it, where an assignment does what a flag does.

    A `name` brings the keys of that kind, a length unsets the others, a dict sets several keys; a
    key that is not there and a value of another type are a UserError.
    """

    def __init__(self, *args: Any, key: str = "", **kwargs: Any):
        object.__setattr__(self, "_key", key)
        super().__init__(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        object.__setattr__(self, "_key", state["_key"])

    def copy_and_resolve_references(self, visit_map: Any = None) -> ConfigDict:
        copy = super().copy_and_resolve_references(visit_map)
        object.__setattr__(copy, "_key", self._key)
        return copy

    def update(self, *other: Any, **values: Any) -> None:
        values = {**dict(*other), **values}
        if self._key in KINDS and (name := values.pop("name", self.name)) != self.name:
            later = {f"{self._key}.{option}" for option in values}
            set_kind({self._key: self}, self._key, str(name), later)
        super().update(values)

    def __setitem__(self, option: str, value: Any) -> None:
        prefix = f"{self._key}.".replace("*", "NAME").lstrip(".")
        node = self._fields.get(option)
        if option not in self and not self.is_locked:
            super().__setitem__(option, value)
        elif option not in self:
            known = {**flatten(get_config()), **{f"{prefix}{key}": self[key] for key in self}}
            how = " `with config.unlocked():` adds one." if self._key == "evaluators" else ""
            raise UserError(unknown_key(prefix + option, known) + how)
        elif isinstance(node, Section) and isinstance(value, dict):
            node.update(value)
        elif option == "name" and self._key in KINDS:
            self.update(name=value)
        else:
            if isinstance(node, Section) and isinstance(value, ConfigDict):
                value = Section(value, key=node._key)
            try:
                super().__setitem__(option, value)
            except TypeError:
                kind = "dict" if isinstance(node, Section) else self.get_type(option).__name__
                raise UserError(f"{prefix}{option}={value!r} must be of type {kind}.") from None
            for other in self if self._key == "duration" and value is not None else ():
                super().__setitem__(other, value if other == option else None)


def section(key: str, name: str, **values: Any) -> ConfigDict:
    """The section `key` for the kind `name`: its keys with their defaults, or `values`."""
    keys = kind_keys(key, name)
    check_keys(key, name, values, keys)
    values = {option: values.get(option, default) for option, (_, default) in keys.items()}
    missing = [f"{key}.{name}" for name, value in values.items() if value is dataclasses.MISSING]
    if missing:
        or_row = ", or a variant as name, such as B/16" if key == "model" else ""
        text = f"{key}.name={name!r} has no default for {', '.join(missing)}"
        raise UserError(f"{text}; set what is missing{or_row}.")
    fields = {option: _field(keys[option][0], value) for option, value in values.items()}
    return Section({"name": name, **fields}, key="evaluators.*" if "." in key else key)


def evaluator(split: str, name: str = "objective", **values: Any) -> ConfigDict:
    """An entry of `config.evaluators`; its key there is the prefix of its metrics."""
    return section("evaluators.*", name, split=split, **values)


def set_kind(
    config: Mapping[str, Any], key: str, name: str, later: Container[str] = (), /, **values: Any
) -> None:
    """Makes a section one of another kind.

    Keys of both kinds whose values have the same type are kept, if the new kind of model supports
    them. A model's `name` may be a row of `create.VARIANTS`, which replaces all sizes. `values`
    override both; keys in `later`, such as `model.num_layers`, are set by the caller afterwards.
    """
    node = config[key]
    old = dict(node)
    old_keys = kind_keys(key, old["name"])
    if key == "model" and name not in MODELS:
        try:
            values = {**get_variant(name), **values}
        except UserError as error:
            raise UserError(f"model.name={name!r} is not {' | '.join(MODELS)}; {error}") from error
        name = values.pop("name")
        for size in {size for row in VARIANTS.values() for size in row}:
            old.pop(size, None)
    choices = MODELS[name].choices if key == "model" else {}
    for option, (annotation, default) in kind_keys(key, name).items():
        is_allowed = option not in choices or old.get(option) in choices[option]
        if option in old and is_allowed and old_keys.get(option, (None,))[0] == annotation:
            values.setdefault(option, old[option])
        elif default is dataclasses.MISSING and f"{key}.{option}" in later:
            values.setdefault(option, None)
    new = section(key, name, **values)
    with node.unlocked():
        for option in list(node):
            del node[option]
        for option, field in new.items(preserve_field_references=True):
            node[option] = field


def check_config(config: ConfigDict) -> None:
    """Raises UserError for mistakes that are not checked elsewhere in time.

    These are missing or unknown keys, numbers out of range, and data sets on a server.
    """
    sections = {key: config[key] for key in KINDS if "." not in key}
    sections |= {f"evaluators.{key}": config.evaluators[key] for key in config.evaluators}
    for key, node in sections.items():
        known = {"name": None, **kind_keys(key, node.name)}
        check_keys(key, node.name, node, known)
        for missing in known.keys() - set(node):
            raise UserError(f"{key}.{missing} is missing; {key}.name={node.name!r} needs it.")
    optional = optional_keys(config)
    for key, value in flatten(config).items():
        if value is None and key not in optional:
            raise UserError(f"{key}=None must have a value.")
        check_value(key, value)
    if not 0 <= config.seed < 2**32:  # JAX would drop the higher bits: 2**32 would be 0
        raise UserError(f"seed={config.seed} must be from 0 to {2**32 - 1}.")
    steps = config.log.profile_steps
    if len(steps) != 2 or not all(isinstance(step, int) for step in steps) or steps[0] > steps[1]:
        raise UserError(f"log.profile_steps={steps} must be (FIRST, LAST), such as (100, 110).")


def check_value(key: str, value: Any) -> None:
    """Raises UserError for a number out of range."""
    if isinstance(value, float) and not abs(value) <= 3.4e38:  # of float32
        raise UserError(f"{key}={value} must be a finite float32 number.")
    values = value if isinstance(value, tuple | list) else (value,)
    numbers = [number for number in values if isinstance(number, int | float)]
    for text, (is_in_range, keys) in RANGES.items():
        if re.fullmatch(keys, key) and not all(map(is_in_range, numbers)):
            raise UserError(f"{key}={value} must be {text}.")
    most = next(most for pattern, most in AT_MOST.items() if re.fullmatch(pattern, key))
    if any(isinstance(number, int) and abs(number) > most for number in numbers):
        raise UserError(f"{key}={value} must be at most {most:,}.")


def flatten(config: ConfigDict) -> dict[str, Any]:
    """All values by dotted key."""
    return flatten_dict(config.to_dict(), sep=".")


def optional_keys(config: ConfigDict) -> set[str]:
    """The keys that may be None, as `section.key`."""
    optional = set()
    for name, keys in KEYS.items():
        optional |= {f"{name}.{key}" for key, (value, _) in keys.items() if isinstance(value, type)}
    for name in (name for name in KINDS if "." not in name):
        for key, (hint, _) in kind_keys(name, config[name].name).items():
            if NoneType in get_args(hint):
                optional.add(f"{name}.{key}")
    return optional


def kind_keys(key: str, name: str) -> dict[str, tuple[Any, Any]]:
    """For a kind: (type, default) of each key."""
    options: dict[str, tuple[Any, Any]] = {}
    for function in functions_of(key, name):
        hints = typing.get_type_hints(function)
        if key == "model" and inspect.isclass(function):
            fields = MODELS[name].keys.items()
            options |= {option: (hints[option], field.default) for option, field in fields}
            continue
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in HANDED_OVER:
                options[parameter.name] = hints[parameter.name], parameter.default
    return options


def functions_of(key: str, name: str) -> list[Callable[..., Any]]:
    """The functions whose parameters, or attributes, are the keys of a kind, documented there."""
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
    """`value` as stored in a config, with its type; None and unions keep the key's types."""
    if isinstance(value, list):
        value = tuple(value)
    if value is not None and not isinstance(annotation, UnionType):
        return value
    options = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    types = {typing.get_origin(hint) or hint for hint in options} - {NoneType}
    return FieldReference(value, field_type=types.pop() if len(types) == 1 else object)
