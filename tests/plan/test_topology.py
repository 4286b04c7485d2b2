from __future__ import annotations

import math

import pytest

from vit_jax.errors import UserError
from vit_jax.hardware.chips import CHIPS
from vit_jax.plan.topology import SHAPES, parse_topology


@pytest.mark.parametrize(
    ("text", "kind", "shape", "slices", "chips", "devices"),
    [
        ("v5e:16x16", "tpu", (16, 16), 1, 256, 256),
        ("v5e-256", "tpu", (16, 16), 1, 256, 256),
        ("V5litepod-16", "tpu", (4, 4), 1, 16, 16),
        ("v3-8", "tpu", (2, 2), 1, 4, 8),  # a device is a core
        ("v4-8", "tpu", (2, 2, 1), 1, 4, 4),  # two cores are a device
        ("v5p-16", "tpu", (2, 2, 2), 1, 8, 8),
        ("2xv5e:4x4", "tpu", (4, 4), 2, 32, 32),
        ("2x v5e-16", "tpu", (4, 4), 2, 32, 32),
        ("H100:8", "gpu", (8,), 1, 8, 8),
        ("H100:8x4", "gpu", (4,), 8, 32, 32),
        ("a100-80gb:8", "gpu", (8,), 1, 8, 8),
        ("cpu:8", "cpu", (8,), 1, 8, 8),
    ],
)
def test_names(
    text: str, kind: str, shape: tuple[int, ...], slices: int, chips: int, devices: int
) -> None:
    topology = parse_topology(text)
    assert (topology.kind, topology.shape, topology.slices) == (kind, shape, slices)
    assert (topology.num_chips, topology.num_devices) == (chips, devices)
    assert parse_topology(topology.name) == topology


def test_product_names_have_the_number_of_cores_or_chips_that_they_say() -> None:
    assert set(SHAPES) <= set(CHIPS)
    for name, sizes in SHAPES.items():
        for number, shape in sizes.items():
            count = math.prod(map(int, shape.split("x")))
            assert count * CHIPS[name].cores == number, (name, number)
            parse_topology(f"{name}-{number}")  # no larger than the largest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v5e", "cannot be read"),
        ("v5e:4", "has 2 axes"),
        ("v4:4x4", "has 3 axes"),
        ("v9-8", "no chip 'v9'"),
        ("v5e-17", "v5e-16"),
        ("tpu7x-8", "by shape only"),
        ("v5e:32x32", "largest slice of v5e has 256"),
        ("2xv3-8", "no network between slices"),
        ("0xv5e-4", "0"),
        ("v5e:0x4", "0"),
        ("cpu:2x2", "cpu:8"),
        ("cpu:100000", "at most cpu:1024"),
        ("H100-8", "write H100:8"),
        ("H100-0", "write H100:8"),
        ("cpu-0", "cpu:8"),
    ],
)
def test_what_the_hardware_does_not_come_in(text: str, words: str) -> None:
    with pytest.raises(UserError, match="--topology") as error:
        parse_topology(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
