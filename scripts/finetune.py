"""Fine-tunes pre-trained parameters: new zero head, position embeddings interpolated.

    python scripts/finetune.py --config=configs/finetune.py:B/16,cifar10 \\
        --config.pretrained.path=B_16.npz --workdir=/tmp/cifar10

The path is an .npz file, a work directory of scripts/train.py, or one of its checkpoints. The same
loop as scripts/train.py, which this script calls once it knows that there is something to start
from.
"""

from absl import flags

from vit_jax import launch
from vit_jax.errors import UserError


def run(config, workdir):
    from vit_jax.train import train_and_evaluate

    if not config.pretrained.path:
        raise UserError(
            "--config.pretrained.path is missing: fine-tuning starts from an .npz file or a work "
            "directory (scripts/train.py trains from scratch)."
        )
    train_and_evaluate(config, workdir, resume=flags.FLAGS.resume)


if __name__ == "__main__":
    launch.main(run, doc=__doc__, default_config=None)
