"""Lengths of training in steps, from whichever unit a recipe states."""

from __future__ import annotations

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
