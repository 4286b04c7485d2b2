"""Trains and evaluates a model from a recipe.

    python scripts/train.py --config=configs/quickstart.py --workdir=/tmp/quickstart

The same command resumes an interrupted run.
"""

from vit_jax import launch


def run(arguments, watchdog):
    from vit_jax.train import train_and_evaluate

    train_and_evaluate(
        arguments.config, arguments.workdir, resume=arguments.resume, watchdog=watchdog
    )


if __name__ == "__main__":
    launch.main(run, __doc__)
