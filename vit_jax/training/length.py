"""Lengths of training in steps, from whichever unit a recipe states."""

from __future__ import annotations

import logging

from vit_jax.errors import UserError


def to_steps(
    *,
    steps: int | None = None,
    examples: int | None = None,
    epochs: float | None = None,
    num_examples: int,
    batch_size: int,
) -> int:
    """The number of updates by the first of `steps`, `examples` and `epochs` that is set.

    `steps` comes first so that a command line can shorten any recipe. Examples and epochs are
    rounded to the nearest whole update, as big_vision does.

    Args:
      steps: updates of `batch_size` examples.
      examples: training examples seen, counting repeats.
      epochs: passes over the `num_examples` of the training split.

    Raises:
      UserError: none is set, or the result is below one step.
    """
    given = {"steps": steps, "examples": examples, "epochs": epochs}
    keys = [f"duration.{key}={value}" for key, value in given.items() if value is not None]
    if steps is not None:
        total_steps = steps
    elif examples is not None:
        total_steps = round(examples / batch_size)
    elif epochs is not None:
        total_steps = round(epochs * num_examples / batch_size)
    else:
        raise UserError("give one of duration.steps, duration.examples, duration.epochs.")
    if len(keys) > 1:
        logging.warning(f"{keys[0]} counts; {' and '.join(keys[1:])} is ignored.")
    if total_steps < 1:
        raise UserError(
            f"{keys[0]} comes to {total_steps} steps of {batch_size} examples; at least 1 is "
            "needed."
        )
    return total_steps


def fit_warmup(total_steps: int, *, warmup_steps: int, cooldown_steps: int, **_: object) -> int:
    """`warmup_steps`, or a tenth of the training where a recipe was shortened below them."""
    key = f"schedule.warmup_steps={warmup_steps}"
    if total_steps <= warmup_steps and not cooldown_steps:
        short = total_steps // 10
        logging.info(f"{key} does not fit into {total_steps} steps; warming up over {short}.")
        return short
    if 2 * warmup_steps > total_steps:
        logging.warning(f"{key} is more than half of the {total_steps} steps.")
    return warmup_steps
