"""LiT: trains a text tower to match a locked image tower (2111.07991); fine-tunes CLIP and SigLIP.

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

TEXT may also be the weights of two towers (CLIP, SigLIP, a result of this recipe): both are
fine-tuned with the loss, temperature, tokenizer and size that they were trained with, by FLYP's
recipe for ImageNet (2212.00638): crops of 0.9 to 1 of the area, AdamW at 1e-5 with decay 0.1, a
cosine after 500 updates of warm-up, batches of 512, 10 passes. One tower stays as it is with
--config.objective.lock_image=True or --config.optimizer.freeze='txt/.*|img/head/bias' (CLIP's
projections have no biases); --config.lora.rank=8 adapts both. VOCAB replaces the tokenizer beside
the weights. Recall is measured both ways on the split `test`, of all captions of an image, if a row
has one caption.

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

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from configs import quickstart
from configs.finetune import described, fine_tuning, is_weights
from vit_jax.config import evaluator, section, set_kind
from vit_jax.config import get_config as default_config
from vit_jax.data.ops import Normalize
from vit_jax.data.preprocess import parse
from vit_jax.data.sized import spell
from vit_jax.data.text import Tokenize
from vit_jax.errors import UserError
from vit_jax.models.create import get_variant

STEPS, RATE = 5_000, 1e-3
# Biases of the projections: what is trained goes back to transformers' CLIPModel.
CLIP_HAS_NONE = "(img|txt)/head/bias"


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
    if is_weights(variant):
        return from_weights(variant, table, vocab)
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


def from_weights(source: str, table: str, vocab: str) -> ConfigDict:
    (images, pair), (texts, _) = described(source), described(f"{source}#txt")
    if pair is None:
        raise UserError(f"configs/lit.py:{source} has no temperature (logit_scale, or t).")
    config = fine_tuning(f"{source}#txt")
    config.pretrained.reset_head = False
    set_kind(config, "objective", "contrastive" if pair.bias is None else "sigmoid_contrastive")
    config.objective.update(image=source, lock_image=False, temperature=pair.scale)
    set_kind(config, "optimizer", "adamw")
    config.optimizer.update(weight_decay=0.1, clip_norm=1.0)
    if pair.bias is None:
        config.optimizer.freeze = CLIP_HAS_NONE
    else:
        config.objective.bias = pair.bias
    tokenize = _tokenizer(texts.eval_preprocess, vocab, texts.image_shape[0])
    if not tokenize:
        raise UserError(
            f"configs/lit.py:{source} has no tokenizer beside the weights; put its tokenizer.json "
            f"there, or give the vocabulary: configs/lit.py:{source},{table},VOCAB."
        )
    # Pixels from -1 to 1; the objective turns them into what the tower takes.
    ops = [op for op in parse(images.eval_preprocess).ops if not isinstance(op, Normalize)]
    ops = [op for op in ops if not op.columns]  # a run's have both
    side = images.image_shape[0]
    crop = f"random_resized_crop({side}, area=(0.9, 1.0), method='pillow_bicubic')"
    config.dataset.update(name=table, batch_size=512)
    config.dataset.preprocess = f"decode|{crop}|{tokenize}"
    config.dataset.eval_preprocess = f"{spell(ops)}|{tokenize}"
    config.duration.epochs = 10.0
    config.schedule.update(learning_rate=1e-5, warmup_steps=500)
    with config.unlocked():
        config.evaluators.retrieval = evaluator("test", "retrieval")
    return config


def _tokenizer(spec: str, vocab: str, length: int) -> str:
    """The tokenizer among these ops, with another vocabulary if one is given; "" without any."""
    ops: list[Any] = [op for op in (parse(spec).ops if spec else ()) if op.columns]
    if vocab:
        ops = [dataclasses.replace(op, vocab=vocab) for op in ops]
        ops = ops or [Tokenize("caption", vocab, length)]
    return spell(ops)


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
