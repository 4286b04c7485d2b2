import pytest

from vit_jax.hardware.chips import CHIPS, GIB, find_chip


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("TPU v3", "v3"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("nvidia a100-sxm4-80gb", "A100-80GB"),
    ],
)
def test_chips_are_found_by_the_name_that_jax_gives_them(device_kind: str, name: str) -> None:
    chip = find_chip(device_kind)
    assert chip is not None
    assert chip.name == name


@pytest.mark.parametrize("device_kind", ["cpu", "TPU", "NVIDIA", ""])
def test_what_is_unknown_is_not_guessed(device_kind: str) -> None:
    assert find_chip(device_kind) is None


def test_a_device_of_v3_is_a_core_and_of_v4_a_chip() -> None:
    v3, v4 = find_chip("TPU v3"), find_chip("TPU v4")
    assert v3 is not None
    assert v4 is not None
    assert (v3.devices, v4.devices) == (2, 1)
    assert v3.device_peak_flops == 61.5e12
    assert v3.device_hbm_bytes == pytest.approx(15.48 * GIB, abs=1)
    assert v4.device_peak_flops == 275e12


@pytest.mark.parametrize("name", CHIPS)
def test_units(name: str) -> None:
    """A figure given in Gbit or GFLOP instead of GB and TFLOP would be far outside."""
    chip = CHIPS[name]
    assert 40 < chip.tflops < 3000
    assert 14 < chip.hbm_gib < 200
    assert 500 < chip.hbm_gb_s < 10_000
    assert 30 < chip.link_gb_s < 1000
    assert chip.network_gb_s < chip.link_gb_s
