"""Means of what the objective measures; each example counts exactly once on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from clu import metrics as clu_metrics

from vit_jax.evaluators.stream import Reader
from vit_jax.parameters.sharding import compiler_options, keep_batch_sharding, replicated


class ObjectiveEvaluator:
    """Averages `objective.evaluate` (loss, accuracy, ...) over a dataset, on the devices."""

    def __init__(self, objective: Any, reader: Reader):
        self._reader = reader
        self.metric_names = (*objective.measures, "num_examples")

        def eval_step(params: Any, batch: Any) -> dict[str, clu_metrics.Average]:
            with keep_batch_sharding():
                found = objective.evaluate(params, batch)
            return {
                name: clu_metrics.Average.from_model_output(values=values, mask=batch["mask"] > 0)
                for name, values in found.items()
            }

        everywhere = replicated(reader.mesh)
        options = compiler_options(reader.mesh)
        self._eval_step = jax.jit(eval_step, out_shardings=everywhere, compiler_options=options)
        self._merge = jax.jit(
            lambda a, b: {name: value.merge(b[name]) for name, value in a.items()},
            out_shardings=everywhere,
        )

    def __call__(
        self, params: Any, *, on_batch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Means by name, and `num_examples`.

        Args:
          params: on the devices, with the objective's constants.
          on_batch: called before each batch, by every process; its errors pass through.
        """
        total: Any = None
        with self._reader.batches() as batches:
            for batch in batches:
                on_batch()
                values, before = self._eval_step(params, batch), total
                total = values if total is None else self._merge(total, values)
                jax.block_until_ready(before)  # the host is at most two batches ahead
        total = jax.device_get(total)
        means = {name: float(value.compute()) for name, value in total.items()}
        count = int(next(iter(total.values())).count)
        return {**means, "num_examples": count}
