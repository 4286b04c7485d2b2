import pytest

from vit_jax.errors import UserError
from vit_jax.plan.topology import parse_topology


@pytest.mark.parametrize(
    ("text", "kind", "shape", "slices", "chips", "devices"),
    [
        ("v5e-256", "tpu", (16, 16), 1, 256, 256),
        ("V5litepod-16", "tpu", (4, 4), 1, 16, 16),
        ("v3-8", "tpu", (2, 2), 1, 4, 8),  # a device is a core
        ("v5p-12288", "tpu", (16, 16, 24), 1, 6144, 6144),
        ("v4-8", "tpu", (2, 2, 1), 1, 4, 4),  # two cores are a device
        ("2x v5e-16", "tpu", (4, 4), 2, 32, 32),
        ("H100:8x4", "gpu", (4,), 8, 32, 32),
        ("a100-80gb:8", "gpu", (8,), 1, 8, 8),
        ("v7x:2x2x1", "tpu", (2, 2, 1), 1, 4, 8),
        ("cpu:8", "cpu", (8,), 1, 8, 8),
    ],
)
def test_names(text, kind, shape, slices, chips, devices):
    topology = parse_topology(text)
    assert (topology.kind, topology.shape, topology.slices) == (kind, shape, slices)
    assert (topology.num_chips, topology.num_devices) == (chips, devices)
    assert parse_topology(topology.name) == topology


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v5e", "is invalid"),
        ("v5e:4", "has 2 sides, in chips, such as v5e:2x2."),
        ("v4:4x4", "has 3 sides, in chips, such as v4:2x2x2."),
        ("v9-8", "'v9' is unknown"),
        ("v5e-17", "v5e-16"),
        ("tpu7x-8", "tpu7x:SHAPE only"),
        ("v5e:32x32", "up to v5e:16x16"),
        ("2xv3-8", "no network between slices"),
        ("v5e:0x4", "is invalid"),
        ("A100:8", "Did you mean 'a100-40gb'?"),
    ],
)
def test_what_the_hardware_does_not_come_in(text: str, words: str) -> None:
    with pytest.raises(UserError, match="--topology") as error:
        parse_topology(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
