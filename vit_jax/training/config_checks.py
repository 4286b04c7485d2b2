"""What can be said of a config before anything is opened."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
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
    _check_at_least(0, "loader", config.loader)
    _check_at_least(1, "loader", {"prefetch": config.loader.prefetch})
    _check_at_least(1, "log", {"every_steps": config.log.every_steps})
    for name, evaluator in config.evaluators.items():
        _check_at_least(0, f"evaluators.{name}", {"every_steps": evaluator.every_steps})
    check_local("dataset.name", config.dataset.name)
    check_local("dataset.data_dir", config.dataset.data_dir)
    given = [key for key in ("steps", "examples", "epochs") if config.duration[key] is not None]
    if len(given) > 1:
        ignored = " and ".join(f"duration.{key}" for key in given[1:])
        logging.warning("duration.%s counts; %s is ignored.", given[0], ignored)


def _check_at_least(low: int, section: str, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if value < low:
            raise UserError(f"{section}.{key}={value} must be at least {low}.")


def _numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """All floats of a config with their dotted keys."""
    for key, value in config.items():
        if hasattr(value, "items"):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield prefix + key, value
