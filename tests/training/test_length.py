from __future__ import annotations

import pytest

from vit_jax.errors import UserError
from vit_jax.training.schedule import to_steps


def test_units() -> None:
    sizes = {"num_examples": 1_281_167, "batch_size": 4096}
    assert to_steps(steps=7, **sizes) == 7
    assert to_steps(examples=40960, **sizes) == 10
    assert to_steps(epochs=300.0, **sizes) == 93_835  # paper: ImageNet, 300 epochs
    assert to_steps(epochs=90.0, num_examples=14_197_122, batch_size=4096) == 311_948


def test_steps_win_so_that_a_command_line_can_shorten_a_recipe() -> None:
    assert to_steps(steps=5, epochs=90.0, num_examples=100, batch_size=10) == 5
    assert to_steps(examples=50, epochs=90.0, num_examples=100, batch_size=10) == 5


@pytest.mark.parametrize("duration", [{}, {"steps": 0}, {"epochs": 0.01}])
def test_nothing_to_do_is_refused(duration: dict) -> None:
    with pytest.raises(UserError, match="duration"):
        to_steps(**duration, num_examples=100, batch_size=10)
