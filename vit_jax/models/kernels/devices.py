"""What differs from one kind of device to another: the only file that knows a chip by name.

Code beside it asks `device_has("unfused_products")`. A row is here because it was measured to gain
on such a device, or because the program compiled for one takes 3 % less time by count, for a model
that people train (benchmarks/diary.md; no TPU has confirmed a count).
"""

import re
from typing import Any, NamedTuple

import jax


class Row(NamedTuple):
    """A difference, and the devices that have it."""

    name: str
    devices: str  # regular expression of "platform kind"
    why: str
    figure: str
    source: str = "measured"  # or "counted"


ROWS = (
    Row(
        "rounded_results",
        "gpu .*|tpu .*",
        "products give the dtype of their operands: on GPUs XLA does not fold the rounding into a "
        "product, and TPUs add gradients of weights over all devices as the product gives them",
        "H100, B/16: 45.0 GB are moved instead of 55.4",
    ),
    Row(
        "unfused_products",
        "tpu TPU v4",
        "XLA would make norms and GELU parts of the products beside them, in slow tiles",
        "B/16 42.6 -> 37.9 ms, L/16 139 -> 122, H/14 449 -> 352",
        "counted",
    ),
    Row(
        "three_products",
        "tpu TPU v4",
        "queries, keys and values stay three products where our kernel attends: elsewhere they are "
        "one, which it reads in place, but the tiles of that are slow",
        "two layers of B/16: 6.89 ms, 7.26 with one product",
        "counted",
    ),
    Row(
        "unfused_joint_gradient",
        "tpu TPU v6 lite",
        "the gradient behind the joint product gets slow tiles with a norm's gradient in it",
        "B/16 15.7 -> 15.0 ms, L/16 52.0 -> 50.4",
        "counted",
    ),
    Row(
        "biases_in_products",
        "gpu .*",
        "products add their biases: those of queries, keys and values before the division into "
        "heads, where Flax adds them after it",
        "H100, B/16: 3,640 -> 3,760 images/s",
    ),
    Row(
        "sums_of_matrices",
        "gpu .*",
        "x + y of matrices: in other shapes XLA lets the product that ends in y add to x in place, "
        "and copies x first, which is needed again",
        "H100, B/16: in the 3,640 -> 3,760 images/s above",
    ),
    Row(
        "patches_as_product",
        "gpu .*",
        "cuDNN's convolution takes five times as long as the product",
        "H100, B/16: 3,395 -> 3,640 images/s, together with the next",
    ),
    Row(
        "gelu_made_again",
        "gpu .*",
        "the backward pass makes GELU again, for which XLA would write tanh in float32",
        "H100, B/16: 3,395 -> 3,640 images/s, together with the one before",
    ),
    Row(
        "gelu_in_products",
        "gpu .*",
        "GELU in the dtype of a product is a part of it, which cuBLAS computes in float32",
        "H100, B/16: 3,760 -> 3,812 images/s",
    ),
    Row(
        "short_gelu_gradient",
        "gpu .*|tpu .*",
        "the gradient that goes with it, in half of the operations; CPUs keep the official code's "
        "bits",
        "v6e, B/16: 16.1 -> 15.7 ms, L/16 53.1 -> 52.2; less than 3 %, but GPUs need it anyway",
        "counted",
    ),
    Row(
        "cudnn",
        "gpu NVIDIA.*",
        "attention by cuDNN: scores stay on the chip",
        "H100, B/16: 2,641 -> 3,395 images/s",
    ),
    Row(
        "pallas",
        "tpu (?!TPU v[23]$).*",
        "attention by our kernel: scores stay on the chip (v2 and v3 have no bfloat16 products in "
        "Pallas)",
        "attention of a layer of B/16 beside XLA's, kcycles: v5e 2,335 -> 982, v6e 1,389 -> 642, "
        "v4 347 -> 282",
        "counted",
    ),
    Row(
        "chunked",
        "cpu .*",
        "attention by a few heads at a time: their scores stay in the cache",
        "AVX2, S/16 in float32, beside timm compiled: 0.84 -> 0.92",
    ),
)


def device_of_program() -> tuple[str, str]:
    """Platform and kind of the device to compile for: the mesh's, else the default device."""
    mesh = jax.sharding.get_abstract_mesh()
    default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]  # or a platform
    if not mesh.empty:
        device: Any = mesh.abstract_device
    elif default is None or isinstance(default, str):
        device = jax.devices(default)[0]
    else:
        device = default
    return device.platform, device.device_kind


def device_has(name: str) -> bool:
    """Whether the device to compile for has the difference of this row."""
    [row] = [row for row in ROWS if row.name == name]
    return re.fullmatch(row.devices, " ".join(device_of_program()), re.IGNORECASE) is not None
