"""The text tower against big_vision's numbers, and the two forms of its blocks beside a ViT's."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests import golden
from vit_jax.errors import UserError
from vit_jax.models.create import VARIANTS, VARIANTS_OF, create_model, family_of, recognise
from vit_jax.parameters.groups import layer_factors
from vit_jax.parameters.sharding import create_mesh, parameter_spec
from vit_jax.parameters.table import ParameterTable, table_of
from vit_jax.trees import count_parameters, flatten_names

TINY: dict[str, Any] = {"name": "text", "num_classes": 12, "vocab_size": 50, "hidden_size": 24}
TINY |= {"num_layers": 2, "mlp_dim": 40, "num_heads": 3}
TEXTS = np.random.default_rng(0).integers(0, 50, (3, 7)).astype(np.int32)
TEXT = table_of("text")
POOLINGS = ("last", "first", "gap", "max", "map")


@functools.cache
def applied(model: Any) -> Any:
    return jax.jit(
        lambda p: model.apply({"params": p}, TEXTS, train=False, capture_intermediates=True)
    )


@functools.cache
def pooled() -> Any:
    """All poolings in one program, whose towers XLA computes once; as users compile."""
    models = {pooling: create_model(**TINY, pooling=pooling) for pooling in POOLINGS}
    return golden.jit(
        lambda params: {
            pooling: model.apply({"params": params[pooling]}, TEXTS, train=False)
            for pooling, model in models.items()
        }
    )


@pytest.mark.parametrize("recipe", golden.RECIPES)
def test_numbers_of_big_vision(recipe: str) -> None:
    """Their `text_transformer` (0127fb6) of this size, with these parameters, eagerly.

    Eagerly ours is bitwise equal; 1e-5 is the noise of fusions.
    """
    with_map = golden.filled(create_model(**TINY, pooling="map"), TEXTS.shape, recipe)
    without = {name: tree for name, tree in with_map.items() if name != "MAPHead_0"}
    params = {**dict.fromkeys(POOLINGS, without), "map": with_map}
    for pooling, values in pooled()(params).items():
        expected = golden.arrays("bv_text")[f"{pooling}|{recipe}"]
        assert expected.std() > 0.02
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5, err_msg=pooling)


def test_the_order_of_blocks_in_a_scan() -> None:
    """With recomputation, as large towers are trained."""
    model = create_model(**TINY, pooling="map")
    params = golden.filled(model, TEXTS.shape)
    expected = applied(model)(params)[0]
    scanned = create_model(**TINY, pooling="map", scan=True, remat="full")
    stacked = TEXT.stack(params)
    assert golden.shapes(scanned, TEXTS.shape).keys() == flatten_names(stacked).keys()
    np.testing.assert_allclose(applied(scanned)(stacked)[0], expected, rtol=0, atol=1e-5)
    other = applied(scanned)(TEXT.stack(_swapped(params)))[0]
    assert np.abs(other - expected).max() > 1e-4


def _swapped(params: dict[str, Any]) -> dict[str, Any]:
    blocks = params["Encoder_0"]
    swapped = {
        "encoderblock_0": blocks["encoderblock_1"],
        "encoderblock_1": blocks["encoderblock_0"],
    }
    return {**params, "Encoder_0": {**blocks, **swapped}}


def test_parameter_counts() -> None:
    """Sums of the layers' sizes, for 16 tokens and an embedding as wide as they are."""
    for name in ("text-Ti", "text-So400m"):
        sizes = VARIANTS[name]
        model = create_model(**sizes, num_classes=sizes["hidden_size"], scan=True)
        d, m = sizes["hidden_size"], sizes["mlp_dim"]
        block = 4 * (d * d + d) + 2 * d * m + m + d + 4 * d
        expected = (32_000 + 16) * d + sizes["num_layers"] * block + 2 * d + d * d + d
        assert count_parameters(golden.abstract_params(model, (1, 16))) == expected
    assert {f"text-{size}" for size in ("Ti", "S", "B", "L", "So400m")} < set(VARIANTS_OF["text"])


def test_initialisation() -> None:
    model = create_model(**{**TINY, "num_layers": 1})
    init = jax.jit(functools.partial(model.init, train=False))
    params = jax.device_get(init(jax.random.key(0), TEXTS)["params"])
    assert 0.1 < np.std(params["pos_embedding"]) * 24**0.5 < 2
    assert 0.1 < np.std(params["head"]["kernel"]) * 24**0.5 < 2
    assert not np.any(params["head"]["bias"])


def test_two_towers_in_one_tree() -> None:
    """Below a prefix of its own, each is stacked, counted, scaled and sharded as if alone."""
    text = create_model(**TINY, pooling="map")
    image = create_model(**{**VARIANTS["mu/16"], "num_layers": 4}, num_classes=12)
    towers = {"txt": golden.filled(text, TEXTS.shape), "img": golden.filled(image, (1, 32, 32, 3))}
    assert recognise(flatten_names(towers["txt"])) == "text"
    assert recognise(flatten_names(towers["img"])) == "vit"
    table = ParameterTable({"txt": family_of(text), "img": family_of(image)})
    stacked = table.stack(towers)  # of two depths
    assert stacked["txt"]["Encoder_0"]["encoderblock"]["LayerNorm_0"]["bias"].shape == (2, 24)
    assert stacked["img"]["Transformer"]["encoderblock"]["LayerNorm_0"]["bias"].shape == (4, 32)
    jax.tree.map(np.testing.assert_array_equal, table.unstack(stacked), towers)
    factors = flatten_names(layer_factors(towers, 0.5, table))
    assert factors["txt/Encoder_0/encoderblock_0/LayerNorm_0/bias"] == 0.5**2
    assert factors["img/Transformer/encoderblock_0/LayerNorm_0/bias"] == 0.5**4
    assert (factors["txt/Embed_0/embedding"], factors["img/embedding/bias"]) == (0.5**3, 0.5**5)
    query = "txt/Encoder_0/encoderblock_1/MultiHeadDotProductAttention_0/query/kernel"
    parameter = table.find(query)
    assert (parameter.prefix, parameter.block, parameter.general) == (
        "txt/",
        1,
        query.replace("1/M", "*/M"),
    )
    mesh = create_mesh(data=2, fsdp=2, tensor=2)
    assert parameter_spec(query, (24, 4, 8), mesh, table) == P("fsdp", "tensor", None)
    assert parameter_spec("txt/Embed_0/embedding", (50, 24), mesh, table) == P("tensor", "fsdp")
    # Not a grid: loading never interpolates them.
    assert table.with_role("positions", ["txt/pos_embedding"]) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("patch_size", 16, "is not a key"),
        ("pooling", "mean", "Known: last, first, end, gap, max, map"),
        ("vocab_size", 0, "at least 1"),
    ],
)
def test_what_a_text_tower_cannot_do_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"model.{key}.*{message}"):
        create_model(**{**TINY, key: value})
