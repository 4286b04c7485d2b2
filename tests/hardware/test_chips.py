import pytest

from vit_jax.hardware.chips import CHIPS, GIB, find_chip


def test_chips_are_found_by_the_name_that_jax_gives_them() -> None:
    names = {
        "TPU v3": "v3",
        "TPU v5 lite": "v5e",
        "TPU v5": "v5p",
        "TPU v5p": "v5p",
        "NVIDIA H100 80GB HBM3": "H100",
        "nvidia a100-sxm4-80gb": "A100-80GB",
    }
    for device_kind, name in names.items():
        assert find_chip(device_kind) == CHIPS[name]
    for unknown in ("cpu", "TPU", "NVIDIA", ""):  # none is guessed
        assert find_chip(unknown) is None


def test_a_device_of_v3_is_a_core_and_of_v4_a_chip() -> None:
    v3, v4 = CHIPS["v3"], CHIPS["v4"]
    assert (v3.devices, v4.devices) == (2, 1)
    assert v3.device_peak_flops == 61.5e12
    assert v3.device_hbm_bytes == pytest.approx(15.48 * GIB, abs=1)
    assert v4.device_peak_flops == 275e12


def test_units() -> None:
    """A figure given in Gbit or GFLOP instead of GB and TFLOP would be far outside."""
    for chip in CHIPS.values():
        assert 40 < chip.tflops < 3000
        assert 14 < chip.hbm_gib < 200
        assert 500 < chip.hbm_gb_s < 10_000
        assert 30 < chip.link_gb_s < 1000
        assert chip.network_gb_s < chip.link_gb_s
