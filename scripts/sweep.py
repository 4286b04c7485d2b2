"""Chooses the learning rate on held-out data, then trains on all of it with several seeds.

    python scripts/sweep.py --config=configs/finetune.py:B/16,cifar10 \\
        --config.pretrained.source=B_16.npz --workdir=/tmp/cifar10_sweep

The candidates and the held-out part come from the recipe and can be overridden, as in
--config.sweep.learning_rates=0.01,0.03. Prints a table with mean and standard deviation over the
seeds next to the published number, and writes it to sweep.txt and sweep.json of the work directory.
The same command resumes. Besides the flags below:

  --seeds=3           final runs on all training data
  --num_tasks=1       jobs that share the work, each started with the same --workdir
  --task=I            index of this job, from 0 (default: SLURM_ARRAY_TASK_ID)
"""

import os

from absl import flags

from vit_jax import launch


def run(config, workdir):
    from vit_jax.sweep.run import run_sweep, task_number
    from vit_jax.train import train_and_evaluate

    given = flags.FLAGS
    run_sweep(
        config,
        workdir,
        train=train_and_evaluate,
        seeds=given.seeds,
        num_tasks=given.num_tasks,
        task=task_number(given.task, given.num_tasks, os.environ),
        resume=given.resume,
    )


if __name__ == "__main__":
    flags.DEFINE_integer("seeds", 3, "Final runs on all training data.", lower_bound=1)
    flags.DEFINE_integer("num_tasks", 1, "Jobs that share the work.", lower_bound=1)
    flags.DEFINE_integer("task", None, "Index of this job, from 0.")
    launch.main(run, doc=__doc__)
