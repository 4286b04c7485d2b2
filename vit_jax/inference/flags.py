"""Command-line arguments of the scripts that use a finished model."""

from __future__ import annotations

import argparse


def create_parser(doc: str | None, *, source: str, batch_size: int) -> argparse.ArgumentParser:
    """Creates a parser with all flags for loading a model and its input.

    Args:
      doc: the script's docstring, shown by --help.
      source: what the script does with MODEL.
      batch_size: the default.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", metavar="MODEL", help=source)
    add("--preprocess", default="", metavar="OPS", help="ops instead of the checkpoint's own")
    add("--batch_size", type=int, default=batch_size, help=f"in total (default {batch_size})")
    add(
        "--image_size",
        type=pair,
        metavar="N[,M]",
        help="use another resolution (height,width); position embeddings are interpolated",
    )
    add("--num_heads", type=int, metavar="N", help="attention heads, if not stored in the file")
    add("--grid", type=pair, metavar="N,M", help="rows and columns of its tokens, if not square")
    add("--dtype", default="float32", help="float32 or bfloat16 (default float32)")
    return parser


def add_dataset(parser: argparse.ArgumentParser) -> None:
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


def pair(text: str) -> tuple[int, int]:
    """Parses `384` or `384,288` as two numbers."""
    first, _, second = text.partition(",")
    return int(first), int(second or first)
