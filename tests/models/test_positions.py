from __future__ import annotations

import numpy as np
import pytest

from tests import golden
from vit_jax.errors import UserError
from vit_jax.models.tokens import sincos2d


def test_the_tables_of_big_vision() -> None:
    """1e-6: sines of the same float32 arguments, by two libraries."""
    expected = golden.arrays("bv_logits")
    small = sincos2d((3, 5), 16)
    np.testing.assert_allclose(small, expected["posemb_sincos_2d(3,5,16)"], rtol=0, atol=1e-6)
    large = sincos2d((14, 14), 192)[0, ::13, ::7]
    np.testing.assert_allclose(
        large, expected["posemb_sincos_2d(14,14,192)[0,::13,::7]"], rtol=0, atol=1e-6
    )
    assert small.dtype == np.float32


@pytest.mark.parametrize("hidden_size", [4, 10])
def test_sizes_that_do_not_go(hidden_size: int) -> None:
    with pytest.raises(UserError, match=f"hidden_size={hidden_size}.*multiple of 4"):
        sincos2d((2, 2), hidden_size)
