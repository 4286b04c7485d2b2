"""Principal components of the first layer's filters (figure 7, left)."""

from __future__ import annotations

import numpy as np


def principal_filters(kernel: np.ndarray, count: int = 28) -> tuple[np.ndarray, np.ndarray]:
    """The directions in which the filters differ most from their mean.

    Args:
      kernel: of the patch embedding or of a root convolution, [P, Q, C, D].
      count: no more than there are.

    Returns:
      Components [count, P, Q, C] of norm 1, the largest entry positive, and the share of the
      variance that each explains [count].
    """
    filters = np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1]).T  # [D, P * Q * C]
    _, values, components = np.linalg.svd(filters - filters.mean(axis=0), full_matrices=False)
    signs = np.sign(np.take_along_axis(components, np.abs(components).argmax(1)[:, None], axis=1))
    shares = values**2 / max(np.sum(values**2), np.finfo(float).tiny)
    return (components * signs)[:count].reshape(-1, *kernel.shape[:3]), shares[:count]
