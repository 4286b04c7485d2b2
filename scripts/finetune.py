"""Fine-tunes pre-trained parameters: new zero head, position embeddings interpolated.

    python scripts/finetune.py --config=configs/finetune.py:B/16,cifar10 \\
        --config.pretrained.source=B_16.npz --workdir=/tmp/cifar10

The source is a file or folder of any known format (.npz of Google's code, big_vision, timm, Hugging
Face), a work directory of scripts/train.py, gs://, https://, hf://owner/name, or a name from
`scripts/zoo.py list`. After checking that there is a source, this script runs
scripts/train.py.
"""

from vit_jax import launch
from vit_jax.errors import UserError


def run(arguments, watchdog):
    from vit_jax.train import train_and_evaluate

    if not arguments.config.pretrained.source:
        raise UserError(
            "--config.pretrained.source is missing: fine-tuning starts from a weight file, a work "
            "directory or a name from scripts/zoo.py list (scripts/train.py trains from scratch)."
        )
    train_and_evaluate(
        arguments.config, arguments.workdir, resume=arguments.resume, watchdog=watchdog
    )


if __name__ == "__main__":
    launch.main(run, __doc__)
