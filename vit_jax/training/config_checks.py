"""What can be said of a config before anything is opened."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from vit_jax.errors import UserError, check_local


def check_config(config: ConfigDict) -> None:
    """Raises UserError for numbers and names that nothing below would notice in time."""
    for key, value in _numbers(config):
        if not math.isfinite(value):
            raise UserError(f"{key}={value} must be a finite number.")
    if not 0 <= config.seed < 2**32:  # more is cut off without a word: 2**32 would be 0
        raise UserError(f"seed={config.seed} must be from 0 to {2**32 - 1}.")
    first, last = config.log.profile_steps
    if first > last:
        raise UserError(f"log.profile_steps={(first, last)}: the first is after the last.")
    for key, value, low in (
        *(
            (f"evaluators.{name}.every_steps", evaluator.every_steps, 0)
            for name, evaluator in config.evaluators.items()
        ),
        ("log.every_steps", config.log.every_steps, 1),
        ("loader.num_threads", config.loader.num_threads, 0),
        ("loader.num_workers", config.loader.num_workers, 0),
        ("loader.prefetch", config.loader.prefetch, 1),
    ):
        if value < low:
            raise UserError(f"{key}={value} must be at least {low}.")
    check_local("dataset.name", config.dataset.name)
    check_local("dataset.data_dir", config.dataset.data_dir)
    given = [key for key in ("steps", "examples", "epochs") if config.duration[key] is not None]
    if len(given) > 1:
        ignored = " and ".join(f"duration.{key}" for key in given[1:])
        logging.warning("duration.%s counts; %s is ignored.", given[0], ignored)


def _numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """All floats of a config with their dotted keys."""
    for key, value in config.items():
        if hasattr(value, "items"):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield prefix + key, value
