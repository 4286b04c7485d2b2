"""The arrays behind the pictures: the paper's figures 6 (rollout) and 7, and CKA.

L: blocks, B: images, H: heads, N: tokens, those of the grid last.
"""

from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError

Grid = tuple[int, int]  # rows and columns of tokens


def principal_filters(kernel: np.ndarray, count: int = 28) -> tuple[np.ndarray, np.ndarray]:
    """Principal components of the embedding filters (figure 7, left).

    Args:
      kernel: of the patch embedding or root convolution, [P, Q, C, D].
      count: maximum number of components.

    Returns:
      Components [count, P, Q, C] of norm 1, the largest entry positive, and the share of the
      variance that each explains [count].
    """
    filters = np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1]).T  # [D, P * Q * C]
    _, values, components = np.linalg.svd(filters - filters.mean(axis=0), full_matrices=False)
    signs = np.sign(np.take_along_axis(components, np.abs(components).argmax(1)[:, None], axis=1))
    shares = values**2 / max(np.sum(values**2), np.finfo(float).tiny)
    return (components * signs)[:count].reshape(-1, *kernel.shape[:3]), shares[:count]


def position_similarity(embeddings: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Cosine similarity of each position embedding with all others (figures 7 and 10).

    Args:
      embeddings: [N, D], those of other tokens first.
      grid: rows and columns of positions.

    Returns:
      [rows, columns, rows, columns]
    """
    rows, columns = grid
    places = np.asarray(embeddings, np.float64)[len(embeddings) - rows * columns :]
    places = places / np.maximum(np.linalg.norm(places, axis=1, keepdims=True), 1e-12)
    return (places @ places.T).reshape(rows, columns, rows, columns)


def principal_colors(
    patches: Sequence[np.ndarray], grids: Sequence[Grid]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Patches of several images as colours (DINOv2, 2304.07193, figure 1).

    The first principal component of all patches divides them at 0; the side that has less of the
    images' border is the foreground. The first three components of its patches are red, green and
    blue, so that a colour means the same in all images.

    Args:
      patches: features of each image, [P, D].
      grids: its rows and columns of patches.

    Returns:
      Of each image colours in [0, 1], [rows, columns, 3], black in the background, and which
      patches are in the foreground, bool [rows, columns].
    """
    x = np.concatenate(patches).astype(np.float64)  # [B * P, D]
    borders = [np.ones(grid, bool) for grid in grids]
    for one in borders:
        one[1:-1, 1:-1] = False
    border = np.concatenate([one.ravel() for one in borders])
    first = _scores(x, 1)[:, 0]
    is_object = first > 0
    if is_object[border].mean() > is_object.mean():
        is_object = ~is_object
    colors = np.zeros((len(x), 3))
    if is_object.any():
        scores = _scores(x[is_object], 3)
        low, high = np.percentile(scores, (1, 99), axis=0)
        colors[is_object] = np.clip((scores - low) / np.maximum(high - low, 1e-12), 0, 1)
    ends = np.cumsum([len(one) for one in patches])[:-1]
    colored = zip(np.split(colors, ends), np.split(is_object, ends), grids, strict=True)
    colors_of, objects = zip(
        *((x.reshape(*grid, 3), one.reshape(grid)) for x, one, grid in colored), strict=True
    )
    return list(colors_of), list(objects)


def _scores(x: np.ndarray, count: int) -> np.ndarray:
    """Principal components of rows [n, D] -> [n, count], the largest weight of each positive."""
    x = x - x.mean(axis=0)
    directions = np.linalg.eigh(x.T @ x)[1][:, ::-1][:, :count]  # [D, count]
    signs = np.sign(np.take_along_axis(directions, np.abs(directions).argmax(0)[None], axis=0))
    return x @ (directions * signs)


def patch_similarity(
    patches: Sequence[np.ndarray], grids: Sequence[Grid], place: tuple[int, int]
) -> list[np.ndarray]:
    """Cosines of one patch of the first image with all of each, [P, D] -> [rows, columns]."""
    unit = [x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12) for x in patches]
    one = unit[0][place[0] * grids[0][1] + place[1]]
    return [(x @ one).reshape(grid) for x, grid in zip(unit, grids, strict=True)]


def mean_distance(
    attention: np.ndarray, grid: tuple[int, int], pixels: tuple[int, int]
) -> np.ndarray:
    """Mean distance between a query and the positions it attends to (figure 7, right; D.7).

    Other tokens (class, distillation) have no position: weights on them are dropped, and those on
    the grid are rescaled to sum to 1. All queries of the grid and all images count equally.

    Args:
      attention: [L, B, H, N, N].
      grid: rows and columns of tokens.
      pixels: height and width of a token.

    Returns:
      [L, H] pixels.
    """
    others = attention.shape[-1] - grid[0] * grid[1]
    weights = np.asarray(attention[..., others:, others:], np.float64)
    weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(float).tiny)
    distances = np.einsum("lbhqk,qk->lh", weights, _distances(grid, pixels))
    return distances / (weights.shape[1] * weights.shape[3])


def uniform_distance(grid: tuple[int, int], pixels: tuple[int, int]) -> float:
    """`mean_distance` of uniform attention."""
    return float(np.mean(_distances(grid, pixels)))


def rollout(
    attention: np.ndarray, grid: tuple[int, int], *, class_token: bool = True
) -> np.ndarray:
    """Contribution of positions to the output (Abnar & Zuidema, 2005.00928): [B, rows, columns].

    Attention rollout, as in figure 6 (D.8): weights [L, B, H, N, N] are averaged over heads, half
    of each row is the residual connection, and the blocks are multiplied. Taken from the first
    token if it is not in the grid (the class token), else averaged over all; `class_token` is false
    if the tokens before the grid are registers alone.
    """
    num_tokens = attention.shape[-1]
    flow = np.eye(num_tokens)
    for block in np.asarray(attention, np.float64):
        fused = block.mean(axis=1) + np.eye(num_tokens)  # [B, N, N]
        flow = fused / fused.sum(axis=-1, keepdims=True) @ flow
    others = num_tokens - grid[0] * grid[1]
    seen = flow[:, 0] if others and class_token else flow.mean(axis=1)  # [B, N]
    return seen[:, others:].reshape(-1, *grid)


def class_token_attention(
    attention: np.ndarray, grid: tuple[int, int], *, class_token: bool = True
) -> np.ndarray:
    """Attention of each head of the last block from the class token: [B, H, rows, columns].

    As in figure 1 of DINO (2104.14294). Without a class token, the mean over all queries;
    `class_token` as in `rollout`.
    """
    last = np.asarray(attention[-1], np.float64)  # [B, H, N, N]
    others = last.shape[-1] - grid[0] * grid[1]
    seen = last[:, :, 0] if others and class_token else last.mean(axis=2)
    return seen[..., others:].reshape(*seen.shape[:2], *grid)


def _distances(grid: tuple[int, int], pixels: tuple[int, int]) -> np.ndarray:
    """Distances between all positions: [N, N] pixels."""
    places = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), axis=-1).reshape(-1, 2)
    return np.linalg.norm((places[:, None] - places[None]) * np.asarray(pixels), axis=-1)


def cka_of_layers(layers: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    """Linear CKA (1905.00414) of every layer of one model with every layer of another.

    tr(K L) / sqrt(tr(K K) tr(L L)) with K = X X^T and L = Y Y^T, each estimated without bias (Song
    et al., as in "Do wide and deep networks learn the same things?", 2010.15327, equation 3): 1
    if the features are equal up to rotation and scale; 0 on average for independent
    features, for any number of examples, so it may be negative.

    Features are [n, D] of each layer, of the same n >= 4 examples in the same order (else a
    UserError); D may differ. Returns [len(layers), len(others)], 0 for constant features; needs
    n^2 numbers per layer.
    """
    sizes = {len(features) for features in (*layers, *others)}
    if len(sizes) != 1 or min(sizes) < 4:
        raise UserError(f"CKA of {sorted(sizes)} examples: give both models the same, at least 4.")
    a, b = (list(map(_kernel, side)) for side in (layers, others))
    return np.array([[np.sum(k * other) for other in b] for k in a])


def _kernel(features: np.ndarray) -> np.ndarray:
    """Inner products of different examples [n, n], centred, with norm 1."""
    features = features.astype(np.float64)
    n = len(features)
    features = features - features.mean(0)  # no effect on the centred kernel, saves precision
    kernel = features @ features.T
    np.fill_diagonal(kernel, 0.0)
    rows = kernel.sum(0) / (n - 2)
    kernel += rows.sum() / (n - 1) - rows[:, None] - rows[None]
    np.fill_diagonal(kernel, 0.0)
    return kernel / max(float(np.linalg.norm(kernel)), np.finfo(np.float64).tiny)
