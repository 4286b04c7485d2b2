"""Chooses the learning rate on held-out data, then trains on all of it with several seeds.

    python scripts/sweep.py --config=configs/finetune.py:B/16,cifar10 \\
        --config.pretrained.source=B_16.npz --workdir=/tmp/cifar10_sweep

The candidates and the held-out part come from the recipe and can be overridden, as in
--config.sweep.learning_rates=0.01,0.03. Prints a table with mean and standard deviation over the
seeds next to the published number, and writes it to sweep.txt and sweep.json of the work directory.
The same command resumes.
"""

import functools
import os

from vit_jax import launch
from vit_jax.arguments import add_share, at_least


def run(arguments, watchdog):
    from vit_jax.sweep.run import run_sweep, task_number
    from vit_jax.train import train_and_evaluate

    run_sweep(
        arguments.config,
        arguments.workdir,
        train=functools.partial(train_and_evaluate, watchdog=watchdog),
        seeds=arguments.seeds,
        num_tasks=arguments.num_tasks,
        task=task_number(arguments.task, arguments.num_tasks, os.environ),
        resume=arguments.resume,
    )


def add_arguments(parser):
    parser.add_argument("--seeds", type=at_least(1), default=3, help="final runs (default 3)")
    add_share(parser)


if __name__ == "__main__":
    launch.main(run, __doc__, add_arguments)
