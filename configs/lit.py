"""LiT: trains a text tower to match a locked image tower (2111.07991).

    python scripts/train.py --config=configs/lit.py:text-B,captions.csv --workdir=/tmp/lit \\
        --config.objective.image=augreg:B/16,ds=i21k

    ./scripts/quickstart.sh
    python scripts/train.py --config=configs/lit.py:quickstart \\
        --config.objective.image=runs/quickstart/pretrain --workdir=/tmp/lit

The argument is TEXT,TABLE[,VOCAB]: TEXT is a variant of a text tower (text-Ti to text-L, BERT-base,
BERT-large); TABLE is a CSV or Parquet file with the columns `path` and `caption` (see
vit_jax/data/table.py), with a split `test` or a fifth of its rows; VOCAB is a WordPiece `vocab.txt`
or a SentencePiece `.model`, by default ASCII characters (set --config.model.vocab_size to its
size). Or it is `quickstart`: the drawn letters of configs/quickstart.py with their names, a minute
on two cores.

`objective.image` is whatever --config.pretrained.source takes, any kind of model, with its own
normalisation; it is frozen, not in checkpoints, and written with the result. Both towers
load: `/tmp/lit` (or `/tmp/lit#img`) and `/tmp/lit#txt`. --config.objective.lock_image=False trains
it too; a variant such as B/16 in its place starts from random weights (CLIP, SigLIP).
--config.objective.name=sigmoid_contrastive is SigLIP's loss (2303.15343).

Batches of 4096 (the loss is that of the global batch; train_step.accumulation_steps saves memory
without changing it), 5,000 steps, Adam, rate 0.001, 3 % of warm-up, cosine, clipping at norm 1,
temperature 10, weight decay 10: big_vision's demonstration on COCO (its lit_coco.py; its 0.01 is
not multiplied by the learning rate). Published for LiT-B16B and LiT-L16L, trained on billions of
pairs: 72.1 and 75.7 % zero-shot on ImageNet. We trained none of these.
"""

from ml_collections import ConfigDict

from configs import quickstart
from vit_jax.config import evaluator, section, set_kind
from vit_jax.config import get_config as default_config
from vit_jax.errors import UserError
from vit_jax.models.create import get_variant

STEPS, RATE = 5_000, 1e-3


def get_config(argument: str = "text-B,captions.csv") -> ConfigDict:
    if argument == "quickstart":
        return small()
    variant, _, rest = argument.partition(",")
    table, _, vocab = rest.partition(",")
    if not table:
        raise UserError(
            f"configs/lit.py:{argument} must be TEXT,TABLE[,VOCAB], such as "
            "text-B,captions.csv,vocab.txt, or quickstart."
        )
    config = default_config()
    config.model = section("model", **get_variant(variant))
    config.model.dtype = "bfloat16"
    tokenize = f"tokenize('caption', vocab={vocab or 'characters'!r}, length=16)"
    config.dataset.name = table
    config.dataset.batch_size = 4096
    config.dataset.preprocess = f"official_train(224)|randaug(2, 10)|{tokenize}"
    config.dataset.eval_preprocess = f"decode|resize(224)|{tokenize}"
    config.duration.steps = STEPS
    _contrast(config)
    config.schedule.warmup_steps = 3 * STEPS // 100
    config.optimizer.weight_decay = 0.01 / RATE
    config.optimizer.clip_norm = 1.0
    config.evaluators.test.every_steps = 500
    config.loader.num_workers = 8
    config.loader.num_threads = 4
    config.loader.prefetch = 1
    return config


def _contrast(config: ConfigDict) -> None:
    set_kind(config, "objective", "contrastive")
    config.schedule.learning_rate = RATE


def small() -> ConfigDict:
    config = quickstart.get_config("pretrain")
    images = config.dataset.preprocess
    sizes = {"hidden_size": 64, "num_layers": 2, "mlp_dim": 128, "num_heads": 4}
    config.model = section("model", "text", **sizes, vocab_size=98)
    _contrast(config)
    for key in ("preprocess", "eval_preprocess"):
        config.dataset[key] = f"{images}|tokenize('caption', vocab='characters', length=4)"
    config.duration.steps = 600
    with config.unlocked():
        config.evaluators.zero_shot = evaluator(
            "test", "zero_shot", prompts=("{}",), preprocess=images
        )
    return config
