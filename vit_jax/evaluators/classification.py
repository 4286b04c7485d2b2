"""Means over a whole split, each example counted exactly once on any number of devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from clu import metrics as clu_metrics
from jax.sharding import Mesh

from vit_jax.evaluators.stream import padded_batches
from vit_jax.multihost import liveness
from vit_jax.parameters.sharding import keep_batch_sharding, replicated


class ClassificationEvaluator:
    """Averages the objective's per-example values (loss, accuracy) over a dataset."""

    def __init__(self, *, objective: Any, dataset: Any, mesh: Mesh, batch_size: int, loader: Any):
        """
        Args:
          objective: has `evaluate(params, batch) -> {name: [B]}`.
          dataset: from `create_dataset`, with the evaluation preprocessing.
          mesh: devices; `batch_size` must divide over them.
          batch_size: examples per step over all devices.
          loader: keyword arguments of the reader; threads stand in for workers.
        """
        self._dataset = dataset
        # Workers are for long training: each evaluation would wait for its own to start.
        num_threads = max(loader["num_threads"], loader["num_workers"])
        loader = {**loader, "num_workers": 0, "num_threads": num_threads}
        self._reader = {"mesh": mesh, "batch_size": batch_size, "loader": loader}

        def eval_step(params: Any, batch: Any) -> dict[str, clu_metrics.Average]:
            with keep_batch_sharding():
                found = objective.evaluate(params, batch)
            return {
                name: clu_metrics.Average.from_model_output(values=values, mask=batch["mask"] > 0)
                for name, values in found.items()
            }

        self._eval_step = jax.jit(eval_step, out_shardings=replicated(mesh))
        self._merge = jax.jit(
            lambda a, b: {name: value.merge(b[name]) for name, value in a.items()},
            out_shardings=replicated(mesh),
        )

    def __call__(
        self, params: Any, *, on_batch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Means by name, and `num_examples`.

        Args:
          params: on the devices.
          on_batch: called before each batch, on all processes alike; what it raises ends this.
        """
        total: Any = None
        with padded_batches(self._dataset, **self._reader) as batches:
            for batch in batches:
                on_batch()
                values = self._eval_step(params, batch)
                total = values if total is None else self._merge(total, values)
                liveness.note("reading a batch to evaluate")
        total = jax.device_get(total)
        count = {int(value.count) for value in total.values()}
        if count != {self._dataset.num_examples}:
            raise RuntimeError(f"counted {count} examples of {self._dataset.num_examples}.")
        means = {name: float(value.compute()) for name, value in total.items()}
        return {**means, "num_examples": self._dataset.num_examples}
