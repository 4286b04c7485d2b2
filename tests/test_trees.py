import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.trees import count_parameters, flatten_names, unflatten_names


def loop_tree() -> dict:
    rng = np.random.default_rng(0)
    blocks = {f"encoderblock_{i}": {"a": {"kernel": rng.normal(size=(2, 3))}} for i in range(12)}
    return {"Transformer": {**blocks, "encoder_norm": {"scale": np.ones(3)}}, "cls": np.zeros(2)}


def test_flat_names_round_trip() -> None:
    tree = loop_tree()
    flat = flatten_names(tree)
    assert "Transformer/encoderblock_10/a/kernel" in flat
    assert flatten_names(unflatten_names(flat)).keys() == flat.keys()
    assert count_parameters(tree) == 12 * 6 + 3 + 2


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a")])
def test_a_name_that_is_array_and_group_is_refused(names: tuple[str, str]) -> None:
    with pytest.raises(UserError, match="a"):
        unflatten_names(dict.fromkeys(names, np.zeros(1)))


def test_stacking_keeps_the_order_of_blocks_and_inverts() -> None:
    tree = loop_tree()
    stacked = stack_blocks(tree)
    kernel = stacked["Transformer"]["encoderblock"]["a"]["kernel"]
    assert kernel.shape == (12, 2, 3)
    # Block 10 must not come between 1 and 2.
    block_2 = tree["Transformer"]["encoderblock_2"]["a"]["kernel"]
    np.testing.assert_array_equal(kernel[2], block_2)
    assert is_scanned(flatten_names(stacked))
    assert not is_scanned(flatten_names(tree))
    back, before = flatten_names(unstack_blocks(stacked)), flatten_names(tree)
    assert back.keys() == before.keys()
    for name in before:
        np.testing.assert_array_equal(back[name], before[name])


def test_both_directions_leave_their_own_form_alone() -> None:
    tree = loop_tree()
    assert flatten_names(unstack_blocks(tree)).keys() == flatten_names(tree).keys()
    stacked = stack_blocks(tree)
    assert flatten_names(stack_blocks(stacked)).keys() == flatten_names(stacked).keys()


def test_a_missing_block_is_named() -> None:
    tree = loop_tree()
    del tree["Transformer"]["encoderblock_3"]
    with pytest.raises(UserError, match="block 3 of 12"):
        stack_blocks(tree)


def test_both_forms_of_a_block_are_an_error() -> None:
    stacked = {"encoderblock": {"scale": np.ones((2, 3))}, "encoderblock_0": {"scale": np.ones(3)}}
    with pytest.raises(UserError, match=r"\(stacked\) and"):
        unstack_blocks({"Transformer": stacked})
    with pytest.raises(UserError, match="no layer axis"):
        unstack_blocks({"Transformer": {"encoderblock": {"scale": np.float32(1)}}})
