from __future__ import annotations

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


def test_names_and_kinds_are_unique() -> None:
    kinds = [kind.casefold() for chip in CHIPS for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)


def test_a_device_of_v3_is_a_core_and_of_v4_a_chip() -> None:
    v3, v4 = find_chip("TPU v3"), find_chip("TPU v4")
    assert v3 is not None
    assert v4 is not None
    assert (v3.cores, v3.devices, v4.cores, v4.devices) == (2, 2, 2, 1)
    assert v3.device_peak_flops == 61.5e12
    assert v3.device_hbm_bytes == pytest.approx(15.48 * GIB, abs=1)
    assert v4.device_peak_flops == v4.peak_flops


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_units(chip) -> None:  # type: ignore[no-untyped-def]
    """A figure given in Gbit or TFLOP instead of bytes and FLOP would be far outside."""
    assert 4e13 < chip.peak_flops < 3e15
    assert 14 * GIB < chip.hbm_bytes < 200 * GIB
    assert 5e11 < chip.hbm_bandwidth < 1e13
    assert 3e10 < chip.link_bandwidth < 1e12
    assert chip.network_bandwidth < chip.link_bandwidth
    assert chip.cores >= chip.devices
