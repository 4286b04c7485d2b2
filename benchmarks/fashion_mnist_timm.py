"""timm's ViT of the size of configs/fashion_mnist.py:cpu, trained on Fashion-MNIST by timm's parts.

    python benchmarks/fashion_mnist_timm.py --passes=25

Model, data augmentation, mixup, optimiser, schedule and loss are timm's, with the values of DeiT
(2012.12877, table 9), the recipe of its plain ViTs. As DeiT does for small images, a crop is of the
picture with a margin of 4 pixels. RandAugment has the same magnitude each time: timm's variation
fails with Pillow 12. --light leaves out RandAugment, mixup, CutMix, erasing and
stochastic depth, which a small model in a few passes has no use for. Prints the accuracy on the
test images, or --held_out on train[55000:], and the time. Needs the extra `peers`.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

from vit_jax import ROOT, arguments, launch

sys.path.append(str(ROOT))

from benchmarks.peers import import_timm, timm_model
from configs import fashion_mnist
from vit_jax.data.idx import read_idx

BATCH_SIZE, MARGIN = 128, 4
AUGMENTED = {"auto_augment": "rand-m9-inc1", "re_prob": 0.25, "re_mode": "pixel"}
MIXED = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}
SMOOTHING, DROP_PATH = 0.1, 0.1


class Pictures:
    """A data set of PyTorch: images [N, 28, 28] through a transform of PIL's."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, transform: Any):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        image = Image.fromarray(self.images[index]).convert("RGB")
        return self.transform(image), int(self.labels[index])


Labelled = tuple[np.ndarray, np.ndarray]


def read(folder: str, held_out: bool) -> tuple[Labelled, Labelled]:
    """Images and labels to train on, and to measure on."""

    def split(name: str) -> Labelled:
        files = (f"{folder}/{name}-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1"))
        images, labels = map(read_idx, files)
        return images, labels

    images, labels = split("train")
    if held_out:
        return (images[:55_000], labels[:55_000]), (images[55_000:], labels[55_000:])
    return (images, labels), split("t10k")


def main(options: argparse.Namespace) -> None:
    import_timm()
    import timm.loss
    import timm.optim
    import timm.scheduler
    import torch
    from timm.data import Mixup, create_transform
    from timm.data.transforms import RandomCropOrPad

    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    train, test = read(options.folder, options.held_out)
    augmented = {} if options.light else AUGMENTED
    transform = create_transform(28, is_training=True, color_jitter=None, **augmented)
    transform.transforms[0] = RandomCropOrPad(28)
    plain = create_transform(28, crop_pct=1.0)
    images, labels = train
    padded = np.pad(images, [(0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN)])
    batches = torch.utils.data.DataLoader(
        Pictures(padded, labels, transform),
        BATCH_SIZE,
        shuffle=True,
        num_workers=options.workers,
        drop_last=True,
    )
    sizes = fashion_mnist.get_config("cpu").model
    drop_path = 0.0 if options.light else DROP_PATH
    model = timm_model(sizes, (28, 28), 10, global_pool="avg", drop_path_rate=drop_path)
    optimizer = timm.optim.create_optimizer_v2(
        model, "adamw", lr=options.learning_rate, weight_decay=0.05
    )
    steps = round(options.passes * len(batches))
    schedule = timm.scheduler.CosineLRScheduler(
        optimizer,
        t_initial=steps,
        warmup_t=steps // 20,
        warmup_lr_init=1e-6,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    mixup = Mixup(**MIXED, label_smoothing=SMOOTHING, num_classes=10)
    soft = timm.loss.SoftTargetCrossEntropy()
    smoothed = torch.nn.CrossEntropyLoss(label_smoothing=SMOOTHING)
    started, step = time.monotonic(), 0
    while step < steps:
        for images, labels in batches:
            if not options.light:
                images, labels = mixup(images, labels)
            loss = (smoothed if options.light else soft)(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            schedule.step_update(step)
            if step % 500 == 0:
                print(f"step {step}/{steps}, {time.monotonic() - started:.0f} s", file=sys.stderr)
            if step == steps:
                break
    minutes = (time.monotonic() - started) / 60
    model.eval()
    with torch.no_grad():
        pictures = Pictures(*test, plain)
        logits = [model(images) for images, _ in torch.utils.data.DataLoader(pictures, 500)]
    correct = torch.cat(logits).argmax(1).numpy() == test[1]
    recipe = "light" if options.light else "DeiT's"
    print(f"{recipe}, seed {options.seed}: {100 * correct.mean():.2f} % in {minutes:.1f} minutes")


def parser() -> argparse.ArgumentParser:
    result = arguments.create_parser(__doc__)
    add = result.add_argument
    add("--folder", default=fashion_mnist.FOLDER, help=f"default: {fashion_mnist.FOLDER}")
    add("--passes", type=float, default=25.0, help="over the training images (default: 25)")
    add("--learning_rate", type=float, default=5e-4, help="default: 5e-4")
    add("--seed", type=int, default=0, help="default: 0")
    add("--threads", type=arguments.at_least(1), default=2, help="of PyTorch (default: 2)")
    add("--workers", type=int, default=1, help="processes that read images (default: 1)")
    add("--held_out", action="store_true", help="train on the first 55,000, measure on the others")
    add("--light", action="store_true", help="flips and crops only")
    return result


if __name__ == "__main__":
    with launch.one_line_errors():
        main(parser().parse_args())
