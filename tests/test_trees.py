import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.trees import count_parameters, flatten_names, merge_trees, unflatten_names


def test_flat_names_round_trip() -> None:
    blocks = {f"encoderblock_{i}": {"a": {"kernel": np.zeros((2, 3))}} for i in range(12)}
    tree = {"Transformer": {**blocks, "encoder_norm": {"scale": np.ones(3)}}, "cls": np.zeros(2)}
    flat = flatten_names(tree)
    assert "Transformer/encoderblock_10/a/kernel" in flat
    assert flatten_names(unflatten_names(flat)).keys() == flat.keys()
    assert count_parameters(tree) == 12 * 6 + 3 + 2


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a")])
def test_a_name_that_is_array_and_group_is_refused(names: tuple[str, str]) -> None:
    with pytest.raises(UserError, match="a"):
        unflatten_names(dict.fromkeys(names, np.zeros(1)))


def test_trees_are_merged_at_every_depth_and_stay_as_they_were() -> None:
    one, other = {"a": {"b": 1, "c": 2}}, {"a": {"c": 3}, "d": {"e": 4}}
    assert merge_trees(one, other) == {"a": {"b": 1, "c": 3}, "d": {"e": 4}}
    assert one == {"a": {"b": 1, "c": 2}}
