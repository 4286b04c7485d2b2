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
    """Returns the number of updates: `steps`, else `examples`, else `epochs`, the first one set.

    `steps` comes first so that a command line can shorten any recipe. Examples and epochs are
    rounded to the nearest whole update, as big_vision does.

    Args:
      steps: updates.
      examples: training examples seen, counting repeats.
      epochs: passes over the `num_examples` of the training split.
      num_examples: size of the training split.
      batch_size: examples per update, over all devices and hosts.

    Raises:
      UserError: none is set, or the result is below one step.
    """
    if steps is None:
        if examples is None:
            if epochs is None:
                raise UserError(
                    "the length of training is not set: give one of duration.steps, "
                    "duration.examples, duration.epochs."
                )
            examples_seen = epochs * num_examples
        else:
            examples_seen = examples
        steps = round(examples_seen / batch_size)
    if steps < 1:
        raise UserError(
            f"duration comes to {steps} steps (duration.steps={steps}, "
            f"examples={examples}, epochs={epochs}, batch_size={batch_size}); at least 1 is needed."
        )
    return steps


def fit_warmup(total_steps: int, *, warmup_steps: int, cooldown_steps: int, **_: object) -> int:
    """`warmup_steps`, or a tenth of the training where a recipe was shortened below them."""
    if 0 < total_steps <= warmup_steps + cooldown_steps and not cooldown_steps:
        logging.info(
            f"schedule.warmup_steps={warmup_steps} does not fit into {total_steps} steps; warming "
            f"up over {total_steps // 10}."
        )
        return total_steps // 10
    if 2 * warmup_steps > total_steps > 0:
        logging.warning(
            f"schedule.warmup_steps={warmup_steps} is more than half of the {total_steps} steps."
        )
    return warmup_steps
