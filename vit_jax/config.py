"""Every config key with its default. Recipes start from `get_config` and override.

The config is locked: keys that are not here cannot be set. A section with a `name` (model,
objective, optimizer, schedule, gradient, each evaluator) holds the keys of that kind only: its
keyword-only parameters (a model's attributes), which `section` reads and are documented there.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, get_args

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

from vit_jax.errors import UserError, check_keys, check_known, check_local
from vit_jax.evaluators.create import EVALUATORS
from vit_jax.models.create import MODELS, create_model, model_keys
from vit_jax.models.variants import get_variant
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.training.gradient import GRADIENTS
from vit_jax.training.optimizer import OPTIMIZERS, SCHEDULES, create_optimizer, create_schedule


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0  # int; weights, dropout, data order and augmentation are functions of it

    config.duration = ConfigDict()  # the first that is set counts: steps, examples, epochs
    config.duration.steps = placeholder(int)  # updates
    config.duration.examples = placeholder(int)  # images, counting repeats
    config.duration.epochs = placeholder(float)  # passes over dataset.split

    config.dataset = ConfigDict()
    config.dataset.name = "glyphs"  # TFDS name | path of an image folder | digits | glyphs(...)
    config.dataset.data_dir = ""  # where TFDS sets are prepared; "" is TFDS_DATA_DIR or its default
    config.dataset.split = "train"  # training split, such as train[:98%]
    config.dataset.label_key = ""  # feature that holds the label; "" finds it; vtab_... computes it
    config.dataset.batch_size = 512  # examples per update over all devices and hosts
    config.dataset.repeated_augmentation = 1  # draws of each example in a batch (DeiT: 3)
    config.dataset.preprocess = "official_train(224)"  # ops for training, see data/preprocess.py
    config.dataset.eval_preprocess = "official_eval(224)"  # ops for evaluators without their own
    config.dataset.on_bad_image = "error"  # error | skip: files that cannot be decoded

    config.loader = ConfigDict()  # none of these changes a batch
    config.loader.num_threads = 2  # reading threads per worker; 0 reads in the main thread
    config.loader.num_workers = 0  # processes; 0 reads in the training process
    config.loader.prefetch = 4  # batches read ahead

    config.model = section("model", **get_variant("Ti/16"))

    config.mix = ConfigDict()  # of images and labels, in the step; see training/mixing.py
    config.mix.mixup_alpha = 0.0  # of the Beta distribution; 0 is no mixup
    config.mix.cutmix_alpha = 0.0  # of the Beta distribution; 0 is no CutMix
    config.mix.probability = 1.0  # of mixing a batch at all
    config.mix.cutmix_probability = 0.5  # of CutMix in a mix, where both are on
    config.mix.per_example = False  # draw for each example, not once per batch

    config.objective = section("objective", "classification")
    config.gradient = section("gradient", "plain")
    config.optimizer = section("optimizer", "adamw")
    config.schedule = section("schedule", "cosine")

    config.train_step = ConfigDict()
    config.train_step.accumulation_steps = 1  # parts that a batch is cut into to save memory
    config.train_step.polyak_decay = 0.0  # of the average of parameters (0.9999); 0: no average

    config.evaluators = ConfigDict()
    config.evaluators.test = evaluator(split="test")

    config.mesh = ConfigDict()  # devices per axis; -1 is what the others leave
    config.mesh.data = -1  # copies of the model
    config.mesh.fsdp = 1  # parameters and optimizer state split so; 0: over a slice or host
    config.mesh.tensor = 1  # heads, MLP width and classes split over so many devices

    config.processes = ConfigDict()  # of a run of several; see multihost/watchdog.py
    config.processes.arrival_timeout_seconds = 300  # until all have started
    config.processes.heartbeat_timeout_seconds = 30.0  # unheard of for so long: lost, all stop
    config.processes.step_timeout_seconds = 1800.0  # no progress for so long: a hang; 0: never
    config.processes.start_timeout_seconds = 7200.0  # the same before the first update is done

    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 1000  # and always after the last step
    config.checkpoint.keep = 2  # newest checkpoints kept
    config.checkpoint.best_metric = ""  # also keep the best by this, such as "test/accuracy"
    config.checkpoint.best_mode = "max"  # max | min
    config.checkpoint.keep_best = 1  # how many of the best

    config.pretrained = ConfigDict()
    config.pretrained.source = ""  # file, folder, gs://, https://, hf:// or zoo name; "": scratch
    config.pretrained.grid = placeholder(tuple)  # (rows, columns) of its tokens, if no square
    config.pretrained.reset_head = True  # new zero head; False keeps the checkpoint's
    config.pretrained.posemb = "bilinear"  # bilinear (official) | bicubic (antialiased, timm)
    config.pretrained.resize_patches = False  # allow another patch size, by pseudo-inverse
    config.pretrained.channels = ""  # another number of input channels: sum | mean | tile
    config.pretrained.class_token = ""  # class token in one of both only: add | drop

    config.sweep = ConfigDict()  # read by scripts/sweep.py alone
    config.sweep.learning_rates = ()  # to choose from; with one there is nothing to choose
    config.sweep.train_split = ""  # what the candidates train on; dataset.split less ...
    config.sweep.validation_split = ""  # ... what they are scored on
    config.sweep.published = ""  # accuracy in percent to compare with, and where it is from

    config.log = ConfigDict()
    config.log.every_steps = 50  # console, metrics.jsonl, TensorBoard
    config.log.every_seconds = 30.0  # also at least so often, and 10 s after the start; 0: never
    config.log.tensorboard = True  # write event files
    config.log.wandb = ""  # project on Weights & Biases; "" is off
    config.log.profile_steps = (0, 0)  # trace from the first to the second into WORKDIR/profile
    return config.lock()


def optimizer_keys(*, learning_rate: float = 1e-3) -> None:
    """What all optimizers have besides the keys of `create_optimizer`.

    Args:
      learning_rate: peak; read by the schedule.
    """


def evaluator_keys(
    *,
    split: str = "test",
    dataset: str = "",
    data_dir: str = "",
    label_key: str = "",
    preprocess: str = "",
    batch_size: int = 0,
    every_steps: int = 0,
    at_start: bool = False,
) -> None:
    """What all evaluators have.

    Args:
      split: split expression.
      dataset: name or path of a data set of its own; "" is that of the training.
      data_dir: where that lies; "" is dataset.data_dir.
      label_key: feature that holds its label; "" is dataset.label_key.
      preprocess: ops; "" is dataset.eval_preprocess.
      batch_size: 0 is dataset.batch_size.
      every_steps: between two evaluations; 0 is only after the last step.
      at_start: also before the first update.
    """


# Of a section: its table of kinds, and the functions whose keys all of them have.
KINDS: dict[str, tuple[Mapping[str, Any], tuple[Callable[..., Any], ...]]] = {
    "model": (MODELS, (create_model,)),
    "objective": (OBJECTIVES, ()),
    "gradient": (GRADIENTS, ()),
    "optimizer": (OPTIMIZERS, (optimizer_keys, create_optimizer)),
    "schedule": (SCHEDULES, (create_schedule,)),
    "evaluators.*": (EVALUATORS, (evaluator_keys,)),
}
# Parameters that the loop hands over.
HANDED_OVER = ("num_classes", "learning_rate", "total_steps", "schedule", "task", "objective")
# Lowest value of the keys that nothing below would check in time.
AT_LEAST = {
    r"loader\.num_\w+|evaluators\..+\.every_steps|log\.every_seconds": 0,
    r"loader\.prefetch|log\.every_steps": 1,
}
LARGEST_FLOAT = 3.4e38
# The first that matches counts: beyond these, sizes of arrays overflow.
AT_MOST = {
    r"model\.num_layers|model\.resnet_layers": 10_000,
    r"model\..+|.+\.batch_size|loader\..+|mesh\..+|train_step\..+": 2**20,
    r".+": 2**53,
}


def section(key: str, name: str, **values: Any) -> ConfigDict:
    """The section `key` for the kind called `name`: its keys with their defaults, or `values`."""
    table, _ = KINDS[key]
    check_known(f"{key}.name", name, table)
    keys = kind_keys(key, name)
    check_keys(key, name, values, keys)
    result = ConfigDict({"name": name})
    for each, (annotation, default, _) in keys.items():
        value = values.get(each, default)
        if value is dataclasses.MISSING:
            raise UserError(f"{key}.{each} has no default in {key}.name={name!r}; give it.")
        result[each] = _field(annotation, value)
    return result


def evaluator(split: str, name: str = "objective", **values: Any) -> ConfigDict:
    """One entry of `config.evaluators`; its key there is the prefix of its metrics."""
    return section("evaluators.*", name, split=split, **values)


def set_kind(config: ConfigDict, key: str, name: str, **values: Any) -> None:
    """Replaces a section by that of another kind; common keys keep their values."""
    parent, _, last = key.rpartition(".")
    node, of = (config[parent], f"{parent}.*") if parent else (config, key)
    check_known(f"{key}.name", name, KINDS[of][0])
    known = kind_keys(of, name)
    kept = {each: value for each, value in node[last].items() if each in known}
    new = section(of, name, **{**kept, **values})
    with config.unlocked():
        node[last] = new


def check_kinds(config: ConfigDict) -> None:
    """Raises UserError for a section with a key too many or too few."""
    sections = {key: config[key] for key in KINDS if "." not in key}
    sections |= {f"evaluators.{key}": config.evaluators[key] for key in config.evaluators}
    for key, node in sections.items():
        kind = "evaluators.*" if "." in key else key
        check_known(f"{key}.name", node.name, KINDS[kind][0])
        known = {"name": None, **kind_keys(kind, node.name)}
        check_keys(key, node.name, node, known)
        for missing in known.keys() - set(node):
            raise UserError(f"{key}.{missing} is missing; {key}.name={node.name!r} reads it.")


def check_values(config: ConfigDict) -> None:
    """Raises UserError for numbers and names that nothing below would check in time."""
    for key, value in flatten(config).items():
        if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
            raise UserError(f"{key}={value} must be a finite number of float32.")
        for pattern, low in AT_LEAST.items():
            if re.fullmatch(pattern, key) and value < low:
                raise UserError(f"{key}={value} must be at least {low}.")
        high = next(high for pattern, high in AT_MOST.items() if re.fullmatch(pattern, key))
        numbers = value if isinstance(value, tuple | list) else (value,)
        if any(isinstance(number, int) and abs(number) > high for number in numbers):
            raise UserError(f"{key}={value} must be at most {high:,}.")
    if not 0 <= config.seed < 2**32:  # JAX would drop the higher bits: 2**32 would be 0
        raise UserError(f"seed={config.seed} must be from 0 to {2**32 - 1}.")
    steps = config.log.profile_steps
    if len(steps) != 2 or not all(isinstance(step, int) for step in steps) or steps[0] > steps[1]:
        raise UserError(f"log.profile_steps={steps} must be (FIRST, LAST), such as (100, 110).")
    check_local("dataset.name", config.dataset.name)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """All values by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        is_section = hasattr(value, "items")
        found |= flatten(value, f"{prefix}{key}.") if is_section else {prefix + key: value}
    return found


def optional_keys(config: ConfigDict) -> set[str]:
    """The keys that may be None, as `section.key`."""
    found: set[str] = set()
    for key, node in get_config().items():
        if key in KINDS:
            keys = kind_keys(key, config[key].name).items()
            found |= {f"{key}.{each}" for each, (hint, *_) in keys if NoneType in get_args(hint)}
        elif hasattr(node, "items"):
            found |= {f"{key}.{each}" for each, value in node.items() if value is None}
    return found


def kind_keys(key: str, name: str) -> dict[str, tuple[Any, Any, str]]:
    """Of a kind: (type, default, one line of help) of each key."""
    table, shared = KINDS[key]
    found: dict[str, tuple[Any, Any, str]] = {}
    for function in shared:
        found |= _keywords(function, function)
    kind = table[name]
    if key == "model":
        hints, help_of = typing.get_type_hints(kind), _help(*kind.__mro__)
        for each, field in model_keys(name).items():
            found[each] = (hints[each], field.default, help_of.get(each, ""))
        return found
    if not inspect.isclass(kind):
        return found | _keywords(kind, kind)
    bases: tuple[Any, ...] = kind.__mro__
    for base in reversed(bases):  # a class also has the keys of its bases
        found |= _keywords(base.__init__, base)
    return found


def _keywords(function: Callable[..., Any], documented: Any) -> dict[str, tuple[Any, Any, str]]:
    hints, help_of = typing.get_type_hints(function), _help(documented, function)
    return {
        each.name: (hints.get(each.name, Any), each.default, help_of.get(each.name, ""))
        for each in inspect.signature(function).parameters.values()
        if each.kind is each.KEYWORD_ONLY
        and (each.name not in HANDED_OVER or function is optimizer_keys)
    }


def _help(*documented: Any) -> dict[str, str]:
    """`name` -> first sentence, from the Args and Attributes of docstrings."""
    found: dict[str, str] = {}
    for each in documented:
        entry = re.compile(r"^  ([a-z]\w*(?:, \w+)*): (.*(?:\n {4,}\S.*)*)", re.MULTILINE)
        for names, text in entry.findall(inspect.cleandoc(each.__doc__ or "")):
            for name in names.split(", "):
                found.setdefault(name, re.split(r"\. ", " ".join(text.split()))[0].rstrip("."))
    return found


def _field(annotation: Any, value: Any) -> Any:
    """`value` as a config holds it, with its type; None and unions keep the types of the key."""
    if isinstance(value, list):
        value = tuple(value)
    if not isinstance(annotation, UnionType):
        return value
    options = {typing.get_origin(each) or each for each in get_args(annotation)} - {NoneType}
    return FieldReference(value, field_type=options.pop() if len(options) == 1 else object)
