"""Trains and evaluates a model from a recipe.

    python scripts/train.py --config=configs/quickstart.py --workdir=/tmp/quickstart

The same command resumes an interrupted run.
"""

from absl import flags

from vit_jax import launch


def run(config, workdir):
    from vit_jax.train import train_and_evaluate

    train_and_evaluate(config, workdir, resume=flags.FLAGS.resume)


if __name__ == "__main__":
    launch.main(run, doc=__doc__)
