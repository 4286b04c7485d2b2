"""Means over a whole split, each example counted exactly once on any number of devices."""

from __future__ import annotations

from typing import Any

import jax
from clu import metrics as clu_metrics
from jax.sharding import Mesh

from vit_jax.data.device import device_batches, local_rows
from vit_jax.data.pipeline import eval_batches
from vit_jax.sharding import batch_sharding, replicated


class ClassificationEvaluator:
    """Averages the objective's per-example values (loss, accuracy) over a dataset.

    The last batch is padded to full size and the padding masked, so that every process runs the
    same number of steps and no example is dropped.
    """

    def __init__(self, *, objective: Any, dataset: Any, mesh: Mesh, batch_size: int, loader: Any):
        """
        Args:
          objective: has `evaluate(params, batch) -> {name: [B]}`.
          dataset: from `create_dataset`, with the evaluation preprocessing.
          mesh: devices; `batch_size` must divide over them.
          batch_size: examples per step over all devices.
          loader: keyword arguments of the reader; threads are used, workers are not.
        """
        self._dataset = dataset
        self._batch_size = batch_size
        # Workers are for long training: each evaluation would wait for its own to start.
        self._loader = {**loader, "num_workers": 0}
        self._sharding = batch_sharding(mesh)

        def eval_step(params: Any, batch: Any) -> dict[str, clu_metrics.Average]:
            return {
                name: clu_metrics.Average.from_model_output(values=values, mask=batch["mask"] > 0)
                for name, values in objective.evaluate(params, batch).items()
            }

        self._eval_step = jax.jit(eval_step, out_shardings=replicated(mesh))
        self._merge = jax.jit(
            lambda a, b: {name: value.merge(b[name]) for name, value in a.items()},
            out_shardings=replicated(mesh),
        )

    def __call__(self, params: Any) -> dict[str, float]:
        """Means by name, and `num_examples`."""
        rows = local_rows(self._sharding, self._batch_size)
        total: Any = None
        with eval_batches(
            self._dataset, batch_size=self._batch_size, rows=rows, **self._loader
        ) as host_batches:
            for batch in device_batches(host_batches, self._sharding, batch_size=self._batch_size):
                values = self._eval_step(params, batch)
                total = values if total is None else self._merge(total, values)
        total = jax.device_get(total)
        count = {int(value.count) for value in total.values()}
        if count != {self._dataset.num_examples}:
            raise RuntimeError(f"counted {count} examples of {self._dataset.num_examples}.")
        means = {name: float(value.compute()) for name, value in total.items()}
        return {**means, "num_examples": self._dataset.num_examples}
