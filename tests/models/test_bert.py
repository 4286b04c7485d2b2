"""BERT against Hugging Face's, and LiT's published two-tower files that hold one."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.peers import import_transformers
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.files.paths import write_arrays
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model
from vit_jax.models.later.bert import BLOCKS
from vit_jax.parameters.table import abstract_params, table_of
from vit_jax.trees import count_parameters, flatten_names, unflatten_names

TINY: dict[str, Any] = {"name": "bert", "num_classes": 0, "vocab_size": 50, "hidden_size": 128}
TINY |= {"num_layers": 2, "mlp_dim": 96, "max_length": 12}
TEXTS = np.random.default_rng(0).integers(1, 50, (3, 9)).astype(np.int32)
TEXTS[0, 5:] = 0
PARTS = {  # names of Hugging Face
    "attention_block/attention_layer/query": "attention.self.query",
    "attention_block/attention_layer/key": "attention.self.key",
    "attention_block/attention_layer/value": "attention.self.value",
    "attention_block/dense_layer": "attention.output.dense",
    "attention_block/layer_norm": "attention.output.LayerNorm",
    "mlp_block/mlp/dense_layer": "intermediate.dense",
    "mlp_block/dense_layer": "output.dense",
    "mlp_block/layer_norm": "output.LayerNorm",
}


def hugging_face(params: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """By the names and in the shapes of Hugging Face."""
    encoder, layers = "BertEncoder_0", BLOCKS.removesuffix("layers")
    table = {f"{encoder}/layer_norm": "embeddings.LayerNorm"}
    for ours, word in (("token", "word"), ("position", "position"), ("segment", "token_type")):
        table[f"{encoder}/embedder/embedders_{ours}_ids"] = f"embeddings.{word}_embeddings"
    for i in range(TINY["num_layers"]):
        for ours, name in PARTS.items():
            table[f"{layers}layers_{i}/{ours}"] = f"encoder.layer.{i}.{name}"
    tensors = {}
    for name, array in params.items():
        folder, _, leaf = name.rpartition("/")
        ending = "bias" if leaf == "bias" else "weight"
        array = array.T if leaf == "kernel" else array
        tensors[f"{table[folder]}.{ending}"] = torch.tensor(np.array(array))
    return tensors


def test_numbers_of_hugging_face() -> None:
    """1e-5: noise of float32 after two layers; padding is at other places in each text."""
    model = create_model(**TINY, gelu="exact")
    params = weights.seeded(model, TEXTS.shape[1:])
    transformers = import_transformers()
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        hidden_act="gelu",
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    peer = transformers.BertModel(config, add_pooling_layer=False).eval()
    missing, unexpected = peer.load_state_dict(hugging_face(params), strict=False)
    assert not unexpected
    assert all("position_ids" in name for name in missing)
    tokens = torch.tensor(TEXTS.astype(np.int64))
    with torch.no_grad():
        expected = peer(tokens, attention_mask=(tokens != 0).long()).last_hidden_state[:, 0]
    outputs = applied(model, {"params": unflatten_names(params)})
    assert outputs.std() > 0.1
    np.testing.assert_allclose(outputs, expected.numpy(), rtol=0, atol=1e-5)


def applied(model: Any, params: Any) -> jax.Array:
    return jax.jit(lambda p: model.apply(p, TEXTS, train=False))(params)


def test_one_loop_and_recomputation_change_no_number() -> None:
    model = create_model(**TINY)
    tree = {"params": unflatten_names(weights.seeded(model, TEXTS.shape[1:]))}
    stacked = {"params": table_of("bert").stack(tree["params"])}
    looped = create_model(**TINY, scan=True, remat="full")
    np.testing.assert_allclose(applied(looped, stacked), applied(model, tree), atol=1e-6)
    apart, together = (
        jax.jit(jax.grad(lambda p, m=m: jnp.sum(m.apply(p, TEXTS, train=False) ** 3)))(tree)
        for m in (model, create_model(**TINY, remat="dots"))
    )
    for one, other in zip(jax.tree.leaves(apart), jax.tree.leaves(together), strict=True):
        # Up to 170, sums of float32 in two orders: some 20 units in the last place.
        np.testing.assert_allclose(one, other, rtol=3e-6, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "count"), [("BERT-base", 108_891_648), ("BERT-large", 334_092_288)]
)
def test_parameter_counts(variant: str, count: int) -> None:
    """Those of the original without its pooler: of 109,482,240 and 335,141,888."""
    model = create_model(variant, num_classes=0, scan=True)
    assert count_parameters(abstract_params(model, (16,))) == count


def test_the_text_tower_of_a_published_file(tmp_path: Path) -> None:
    """As LiT-B16B.npz: both towers below `params`, a head above the first token."""
    image = weights.seeded(weights.module_of("mu/8", num_classes=6), (16, 16, 3))
    bert = create_model(**{**TINY, "num_classes": 6})
    text = weights.seeded(bert, TEXTS.shape[1:])
    arrays = {f"params/img/{name}": array for name, array in image.items()}
    arrays |= {f"params/txt/{name}": array for name, array in text.items()}
    arrays["params/t"] = np.full(1, np.log(10.0), np.float32)
    path = write_arrays(tmp_path / "LiT-B16B.npz", arrays)
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", *"adcgot", "##at", "##og"]))
    tokenize = f"tokenize('caption', vocab={str(vocab)!r}, length=9)"
    model = load_model(f"{path}#txt", preprocess=tokenize)
    assert {**TINY, "num_classes": 6, "gelu": "tanh"}.items() <= model.description.model.items()
    weights.assert_same(flatten_names(model.params), text)
    expected = applied(bert, {"params": unflatten_names(text)})
    np.testing.assert_allclose(model.features(TEXTS, "logits"), expected, atol=1e-5)

    tokens = model.preprocess(["A dog"])
    assert tokens.tolist() == [[2, 3, 4, 10, 0, 0, 0, 0, 0]]
    photos = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    images = load_model(f"{path}#img")
    classes = images.with_classes(["cat", "dog"], ["a {}"], model)
    units = [images.logits(photos), model.features(["a cat", "a dog"], "logits")]
    units = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in units]
    np.testing.assert_allclose(classes.logits(photos), 10 * units[0] @ units[1].T, rtol=1e-4)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(UserError, match="hidden_size=100 is not a multiple of 64"):
        create_model(**{**TINY, "hidden_size": 100})
    model = create_model(**TINY)
    with pytest.raises(UserError, match="texts of 13 tokens exceed model.max_length=12"):
        abstract_params(model, (13,))
