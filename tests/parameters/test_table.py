"""Rows by name: two forms of the blocks, prefixes, and an objective's own parameters."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.golden import VIT
from vit_jax.errors import UserError
from vit_jax.models.create import MODELS
from vit_jax.models.family import LAST, Row
from vit_jax.parameters.table import ParameterTable
from vit_jax.trees import flatten_names

NORM = "LayerNorm_0"


def loop_tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    blocks = {f"encoderblock_{i}": {NORM: {"scale": rng.normal(size=3)}} for i in range(12)}
    return {"Transformer": {**blocks, "encoder_norm": {"scale": np.ones(3)}}, "cls": np.zeros(2)}


def test_stacking_keeps_the_order_of_blocks_and_inverts() -> None:
    tree = loop_tree()
    stacked = VIT.stack(tree)
    scale = stacked["Transformer"]["encoderblock"][NORM]["scale"]
    assert scale.shape == (12, 3)
    # Block 10 must not come between 1 and 2.
    np.testing.assert_array_equal(scale[2], tree["Transformer"]["encoderblock_2"][NORM]["scale"])
    assert VIT.is_stacked(f"Transformer/encoderblock/{NORM}/scale")
    assert not any(map(VIT.is_stacked, flatten_names(tree)))
    back, before = flatten_names(VIT.unstack(stacked)), flatten_names(tree)
    assert back.keys() == before.keys()
    for name in before:
        np.testing.assert_array_equal(back[name], before[name])


def test_both_directions_leave_their_own_form_alone() -> None:
    tree = loop_tree()
    assert flatten_names(VIT.unstack(tree)).keys() == flatten_names(tree).keys()
    stacked = VIT.stack(tree)
    assert flatten_names(VIT.stack(stacked)).keys() == flatten_names(stacked).keys()


def test_a_missing_block_is_named() -> None:
    tree = loop_tree()
    del tree["Transformer"]["encoderblock_3"]
    with pytest.raises(UserError, match="block 3 of 12"):
        VIT.stack(tree)


def test_both_forms_of_a_block_are_an_error() -> None:
    scales = {"encoderblock": np.ones((2, 3)), "encoderblock_0": np.ones(3)}
    tree = {block: {NORM: {"scale": scale}} for block, scale in scales.items()}
    with pytest.raises(UserError, match=r"\(stacked\) and"):
        VIT.unstack({"Transformer": tree})
    with pytest.raises(UserError, match="no layer axis"):
        VIT.unstack({"Transformer": {"encoderblock": {NORM: {"scale": np.float32(1)}}}})


def test_a_name_is_looked_up_in_the_family_of_its_prefix() -> None:
    """Also where the other family has a parameter of that name, with other axes."""
    rows = (Row("embedding/kernel", ("vocabulary", "embed")), Row("odd", (None,), LAST))
    other = dataclasses.replace(MODELS["vit"], rows=rows, title="other")
    table = ParameterTable({"": MODELS["vit"], "net": other}, {"prototypes": ("classes", None)})
    assert table.find("embedding/kernel").row.axes == (None, None, None, "embed")
    below = table.find("net/embedding/kernel")
    assert (below.row, below.prefix, below.general) == (rows[0], "net/", "net/embedding/kernel")
    assert table.find("prototypes").row.axes == ("classes", None)
    assert table.with_role("patches", ["embedding/kernel", "net/embedding/kernel"]) == [
        "embedding/kernel"
    ]
    with pytest.raises(ValueError, match="'net/cls' matches 0 rows of other, not 1"):
        table.find("net/cls")
    with pytest.raises(ValueError, match=r"'odd', which is neither.*\(prototypes\).*'net': other"):
        table.check(["cls", "net/odd", "odd"], "objective.name='toy'")
    with pytest.raises(ValueError, match="'cls' is below none of the prefixes net"):
        ParameterTable({"net": other}).find("cls")
