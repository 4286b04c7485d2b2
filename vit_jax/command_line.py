"""The command line of scripts that run a config: flags, recipe, overrides, help."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from absl import flags
from ml_collections import config_flags

from vit_jax import config as schema
from vit_jax.errors import ROOT, UserError, nearest

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Flags shared by scripts that run a config; `parse_flags` adds --config."""
    flags.DEFINE_string("workdir", None, "Folder of this run; if it exists, the run resumes.")
    flags.DEFINE_enum(
        "resume",
        "auto",
        ["auto", "force"],
        "auto refuses a workdir that belongs to another config; force resumes it anyway.",
    )
    flags.DEFINE_string(
        "profile_steps", None, "FIRST:LAST, trace these updates to WORKDIR/profile."
    )
    flags.DEFINE_enum(
        "distributed",
        "auto",
        ["auto", "on", "off"],
        "auto connects the processes if the flags below or the cluster (Cloud TPU, GKE, SLURM, "
        "Open MPI) say how; on requires it; off runs a single process.",
    )
    flags.DEFINE_string(
        "coordinator_address", None, "host:port of process 0, for a run of several processes."
    )
    flags.DEFINE_integer("num_processes", None, "Number of processes started by hand.")
    flags.DEFINE_integer("process_id", None, "Index of this process, from 0.")


def own_flags() -> list[Any]:
    """The flags of `define_flags`."""
    return FLAGS.flags_by_module_dict()[__name__]


def help_requested() -> bool:
    return any(argument in ("--help", "-h", "--helpfull", "-help") for argument in sys.argv[1:])


def parse_flags(default_config: str | None = None) -> None:
    """Parses flags with absl, and sets `FLAGS.config` from the recipe and the overrides.

    `--config.SECTION.name=KIND` replaces a section by that of another kind before its keys are
    overridden (see `config.set_kind`), and `--config.KEY=None` unsets a key that may be None.

    Raises:
      UserError: any mistake in a flag, a recipe or an override.
    """
    arguments = sys.argv[1:]
    recipes = [value for key, value in _pairs(arguments) if key == "config"]
    rest = _without(arguments, {"config"})
    override(load_recipe(recipes[-1] if recipes else default_config), rest)


def override(config: Any, arguments: list[str], flag_values: Any = FLAGS) -> Any:
    """Parses `--config.KEY=VALUE` and the other flags of `flag_values`; returns the config.

    Args:
      config: of a recipe, or None.
      arguments: from the command line, without the recipe.

    Raises:
      UserError: a mistake in one of them.
    """
    if config is not None:
        given = {key.removeprefix("config."): value for key, value in _pairs(arguments)}
        chosen = choose_kinds(config, given)
        unset = unset_keys(config, given)
        for key in unset:
            section, name = key.split(".")
            config[section][name] = None
        arguments = _without(arguments, {f"config.{key}" for key in chosen | unset})
    argv = [sys.argv[0], *arguments]
    try:
        config_flags.DEFINE_config_dict(
            "config", config, lock_config=True, sys_argv=argv, flag_values=flag_values
        )
        rest = flag_values(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(_flag_error(error, config, arguments)) from error
    if len(rest) > 1:
        raise UserError(f"unexpected arguments: {' '.join(rest[1:])}; overrides are --config.x=y.")
    if config is not None:  # explicit values take precedence over those of the weights
        family = schema.MODELS[flag_values.config.model.name]
        conventions = [f"model.{key}" for key in (*family.conventions, *family.head_conventions)]
        pretrained = flag_values.config.pretrained
        pretrained.keep += tuple(each for each in conventions if each in given)
    return flag_values.config


def get_config(recipe: str = "", *overrides: str) -> Any:
    """The config of a command line, for `train_and_evaluate`.

    Args:
      recipe: as in --config=configs/finetune.py:B/16,cifar10; "" for the defaults.
      overrides: as in --config.KEY=VALUE, such as "dataset.batch_size=64".

    Raises:
      UserError: a mistake in one of them.
    """
    config = load_recipe(recipe) if recipe else schema.get_config()
    return override(config, [f"--config.{each}" for each in overrides], flags.FlagValues())


def load_recipe(spec: str | None) -> Any:
    """The config of `PATH[:ARGUMENT]`; None for None or "".

    PATH may also be relative to the repository, or the name of a recipe: `finetune` for
    `configs/finetune.py`.

    Raises:
      UserError: no such file, no `get_config` in it, or an error from the recipe itself.
    """
    if not spec:
        return None
    path, separator, argument = spec.partition(":")
    places = [path, str(ROOT / path), str(ROOT / f"configs/{path}.py")]
    found = next(filter(os.path.isfile, places), "")
    if not found:
        known = [each.stem for each in (ROOT / "configs").glob("*.py")]
        raise UserError(f"--config: there is no recipe {path!r}.{nearest(path, known)}")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # recipes import each other as `configs.pretrain`
    try:
        get_config = runpy.run_path(found, run_name="recipe")["get_config"]
    except (KeyError, SyntaxError) as error:
        raise UserError(f"--config: {path!r} is not a recipe: {error}") from error
    if separator and not inspect.signature(get_config).parameters:
        raise UserError(f"--config: {path!r} takes no argument, but got {argument!r}.")
    return get_config(argument) if separator else get_config()


# Names of keys in other libraries.
_WORDS = {
    **dict.fromkeys(("lr", "base_lr", "peak_lr"), "schedule.learning_rate"),
    **dict.fromkeys(("wd", "decay"), "optimizer.weight_decay"),
    **dict.fromkeys(("num_epochs", "max_epochs", "train_epochs"), "duration.epochs"),
    **dict.fromkeys(("max_steps", "total_steps", "num_steps", "train_steps"), "duration.steps"),
    **dict.fromkeys(("bs", "batch", "train_batch_size"), "dataset.batch_size"),
    **dict.fromkeys(
        ("image_size", "img_size", "resolution", "input_size", "size"),
        "a number in dataset.preprocess and dataset.eval_preprocess, as official_train(384)",
    ),
    **dict.fromkeys(("ema", "ema_decay", "model_ema", "polyak"), "train_step.polyak_decay"),
    **dict.fromkeys(("drop_path", "drop_path_rate"), "model.stochastic_depth_rate"),
    **dict.fromkeys(("dropout", "drop", "drop_rate"), "model.dropout_rate"),
    **dict.fromkeys(("mixup", "mixup_prob"), "mix.mixup_alpha"),
    **dict.fromkeys(("cutmix", "cutmix_prob"), "mix.cutmix_alpha"),
    **dict.fromkeys(("clip_grad", "grad_clip", "max_grad_norm", "clip"), "optimizer.clip_norm"),
    **dict.fromkeys(("warmup", "warmup_epochs"), "schedule.warmup_steps"),
    **dict.fromkeys(("workers", "dataloader_num_workers"), "loader.num_workers"),
    **dict.fromkeys(("amp", "precision", "fp16", "bf16", "mixed_precision"), "model.dtype"),
    **dict.fromkeys(("gradient_checkpointing", "grad_checkpointing"), "model.remat"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accum", "accum_steps", "accum_freq"),
        "train_step.accumulation_steps",
    ),
    **dict.fromkeys(("smoothing",), "objective.label_smoothing"),
    **dict.fromkeys(("opt", "optim"), "optimizer.name"),
    **dict.fromkeys(("data", "data_path", "dataset_name"), "dataset.name"),
    **dict.fromkeys(
        ("checkpoint_path", "model_or_filename", "init_from", "weights"), "pretrained.source"
    ),
    "num_classes": "determined by the data set (or the objective), not set in the config",
    "output_dir": "the flag --workdir",
}


def choose_kinds(config: Any, given: Mapping[str, str]) -> set[str]:
    """Sets each section to the kind given on the command line; returns the keys that do."""
    values = schema.flatten(config)
    chosen = set()
    for key, name in given.items():
        section, _, last = key.rpartition(".")
        names_kind = last == "name" and (section in schema.KINDS or section[:11] == "evaluators.")
        if names_kind and values.get(key, name) != name:
            schema.set_kind(config, section, name, given)
            chosen.add(key)
    return chosen


def unset_keys(config: Any, given: Mapping[str, str]) -> set[str]:
    """Keys to set to None: those given as None, and a recipe's length if another one is given."""
    lengths = {f"duration.{name}" for name in config.duration}
    unset = {key for key in schema.optional_keys(config) if given.get(key) == "None"}
    asked = lengths & given.keys() - unset
    return unset | (lengths - asked if asked else set())


def _pairs(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """(flag, value) of `--flag=value` and `--flag value`."""
    for i, argument in enumerate(arguments):
        if match := re.match(r"--?(config[^=\s]*)(?:=(.*))?$", argument, re.DOTALL):
            following = arguments[i + 1] if i + 1 < len(arguments) else ""
            yield match[1], following if match[2] is None else match[2]


def _without(arguments: list[str], names: set[str]) -> list[str]:
    """The arguments without these flags and their values."""
    kept, rest = [], iter(arguments)
    for argument in rest:
        match = re.match(r"--?(config[^=\s]*)(=?)", argument)
        if match is None or match[1] not in names:
            kept.append(argument)
        elif not match[2]:
            next(rest, None)  # its value
    return kept


def _flag_error(error: BaseException, config: Any, arguments: list[str]) -> str:
    """One line that explains what is wrong with the command line."""
    known = {} if config is None else schema.flatten(config)
    keys = (re.match(r"--?config\.([^=\[]+)", argument) for argument in arguments)
    unknown = [key[1] for key in keys if key and key[1] not in known]
    if config is None or not unknown:
        return f"{' '.join(str(error.args[0] if error.args else error).split())} (see --help)"
    section = unknown[0].rpartition(".")[0]
    same = [each for each in known if each.rpartition(".")[0] == section]
    kind = "the config"
    if f"{section}.name" in same and section != "dataset":
        kind = f"{section}.name={known[f'{section}.name']!r}"
    leaf = unknown[0].rpartition(".")[2]
    elsewhere = [each for each in known if each.endswith(f".{leaf}")]
    near = nearest(unknown[0], elsewhere or same or known)
    if leaf in _WORDS and not elsewhere:
        near = f" Here it is {_WORDS[leaf]}."
    elif len(elsewhere) == 1:
        near = f" Did you mean {elsewhere[0]!r}?"
    return f"--config.{unknown[0]} is not a key of {kind}.{near} --help lists all."


def step_range(text: str) -> tuple[int, int]:
    """`100:110` as numbers."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"--profile_steps={text!r} must be FIRST:LAST, such as 100:110.")
    return int(match[1]), int(match[2])


def help_text(doc: str | None, *, run: bool = True) -> str:
    """The script's docstring, its flags, and every config key with its default and meaning.

    `run`: whether the script starts a run; else its flags and the config keys are omitted.
    """
    lines = [inspect.cleandoc(doc or ""), "", "Flags:"]
    lines.append("  --config: Recipe, as configs/finetune.py:B/16,cifar10.")
    script = FLAGS.flags_by_module_dict().get(sys.argv[0], [])
    listed = [*script, *(own_flags() if run else [])]
    lines += [f"  --{flag.name}: {flag.help} (default: {flag.default})" for flag in listed]
    if not run:
        return "\n".join([*lines, "", "Config keys: see scripts/train.py --help."])
    lines += ["", "Config keys, as --config.KEY=VALUE:"]
    lines.append(f"  seed = {schema.SEED[0]}  # {schema.SEED[1]}")
    for section, node in schema.get_config().items():
        if section in schema.KINDS:
            lines += _help_of_kinds(section, section, node.name)
        elif section == "evaluators":
            lines += _help_of_kinds("evaluators.*", "evaluators.NAME", node.test.name)
        elif section != "seed":
            texts = schema.KEYS[section]
            lines += [f"  {section}.{key} = {node[key]!r}  # {texts[key][1]}" for key in node]
    return "\n".join(lines)


def _help_of_kinds(key: str, shown: str, default: str) -> list[str]:
    """The keys of a section, with their kinds unless all have them."""
    table, _ = schema.KINDS[key]
    kinds = {name: schema.kind_keys(key, name) for name in table}
    rows = " | a variant, such as B/16" if key == "model" else ""
    lines = [f"  {shown}.name = {default!r}  # {' | '.join(table)}{rows}"]
    for each in dict.fromkeys(each for keys in kinds.values() for each in keys):
        having = [name for name, keys in kinds.items() if each in keys]
        _, value = kinds[having[0]][each]
        value = "..." if value is dataclasses.MISSING else repr(value)
        only = "" if len(having) == len(kinds) else f"({', '.join(having)}) "
        lines.append(f"  {shown}.{each} = {value}  # {only}{help_of(key, having[0])[each]}")
    return lines


def help_of(key: str, name: str) -> dict[str, str]:
    """For a kind: the first sentence of the documentation of each key."""
    import docstring_parser  # only --help needs it

    documented: list[Any] = schema.functions_of(key, name)
    kind = schema.KINDS[key][0][name]
    if inspect.isclass(kind := getattr(kind, "module", kind)):
        documented += reversed(kind.__mro__)
    found: dict[str, str] = {}
    for each in documented:
        text = inspect.cleandoc(each.__doc__ or "")
        for entry in docstring_parser.parse(text, docstring_parser.DocstringStyle.GOOGLE).params:
            sentence = " ".join((entry.description or "").split()).partition(". ")[0].rstrip(".")
            found |= dict.fromkeys(entry.arg_name.split(", "), sentence)
    return found
