"""What is said of an update: its numbers, which must be finite, and one line."""

from __future__ import annotations

import math
from collections.abc import Mapping

from vit_jax.training.clock import format_seconds
from vit_jax.workdir.checkpoints import CheckpointManager


class TrainingDivergedError(RuntimeError):
    """Loss, gradient or parameters are NaN or infinite; the message names the step."""


def check_finite(step: int, metrics: Mapping[str, float], checkpoints: CheckpointManager) -> None:
    """Raises TrainingDivergedError for a value that is not finite."""
    bad = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
    if not bad:
        return
    checkpoints.wait()
    good = checkpoints.latest_step()
    kept = "no checkpoint yet" if good is None else f"the checkpoint of step {good} is kept"
    raise TrainingDivergedError(
        f"step {step}: {', '.join(bad)}; {kept}. Try a lower optimizer.learning_rate, a longer "
        "schedule.warmup_steps, or optimizer.clip_norm=1.0."
    )


def update_line(step: int, total_steps: int, row: Mapping[str, float], eta_seconds: float) -> str:
    """The line of the log for an update.

    Args:
      row: `loss`, `learning_rate`, what the objective reports, and the speed if it is known.
      eta_seconds: until the end.
    """
    speed = ("images_per_second", "mfu", "data_wait")
    left_out = ("loss", "learning_rate", "goodput", *speed)
    others = [
        f"{name} {value:.4g}"
        for name, value in row.items()
        if name not in left_out and not name.endswith("_seconds")
    ]
    parts = [f"step {step}/{total_steps}", f"loss {row['loss']:.4f}", *others]
    parts.append(f"lr {row['learning_rate']:.3g}")
    if "images_per_second" in row:
        parts.append(f"{row['images_per_second']:.0f} images/s")
        if "mfu" in row:
            parts.append(f"MFU {row['mfu']:.0%}")
        if row["data_wait"] >= 0.01:
            parts.append(f"waited for data {row['data_wait']:.0%}")
    return "  ".join([*parts, f"ETA {format_seconds(eta_seconds)}"])
