"""Training length, and learning-rate schedules (paper, section 4.1 and tables 3 and 4).

Keyword-only parameters of a row of `SCHEDULES` are the keys of that kind in `config.schedule`,
besides those of `create_schedule`, which all kinds have.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.kinds import check_known


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate of the next update, from the number of completed ones."""

    rate: Callable[[Any], jax.Array]
    total_steps: int
    warmup_steps: int

    def __call__(self, step: Any) -> jax.Array:
        return self.rate(step)

    def relative(self, step: Any) -> jax.Array:
        """(rate - end) / (peak - end) of the next update, for `training.gradients`.

        The peak is the rate after the warm-up, the end that after the last update. 0 for rates
        below the end, as in warm-up; 1 if peak and end are equal.
        """
        peak, end = self.rate(self.warmup_steps), self.rate(self.total_steps)
        span = peak - end
        ratio = (self.rate(step) - end) / jnp.where(span > 0.0, span, 1.0)
        return jnp.where(span > 0.0, jnp.maximum(ratio, 0.0), 1.0)


def to_steps(
    *,
    steps: int | None = None,
    examples: int | None = None,
    epochs: float | None = None,
    num_examples: int,
    batch_size: int,
) -> int:
    """The number of updates from the first of `steps`, `examples` and `epochs` that is set.

    `steps` comes first so that a command line can shorten any recipe. Examples and epochs are
    rounded to the nearest update, as in big_vision. Raises UserError if none is set, or the result
    is less than one step.
    """
    lengths = {"steps": steps, "examples": examples, "epochs": epochs}
    given = {unit: length for unit, length in lengths.items() if length is not None}
    if not given:
        raise UserError("set one of duration.steps, duration.examples, duration.epochs.")
    unit, length = next(iter(given.items()))
    examples_of = {"steps": batch_size, "examples": 1, "epochs": num_examples}
    total_steps = round(length * examples_of[unit] / batch_size)
    keys = [f"duration.{unit}={length}" for unit, length in given.items()]
    if len(keys) > 1:
        logging.warning(f"using {keys[0]}; ignoring {' and '.join(keys[1:])}.")
    if total_steps < 1:
        raise UserError(f"{keys[0]} is {total_steps} steps of {batch_size} examples, not even 1.")
    return total_steps


def check_polyak_decay(decay: float, total_steps: int, start_is: str) -> None:
    """Warns if the run is too short for its average to forget the start, `random` or not."""
    if (share := decay**total_steps) > 0.15:  # the paper's: 0.14, of 0.9999 in 20,000 steps
        shorter = 1 - float(f"{1 - 0.01 ** (1 / total_steps):.0e}")
        text = f"train_step.polyak_decay={decay}: after {total_steps} steps {share:.0%} of the"
        text += f" average, which is evaluated and exported, is the {start_is} start;"
        logging.warning(f"{text} {shorter:g} leaves about 1 %.")


class Position(NamedTuple):
    """A point in training; arrays are float32 scalars."""

    progress: jax.Array  # p, from 0 at the end of the warm-up to 1 after the last step
    past_warmup: jax.Array  # steps since the end of the warm-up
    step: jax.Array
    total_steps: int


def cosine(base: float, at: Position) -> jax.Array:
    """base * (1 + cos(pi p)) / 2."""
    return base * 0.5 * (1.0 + jnp.cos(jnp.pi * at.progress))


def linear(base: float, at: Position, *, linear_end: float = 1e-5) -> jax.Array:
    """From base to `linear_end`, linear in p.

    Args:
      linear_end: the final learning rate.
    """
    return linear_end + (base - linear_end) * (1.0 - at.progress)


def rsqrt(base: float, at: Position, *, timescale_steps: int = 10_000) -> jax.Array:
    """base / sqrt(1 + steps after warm-up / timescale).

    Args:
      timescale_steps: steps after which the rate has fallen by a factor of sqrt(2).
    """
    return base / jnp.sqrt(1.0 + at.past_warmup / timescale_steps)


def staircase(
    base: float,
    at: Position,
    *,
    decay_at: Sequence[float] = (0.3, 0.6, 0.9),
    decay_factor: float = 0.1,
) -> jax.Array:
    """base * decay_factor ** (number of the points in `decay_at` that have passed).

    Args:
      decay_at: fractions of the training, warm-up included; the default is the BiT-HyperRule's
        (1912.11370, section 3.3) from 20,000 examples on.
      decay_factor: of the rate at each of them.
    """
    # After the update at the boundary, as in BiT's code.
    passed = [at.step > round(point * at.total_steps) for point in decay_at]
    factors = [jnp.where(is_passed, decay_factor, 1.0) for is_passed in passed]
    return base * math.prod(factors, start=jnp.ones_like(at.step))


def constant(base: float, at: Position) -> jax.Array:
    """base."""
    return jnp.full_like(at.progress, base)


SCHEDULES: dict[str, Callable[..., jax.Array]] = {
    "cosine": cosine,
    "linear": linear,
    "rsqrt": rsqrt,
    "staircase": staircase,
    "constant": constant,
}


def create_schedule(
    name: str,
    *,
    total_steps: int,
    learning_rate: float = 1e-3,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
    **kwargs: Any,
) -> Schedule:
    """The schedule called `name`; UserError if it is unknown, or a number of steps negative.

    Args:
      total_steps: updates in all.
      learning_rate: the peak, after warm-up.
      warmup_steps: the rate is multiplied by step / warmup_steps until then; it is 0 in the first
        update, as in the official code. At most a tenth of a training that is shorter than two
        warm-ups, or than warm-up and cool-down.
      cooldown_steps: the rate decays linearly to 0 over this many final updates; shortened with
        the warm-up.
    """
    check_known("schedule.name", name, SCHEDULES)
    asked = {"schedule.warmup_steps": warmup_steps, "schedule.cooldown_steps": cooldown_steps}
    keys = " and ".join(f"{key}={steps}" for key, steps in asked.items() if steps)
    if min(asked.values()) < 0:
        raise UserError(f"{keys}: they must not be negative.")
    if 2 * warmup_steps > total_steps or warmup_steps + cooldown_steps >= total_steps:
        warmup_steps, cooldown_steps = (min(n, total_steps // 10) for n in asked.values())
        used = " and ".join(str(n) for n in (warmup_steps, cooldown_steps) if n) or "none"
        logging.info(f"{keys}: too long for {total_steps} steps; using {used}.")

    def rate_after(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - warmup_steps) / (total_steps - warmup_steps), 0.0, 1.0)
        at = Position(progress, jnp.maximum(step - warmup_steps, 0.0), step, total_steps)
        rate = SCHEDULES[name](learning_rate, at, **kwargs)
        if warmup_steps:
            rate = rate * jnp.minimum(1.0, step / warmup_steps)
        if cooldown_steps:
            rate = rate * jnp.clip((total_steps - step) / cooldown_steps, 0.0, 1.0)
        return rate

    return Schedule(rate_after, total_steps, warmup_steps)
