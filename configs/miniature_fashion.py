"""The paper's experiments on Fashion-MNIST (2010.11929): at most four hours on two cores.

scripts/miniature.py runs them; docs/miniature.md has the protocol. One by one:

    python scripts/train.py --config=configs/miniature_fashion.py:upstream/vit_mae_seed0 \\
        --workdir=/tmp/mae
    python scripts/finetune.py --config=configs/miniature_fashion.py:fashion/vit_mae_n1000_seed0 \\
        --config.pretrained.source=/tmp/mae --workdir=/tmp/fashion

The argument is STAGE/VARIANT_seedN[,FOLDER]. `fashion` is training on 55,000 images, or on 1,000 of
them (_n1000), from scratch or from `upstream`: drawn letters and digits, or masks without labels.
`vit` has 4 layers of width 64, and 16 patches of 7 pixels.
"""

import functools

from ml_collections import ConfigDict

from configs import miniature, quickstart
from vit_jax.config import evaluator

FOLDER = "/usr/share/datasets/fashion-mnist"
EXAMPLES = 55_000  # to train on, if a variant does not say; the other 5,000 are for choices
METRICS = {"accuracy": ("fashion", "test/accuracy")}
METRICS |= {f"{n}-shot": ("upstream", f"fashion/accuracy_{n}shot") for n in (5, 10)}
SAME = "vit vit_mae vit_none vit_2d vit_relative vit_depth2 vit_depth8 vit_width32 vit_width96"
VARIANTS = {
    **{name: miniature.VARIANTS[name] for name in SAME.split()},
    **dict.fromkeys(("bit", "bit_glyphs"), miniature.VARIANTS["bit_s"]),
    "vit_glyphs": {},
    "hybrid": {"resnet_layers": (), "patch_size": 2},
    **{f"vit_patch{pixels}": {"patch_size": pixels} for pixels in (14, 4)},
}
# Of each kind, on train[55000:] after training on 3,000 images: docs/miniature.md.
RATES = {"vit": 5e-3, "bit": 4e-2, "hybrid": 2e-3}
UPSTREAM = {"vit_glyphs": 200_000, "bit_glyphs": 200_000, "vit_mae": 16 * EXAMPLES}  # images seen

SIZES = "{0}_n1000 {0}_n3000 {0}_n10000 {0}_n30000 {0} "
EXPERIMENTS = {
    "fashion_data": miniature.Experiment(
        "Fashion-MNIST: size of the training set (4.3, figures 3 and 4)",
        "".join(map(SIZES.format, ("vit", "bit", "hybrid"))),
        """bit_n1000 > vit_n1000: with the smallest set the ResNet is better
        vit > bit: with the largest set the ViT is better
        vit - vit_n1000 > bit - bit_n1000: a ViT gains more from a larger set
        hybrid_n1000 > vit_n1000: with the smallest set a hybrid is better than a ViT
        hybrid = vit: and no longer with the largest""",
        "examples",
    ),
    "fashion_start": miniature.Experiment(
        "Fashion-MNIST: pre-training (4.3 and 4.6, figure 4)",
        "".join(map(SIZES.format, ("vit", "vit_glyphs", "vit_mae")))
        + "bit_n1000 bit bit_glyphs_n1000 bit_glyphs",
        """vit_glyphs_n1000 > vit_n1000: pre-training on letters helps with few labels
        vit_mae_n1000 > vit_n1000: so do masked autoencoders (2111.06377)
        vit_glyphs_n1000 - vit_n1000 > vit_glyphs - vit: letters help less with all labels
        vit_mae_n1000 - vit_n1000 > vit_mae - vit: so do masked autoencoders
        vit_glyphs = vit: with all labels letters are like no pre-training
        vit_mae = vit: so are masked autoencoders
        vit_glyphs > vit_mae: supervision, here by letters, is better than masks (4.6)
        vit_glyphs_n1000 - vit_n1000 > bit_glyphs_n1000 - bit_n1000: letters help a ViT more
        vit_glyphs > bit_glyphs: pre-trained, the ViT is better""",
        "examples",
    ),
    "fashion_positions": miniature.EXPERIMENTS["positions"]._replace(
        title="Fashion-MNIST: position embeddings (D.4, table 8)"
    ),
    "fashion_shape": miniature.Experiment(
        "Fashion-MNIST: depth, width and patch (D.2, figure 8)",
        "vit vit_depth2 vit_depth8 vit_width32 vit_width96 vit_patch14 vit_patch4",
        """vit_depth8 > vit_depth2: depth helps
        vit_width96 > vit_width32: width helps
        vit_patch4 > vit_patch14: smaller patches help
        vit_depth8 > vit_width96: depth helps more than width""",
    ),
}


def runs(variant: str, seed: int) -> list[str]:
    """The runs of a variant, each after the one that it starts from."""
    name = variant.partition("_n")[0]
    first = [f"upstream/{name}_seed{seed}"] if name in UPSTREAM else []
    return [*first, f"fashion/{variant}_seed{seed}"]


def get_config(argument: str = "fashion/vit_seed0") -> ConfigDict:
    run, _, folder = argument.partition(",")
    known = UPSTREAM if run.startswith("upstream/") else VARIANTS
    stage, name, size, _, seed = miniature.parse(run, {"fashion": "n", "upstream": ""}, known)
    config, folder, count = quickstart.base(), folder or FOLDER, int(size or EXAMPLES)
    config.model.patch_size, config.optimizer.weight_decay = 7, 0.05
    # The stem of a hybrid leaves a grid of 8x8 to its patches of 2.
    chain = "decode(channels=1)|resize(32)" if name == "hybrid" else "decode(channels=1)"
    config.dataset.update(name=folder, split=f"train[:{count}]", batch_size=128)
    config.dataset.preprocess = config.dataset.eval_preprocess = chain
    if stage == "upstream":
        seen = UPSTREAM[name]
        if name != "vit_mae":
            config.dataset.update(name=f"glyphs(size=28, num_examples={seen})", split="train")
        few_shot = functools.partial(evaluator, name="few_shot", shots=(5, 10), dataset=folder)
        with config.unlocked():
            config.evaluators.fashion = few_shot("test", train_split="train[:1000]")
    else:
        config.dataset.preprocess = f"{chain}|random_affine(0, 0.07)|flip_lr"
        config.objective.label_smoothing = 0.1
        seen = round(5 * EXAMPLES * (count / EXAMPLES) ** (1 / 3))  # more passes over fewer
    config.duration.steps = steps = seen // config.dataset.batch_size
    miniature.vary(config, VARIANTS[name], int(seed), stage == "upstream")
    config.schedule.update(learning_rate=RATES[name.partition("_")[0]], warmup_steps=steps // 10)
    return config
