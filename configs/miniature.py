"""The paper's experiments in miniature (2010.11929): half an hour on two cores.

scripts/miniature.py runs them all; one by one:

    python scripts/train.py --config=configs/miniature.py:pretrain/vit_seed0 --workdir=/tmp/vit
    python scripts/finetune.py --config=configs/miniature.py:digits/vit_seed0 \\
        --config.pretrained.source=/tmp/vit --workdir=/tmp/digits

The argument is a run, STAGE/VARIANT_seedN. The stages:

  pretrain  letters and digits drawn at 12x12 pixels, as in configs/quickstart.py: 350 updates of
            128 images, whatever the size of the set; at the end 5-shot accuracy on both others
  digits    fine-tuning on the first 300 handwritten scans, at 12x12 pixels; measured on 1,197
            others (the last 300 of them by other writers)
  letters   harder: 40 Greek and Cyrillic letters that look like none of pre-training, 10 images
            of each, in the typefaces of DejaVu; measured on 1,000 in STIX

VARIANTS differ from `vit`: 4 layers of width 64, MLPs of 128, patches of 4. `vit_n500` is `vit`
pre-trained on 500 images, `vit_px24` fine-tuned at 24x24 pixels.

Adam with weight decay, in fine-tuning too, where the paper has SGD. Rates of pre-training are the
best by upstream accuracy, of 2e-3, 5e-3 and 1e-2 for `vit` and `bit`, and of 0.03, 0.1 and 0.3 for
`bit_sgd`; those of fine-tuning by scripts/sweep.py on held-out examples, of 1e-3, 3e-3 and 1e-2
(letters) and of 3e-4, 1e-3 and 3e-3 (digits), for `vit` and `bit`. Hybrids have the ViT's.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from configs import quickstart
from vit_jax.config import evaluator, set_kind
from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.models.create import create_model
from vit_jax.models.flops import TRAIN_OVER_FORWARD, forward_flops

EXAMPLES = 50_000  # to pre-train on, if a variant does not say; others: 10 and 100 per class
METRICS = {  # percent: the stage and its metric
    "digits, fine-tuned": ("digits", "test/accuracy"),
    "digits, 5-shot": ("pretrain", "digits/accuracy_5shot"),
    "letters, fine-tuned": ("letters", "test/accuracy"),
    "letters, 5-shot": ("pretrain", "letters/accuracy_5shot"),
}
LETTERS = "glyphs(size={pixels}, num_examples=1400, num_test=1000, alphabet='greek_cyrillic')"

BIT = {"name": "bit", "resnet_layers": (2,), "schedule.learning_rate": 1e-2}
# The stem of a ResNet, whose cells of 4x4 pixels are the patches, as in R+Ti/16.
HYBRID = {"resnet_layers": (), "patch_size": 1}
DECODER = {"hidden_size": 64, "num_layers": 1, "mlp_dim": 128, "num_heads": 4}
LOW = {"schedule.learning_rate": 2e-3}  # for 5e-3, as 3e-4 for 8e-4 in figure 9
GAP = {"classifier": "gap"}

# What differs from `vit`: attributes of the model, and other keys in pre-training only.
VARIANTS: dict[str, dict[str, Any]] = {
    "vit": {},
    "bit": BIT,
    "hybrid": HYBRID,
    # Figure 5: half and twice the operations of each kind. Appendix D.2: others change one size.
    **{f"vit_depth{layers}": {"num_layers": layers} for layers in (2, 8)},
    "bit_s": {**BIT, "resnet_layers": (1,)},
    "bit_l": {**BIT, "resnet_layers": (1, 1)},
    "hybrid_s": {**HYBRID, "num_layers": 2},
    "hybrid_l": {**HYBRID, "num_layers": 8},
    **{f"vit_width{width}": {"hidden_size": width, "mlp_dim": 2 * width} for width in (32, 96)},
    **{f"vit_patch{pixels}": {"patch_size": pixels} for pixels in (6, 3)},
    # Table 8.
    "vit_none": {"position_embedding": "none"},
    "vit_2d": {"position_embedding": "learned2d"},
    "vit_relative": {"position_embedding": "relative"},
    # Appendix D.3.
    "vit_low": LOW,
    "vit_gap": GAP,
    "vit_gap_low": {**GAP, **LOW},
    # Section 4.6; masked autoencoders are later, 2111.06377.
    "vit_masked": {
        **LOW,
        "objective.name": "masked_patch",
        "objective.target": "pixels",  # of grey patches the mean colour has 8 classes only
        "model.classifier": "token_unpooled",
        "evaluators.digits.feature": "gap",
        "evaluators.letters.feature": "gap",
    },
    "vit_mae": {
        **LOW,
        "model.name": "mae",
        **{f"model.decoder_{key}": value for key, value in DECODER.items()},
        "objective.name": "mae",
    },
    "vit_scratch": {},  # without pre-training
    # Table 7; decay and momentum of configs/bit.py.
    "bit_sgd": {
        **BIT,
        "optimizer.name": "sgd",
        "optimizer.weight_decay": 1e-3,
        "schedule.learning_rate": 0.3,
    },
}


class Experiment(NamedTuple):
    """Figures or tables of the paper, and what it claims."""

    title: str  # with the section or appendix of 2010.11929
    variants: str
    claims: str  # a line each, `first > second: words` or `first = second: words`
    x: str = ""  # of the plot: `examples` or `operations` of pre-training; "": a place per variant


EXPERIMENTS: dict[str, Experiment] = {
    "data": Experiment(
        "Size of the pre-training set (4.3, figures 3 and 4)",
        " ".join(f"{kind}_n500 {kind}_n5000 {kind}" for kind in ("vit", "bit", "hybrid")),
        """bit_n500 > vit_n500: with the smallest set the ResNet is better
        vit > bit: with the largest set the ViT is better
        vit > vit_n500: a ViT gains from a larger set""",
        "examples",
    ),
    "compute": Experiment(
        "Pre-training compute (4.4, figure 5)",
        "vit_depth2 vit vit_depth8 bit_l bit bit_s hybrid_s hybrid hybrid_l",
        """vit_depth2 > bit_s: for the same operations a ViT is better than a ResNet (small)
        vit > bit: the same, medium
        vit_depth8 > bit_l: the same, large
        hybrid_s > vit_depth2: hybrids are better than ViTs at small budgets
        vit_depth8 = hybrid_l: and no longer at large ones""",
        "operations",
    ),
    "positions": Experiment(
        "Position embeddings (D.4, table 8)",
        "vit_none vit vit_2d vit_relative",
        """vit > vit_none: positions help (1-D)
        vit_2d > vit_none: the same, 2-D
        vit_relative > vit_none: the same, relative
        vit = vit_2d: 1-D and 2-D are alike
        vit = vit_relative: 1-D and relative are alike""",
    ),
    "shape": Experiment(
        "Depth, width and patch (D.2, figure 8)",
        "vit vit_depth2 vit_depth8 vit_width32 vit_width96 vit_patch6 vit_patch3",
        """vit_depth8 > vit_depth2: depth helps
        vit_patch3 > vit_patch6: smaller patches help
        vit_depth8 > vit_width96: depth helps more than width""",
    ),
    "head": Experiment(
        "Class token or global average pooling (D.3, figure 9)",
        "vit vit_low vit_gap vit_gap_low",
        """vit_gap_low > vit_gap: GAP needs a lower rate than the token
        vit = vit_gap_low: each at its rate, they are alike""",
    ),
    "resolution": Experiment(
        "Fine-tuning resolution (3.2)",
        "vit vit_px16 vit_px24",
        """vit_px16 > vit: a third more pixels per side help
        vit_px24 > vit: twice as many help""",
    ),
    "task": Experiment(
        "Pre-training task (4.6)",
        "vit vit_masked vit_mae vit_scratch",
        """vit > vit_scratch: pre-training helps
        vit > vit_masked: supervision is better than predicting patches
        vit_masked > vit_scratch: which is better than no pre-training
        vit_mae > vit_scratch: so are masked autoencoders (2111.06377)""",
    ),
    "optimizer": Experiment(
        "Optimizer of a ResNet's pre-training (D.1, table 7)",
        "bit bit_sgd",
        "bit > bit_sgd: Adam is better than SGD",
    ),
    "distance": Experiment(
        "Attention distance by layer (4.5 and D.7, figures 7 and 11)",
        "vit_px24 hybrid_px24",
        """vit_px24/4 > vit_px24/1: the last layer attends farther than the first
        hybrid_px24/1 > vit_px24/1: a hybrid's first layer is less local than a ViT's""",
    ),
}


def parse(run: str, stages: Mapping[str, str], variants: Iterable[str]) -> tuple[str, ...]:
    """Stage, variant, number of images, pixels and seed of a run; UserError if there is none.

    `stages`: what a variant may end in, such as "n px" for `vit_n500_px24`.
    """
    allowed = stages.get(stage := run.partition("/")[0], "")
    sizes = "".join(rf"(?:_{key}(\d+))?" if key in allowed else "()" for key in ("n", "px"))
    match = re.fullmatch(rf"(\w+)/(.+?){sizes}_seed(\d+)", run)
    if match is None or stage not in stages:
        example = f"such as {next(iter(stages))}/vit_seed0; stages: {', '.join(stages)}"
        raise UserError(f"{run} must be STAGE/VARIANT_seedN, {example}.")
    check_known("VARIANT", match[2], variants)
    return match.groups(default="")


def runs(variant: str, seed: int) -> list[str]:
    """The runs of a variant, each after the one that it starts from."""
    base = variant.partition("_px")[0]
    first = [] if base == "vit_scratch" else [f"pretrain/{base}_seed{seed}"]
    return [*first, f"digits/{variant}_seed{seed}", f"letters/{variant}_seed{seed}"]


def get_config(argument: str = "pretrain/vit_seed0") -> ConfigDict:
    stages = {"pretrain": "n", "digits": "n px", "letters": "n px"}
    stage, name, size, pixels, seed = parse(argument, stages, VARIANTS)
    if stage == "pretrain":
        config = _pretrain(int(size or EXAMPLES))
    else:
        config = _finetune(stage, int(pixels or quickstart.PRETRAIN_PIXELS))
        config.schedule.learning_rate = 1e-2 if (stage, name[:3]) == ("letters", "bit") else 3e-3
    config.checkpoint.every_steps = 1000  # only the last: runs are shorter than their restarts
    return vary(config, VARIANTS[name], int(seed), stage == "pretrain")


def vary(config: ConfigDict, variant: dict[str, Any], seed: int, is_upstream: bool) -> ConfigDict:
    """The config of a variant from that of `vit`."""
    config.model.hidden_size, config.model.mlp_dim = 64, 128
    overrides = {f"model.{key}": value for key, value in variant.items() if "." not in key}
    overrides |= {key: value for key, value in variant.items() if "." in key and is_upstream}
    for key, value in overrides.items():
        section, _, last = key.rpartition(".")
        if last == "name":
            set_kind(config, section, value, overrides)
        else:
            config.update_from_flattened_dict({key: value})
    config.seed, config.log.tensorboard = seed, False
    return config


def operations(variant: str) -> float:
    """Of the pre-training: three times those of a forward pass, per image."""
    config, pixels = get_config(f"pretrain/{variant}_seed0"), quickstart.PRETRAIN_PIXELS
    model = create_model(**config.model, num_classes=50)
    images = jnp.zeros((1, pixels, pixels, 1))
    forward = functools.partial(model.apply, train=False)
    params = jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), images)
    images_seen = config.duration.steps * config.dataset.batch_size
    return TRAIN_OVER_FORWARD * forward_flops(forward, params, images) * images_seen


def _pretrain(num_examples: int) -> ConfigDict:
    config = quickstart.get_config("pretrain")
    pixels = quickstart.PRETRAIN_PIXELS
    config.dataset.name = f"glyphs(size={pixels}, num_examples={num_examples}, num_test=1000)"
    config.duration.steps = 350
    config.schedule.warmup_steps, config.schedule.learning_rate = 50, 5e-3
    letters = LETTERS.format(pixels=pixels)
    probe = functools.partial(evaluator, name="few_shot", shots=(5,))
    with config.unlocked():
        config.evaluators.digits = probe("train[300:]", dataset="digits", train_split="train[:300]")
        config.evaluators.letters = probe("test", dataset=letters, train_split="train[:400]")
    return config


def _finetune(stage: str, pixels: int) -> ConfigDict:
    config = quickstart.get_config("finetune")
    for key in ("preprocess", "eval_preprocess"):
        chain = config.dataset[key]
        config.dataset[key] = chain.replace(f"({quickstart.FINETUNE_PIXELS})", f"({pixels})")
    config.evaluators.test.update(at_start=False, split="train[600:]+test")
    if stage == "letters":
        config.dataset.name = LETTERS.format(pixels=pixels)
        config.dataset.split = config.sweep.train_split = "train[:400]"
        config.sweep.validation_split = "train[400:]"
        config.evaluators.test.split = "test"
    with config.unlocked():
        del config.evaluators["validation"]
    config.duration.steps = 120
    config.schedule.warmup_steps = 15
    return config
