"""Checks of a config before anything is opened."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from vit_jax.errors import UserError, check_local

# Lowest value of the keys that nothing below would check in time.
AT_LEAST = {
    r"loader\.num_\w+": 0,
    r"loader\.prefetch": 1,
    r"log\.every_steps": 1,
    r"evaluators\..*\.every_steps": 0,
}


def check_config(config: ConfigDict) -> None:
    """Raises UserError for numbers and names that nothing below would check in time."""
    for key, value in _numbers(config):
        if not math.isfinite(value):
            raise UserError(f"{key}={value} must be a finite number.")
        for pattern, low in AT_LEAST.items():
            if re.fullmatch(pattern, key) and value < low:
                raise UserError(f"{key}={value} must be at least {low}.")
    if not 0 <= config.seed < 2**32:  # JAX would drop the higher bits: 2**32 would be 0
        raise UserError(f"seed={config.seed} must be from 0 to {2**32 - 1}.")
    first, last = config.log.profile_steps
    if first > last:
        raise UserError(f"log.profile_steps={(first, last)}: the first is after the last.")
    check_local("dataset.name", config.dataset.name)
    check_local("dataset.data_dir", config.dataset.data_dir)


def _numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a config with their dotted keys."""
    for key, value in config.items():
        if hasattr(value, "items"):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            yield prefix + key, value
