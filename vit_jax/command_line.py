"""The command line of scripts that run a config: flags, recipe, overrides, help."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import os
import runpy
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import flags
from ml_collections import config_flags

from vit_jax import ROOT
from vit_jax import config as schema
from vit_jax.arguments import create_parser, filled, split_overrides
from vit_jax.errors import UserError
from vit_jax.wording import nearest, unknown_key


def run_parser(doc: str | None, *, trains: bool = True) -> ArgumentParser:
    """The parser of a script that takes a recipe and overrides of its keys, see `parse`.

    `trains`: False for a script that accepts the other flags of a training, but ignores them.
    """
    parser = create_parser(doc, add_help=False)
    parser.add_argument("-h", "--help", action="help", help="show this, and all keys of the config")
    recipe = "such as configs/finetune.py:B/16,cifar10"
    parser.add_argument("--config", type=filled, required=True, metavar="RECIPE", help=recipe)

    def add(name: str, **kwargs: Any) -> None:
        parser.add_argument(name, **(kwargs if trains else {"help": SUPPRESS}))

    resumes = "of this run; if it exists, the run resumes"
    add("--workdir", type=filled, required=True, metavar="DIR", help=resumes)
    add(
        "--resume",
        choices=("auto", "force"),
        default="auto",
        help="auto refuses a workdir that belongs to another config; force resumes it anyway",
    )
    add(
        "--distributed",
        choices=("auto", "on", "off"),
        default="auto",
        help="auto connects the processes if the flags below or the cluster (Cloud TPU, GKE, "
        "SLURM, Open MPI) say how; on requires it; off runs a single process",
    )
    add("--coordinator_address", metavar="HOST:PORT", help="of process 0, if started by hand")
    add("--num_processes", type=int, metavar="N", help="started by hand")
    add("--process_id", type=int, metavar="I", help="of this process, from 0")
    return parser


def parse(parser: ArgumentParser, arguments: Sequence[str] | None = None) -> Namespace:
    """Parses a command line: in the result, `config` is that of the recipe and the overrides.

    `--config.SECTION.name=KIND` replaces a section by that of another kind before its keys are
    overridden (see `config.set_kind`), and `--config.KEY=None` unsets a key that may be None.
    Any mistake in a recipe or an override is a UserError.
    """
    overrides, others = split_overrides(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(others):
        recipe_only = ArgumentParser(add_help=False, allow_abbrev=False)
        recipe_only.add_argument("--config", default="")
        recipe = recipe_only.parse_known_args(others)[0].config
        title = f"config keys{f' of {recipe}' if recipe else ''}, as --config.KEY=VALUE:"
        parser.epilog = f"{title}\n{help_of_config(get_config(recipe, *overrides))}"
    options = parser.parse_args(others)
    options.config = override(load_recipe(options.config), overrides)
    for key, value in options.config.processes.items():  # the rest once they are connected
        schema.check_value(f"processes.{key}", value)
    return options


def override(config: Any, overrides: Sequence[str]) -> Any:
    """Sets keys of a config to values in text, as `dataset.batch_size=64`; returns it."""
    texts = {key: value for key, _, value in (text.partition("=") for text in overrides)}
    values, done = schema.flatten(config), set()
    for key, name in texts.items():
        section, _, last = key.rpartition(".")
        if last == "name" and section != "dataset" and values.get(key, name) != name:
            schema.set_kind(config, section, name, texts)
            done.add(key)
    for key in [key for key in schema.optional_keys(config) if texts.get(key) == "None"]:
        section, name = key.split(".")
        config[section][name] = None
        done.add(key)
    remaining = [text for text in overrides if text.partition("=")[0] not in done]
    argv, flag_values = ["", *(f"--config.{text}" for text in remaining)], flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict(
            "config", config, lock_config=True, sys_argv=argv, flag_values=flag_values
        )
        flag_values(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(_override_error(error, config, remaining)) from error
    # Explicit values take precedence over those of the weights.
    family = schema.MODELS[config.model.name]
    conventions = [f"model.{key}" for key in (*family.conventions, *family.head_conventions)]
    config.pretrained.keep += tuple(key for key in conventions if key in texts)
    return config


def get_config(recipe: str = "", *overrides: str) -> Any:
    """The config of a command line, for `train_and_evaluate`; UserError: a mistake in it.

    Args:
      recipe: as in --config=configs/finetune.py:B/16,cifar10; "" for the defaults.
      overrides: as in --config.KEY=VALUE, such as "dataset.batch_size=64".
    """
    return override(load_recipe(recipe) if recipe else schema.get_config(), overrides)


def load_recipe(spec: str) -> Any:
    """The config of `PATH[:ARGUMENT]`; UserError if there is none.

    PATH may also be relative to the repository, or the name of a recipe: `finetune` for
    `configs/finetune.py`.
    """
    path, separator, argument = spec.partition(":")
    places = [path, str(ROOT / path), str(ROOT / f"configs/{path}.py")]
    file = next(filter(os.path.isfile, places), "")
    if not file:
        known = [recipe.stem for recipe in (ROOT / "configs").glob("*.py")]
        raise UserError(f"--config: there is no recipe {path!r}.{nearest(path, known)}")
    with importing_recipes(Path(file).absolute().parent):
        try:
            get_config = runpy.run_path(file, run_name="recipe")["get_config"]
        except (KeyError, SyntaxError) as error:
            raise UserError(f"--config: {path!r} is not a recipe: {error}") from error
        if separator and not inspect.signature(get_config).parameters:
            raise UserError(f"--config: {path!r} takes no argument, but got {argument!r}.")
        return get_config(argument) if separator else get_config()


@contextlib.contextmanager
def importing_recipes(folder: Path = ROOT / "configs") -> Iterator[None]:
    """Meanwhile `configs` is our package, even where the caller's project has one of that name.

    A recipe also imports what `configs` is in its own folder, and in the project.
    """

    def pop() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if f"{name}.".startswith("configs.")]
        return {name: sys.modules.pop(name) for name in names}

    theirs, package = pop(), ModuleType("configs")
    spec, own = importlib.util.find_spec("configs"), [folder] * (folder.name == "configs")
    in_project = (spec and spec.submodule_search_locations) or ()
    package.__path__ = [*map(str, own), str(ROOT / "configs"), *in_project]
    sys.modules["configs"] = package
    try:
        yield
    finally:
        pop()
        sys.modules.update(theirs)


def _override_error(error: BaseException, config: Any, overrides: Sequence[str]) -> str:
    """One line that explains what is wrong with the overrides."""
    known = schema.flatten(config)
    keys = (text.partition("=")[0].partition("[")[0] for text in overrides)
    unknown = next((key for key in keys if key not in known), None)
    if unknown is None:
        return f"{' '.join(str(error.args[0] if error.args else error).split())} (see --help)"
    return f"--config.{unknown_key(unknown, known)} --help lists all."


def help_of_config(config: Any) -> str:
    """Every key with its value in the config, or its default, and its meaning, a line each."""
    lines = [f"  seed = {config.seed}  # {schema.SEED[1]}"]
    for section, node in config.items():
        if section in schema.KINDS:
            lines += _help_of_kinds(section, section, node)
        elif section == "evaluators":
            for name, own in node.items():
                lines += [f"  evaluators.{name}.{key} = {value!r}" for key, value in own.items()]
            lines += _help_of_kinds("evaluators.*", "evaluators.NAME", {"name": "objective"})
        elif section != "seed":
            texts = schema.KEYS[section]
            lines += [f"  {section}.{key} = {node[key]!r}  # {texts[key][1]}" for key in node]
    return "\n".join(lines)


def _help_of_kinds(key: str, shown: str, node: Mapping[str, Any]) -> list[str]:
    """The keys of a section, with their kinds unless all have them; `node`: values of one."""
    table, _ = schema.KINDS[key]
    kinds = {name: schema.kind_keys(key, name) for name in table}
    rows = " | a variant, such as B/16" if key == "model" else ""
    lines = [f"  {shown}.name = {node['name']!r}  # {' | '.join(table)}{rows}"]
    for option in dict.fromkeys(option for keys in kinds.values() for option in keys):
        having = [name for name, keys in kinds.items() if option in keys]
        kind = node["name"] if node["name"] in having else having[0]
        value = node[option] if option in node else kinds[kind][option][1]
        value = "..." if value is dataclasses.MISSING else repr(value)
        only = "" if len(having) == len(kinds) else f"({', '.join(having)}) "
        lines.append(f"  {shown}.{option} = {value}  # {only}{help_of(key, kind)[option]}")
    return lines


def help_of(key: str, name: str) -> dict[str, str]:
    """For a kind: the first sentence of the documentation of each key."""
    import docstring_parser  # only --help needs it

    documented: list[Any] = schema.functions_of(key, name)
    kind = schema.KINDS[key][0][name]
    if inspect.isclass(kind := getattr(kind, "module", kind)):
        documented += reversed(kind.__mro__)
    texts: dict[str, str] = {}
    for function in documented:
        # The parser takes a text that begins with "Args:" for one without sections.
        text = f"Documentation.\n\n{inspect.cleandoc(function.__doc__ or '')}"
        for entry in docstring_parser.parse(text, docstring_parser.DocstringStyle.GOOGLE).params:
            sentence = " ".join((entry.description or "").split()).partition(". ")[0].rstrip(".")
            texts |= dict.fromkeys(entry.arg_name.split(", "), sentence)
    return texts
