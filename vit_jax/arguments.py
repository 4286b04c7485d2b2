"""Parsers of the scripts' command lines."""

import io
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from vit_jax import wording
from vit_jax.wording import as_called, escaped, nearest

T = TypeVar("T", int, float)


class _Parser(ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        for stream in (sys.stdout, sys.stderr):  # of a script, before it writes anything
            if isinstance(stream, io.TextIOWrapper):  # names may have letters that ASCII lacks
                stream.reconfigure(errors="backslashreplace")
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            near = nearest(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unknown argument {unknown[0]}.{near}")
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {escaped(message)} (see --help)\n")

    def format_help(self) -> str:
        return as_called(super().format_help())


def create_parser(doc: str | None, **kwargs: Any) -> ArgumentParser:
    """A parser without abbreviations whose --help shows `doc`; a mistake is one line, status 2."""
    if wording.called_vit:
        kwargs["prog"] = f"vit {Path(sys.argv[0]).stem}"
    kwargs["formatter_class"] = RawDescriptionHelpFormatter
    return _Parser(description=doc, allow_abbrev=False, **kwargs)


def create_model_parser(doc: str | None, *, source: str, batch_size: int) -> ArgumentParser:
    """A parser with all flags for loading a finished model and its input.

    `source`: what the script does with MODEL; `batch_size`: the default.
    """
    parser = create_parser(doc)
    add = parser.add_argument
    add("source", metavar="MODEL", help=source)
    add("--preprocess", default="", metavar="OPS", help="ops instead of the checkpoint's own")
    add("--batch_size", type=int, default=batch_size, help=f"in total (default {batch_size})")
    add_sizes(parser)
    add("--dtype", default="float32", help="float32 or bfloat16 (default float32)")
    return parser


def add_sizes(parser: ArgumentParser) -> None:
    """Adds what `load_model` takes on the model's sizes."""
    add = parser.add_argument
    add(
        "--image_size",
        type=pair,
        metavar="N[,M]",
        help="use another resolution (height,width); position embeddings are interpolated",
    )
    add("--patch_size", type=int, metavar="N", help="in pixels, for weights of FlexiViT")
    add(
        "--posemb",
        default="auto",
        metavar="METHOD",
        help="how: auto (as the library whose weights they are), bilinear (the official code),"
        " bicubic (timm), transformers, dinov2, siglip2",
    )
    add("--num_heads", type=int, metavar="N", help="attention heads, if not stored in the file")
    add("--grid", type=pair, metavar="N,M", help="rows and columns of its tokens, if not square")


def add_dataset(parser: ArgumentParser) -> None:
    """Adds the arguments of `create_dataset` other than name and split."""
    add = parser.add_argument
    add("--data_dir", default="", metavar="DIR", help="where TFDS sets are prepared")
    add("--label_key", default="", metavar="KEY", help="label to use, if a TFDS set has several")
    add(
        "--on_bad_image",
        choices=("error", "skip"),
        default="",
        help="what to do with files that do not decode (default: as in the run, else error)",
    )


def add_share(parser: ArgumentParser) -> None:
    """Adds the arguments of jobs that share the runs of a work directory."""
    add = parser.add_argument
    add("--num_tasks", type=at_least(1), default=1, help="jobs that share the work and --workdir")
    add("--task", type=int, help="index of this job, from 0 (default SLURM_ARRAY_TASK_ID)")


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """KEY=VALUE of each `--config.KEY=VALUE` or `--config.KEY VALUE`, and the other arguments."""
    overrides, others, following = [], [], iter(arguments)
    for argument in following:
        match = re.match(r"--?config\.(.*)", argument, re.DOTALL)
        if match is None:
            others.append(argument)
        elif "=" in argument:
            overrides.append(match[1])
        else:
            overrides.append(f"{match[1]}={next(following, '')}")
    return overrides, others


def pair(text: str) -> tuple[int, int]:
    """Parses `384` or `384,288` as two numbers."""
    first, _, second = text.partition(",")
    return int(first), int(second or first)


def names(text: str) -> list[str]:
    """Parses `a,b` as a list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def filled(text: str) -> str:
    """Refuses "", which an unset shell variable leaves."""
    if not text:
        raise ArgumentTypeError("it is empty")
    return text


def at_least(smallest: T) -> Callable[[str], T]:
    """A parser of numbers of the same type that are not below `smallest`."""

    def number(text: str) -> T:
        value = type(smallest)(text)
        if not value >= smallest:
            raise ArgumentTypeError(f"{text} must be at least {smallest}")
        return value

    return number
