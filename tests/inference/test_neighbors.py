"""Neighbours by features; an index that knows its model and what has changed."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.saved_models import save_model
from vit_jax.errors import UserError
from vit_jax.inference import neighbors
from vit_jax.inference.neighbors import draw_neighbors, find_neighbors


def write(path: Path, level: int, seed: int) -> None:
    noise = np.random.default_rng(seed).integers(0, 4, (16, 16, 3))
    pattern = 200 * (np.indices((16, 16))[level] // 4 % 2)
    Image.fromarray((pattern[..., None] + noise).astype(np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for i in range(6):
        write(tmp_path / f"photos/{'rows' if i % 2 else 'columns'}_{i}.png", 1 - i % 2, i)
    return tmp_path / "photos"


def test_like_images_are_near_and_new_ones_are_added(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    model, index = str(save_model(tmp_path / "m")), str(tmp_path / "i.npz")
    query = str(folder / "rows_1.png")
    [(asked, near)] = find_neighbors(model, str(folder), [query], index=index, count=3)
    assert asked == query
    names = [Path(path).name for path, _ in near]
    assert sorted(names[:2]) == ["rows_3.png", "rows_5.png"]  # not itself
    assert 1.0 >= near[0][1] >= near[1][1] > near[2][1]

    computed: list[int] = []
    vectors = neighbors._vectors

    def counting(model: Any, paths: Any, *rest: Any) -> Any:
        computed.append(len(paths))
        return vectors(model, paths, *rest)

    monkeypatch.setattr(neighbors, "_vectors", counting)
    again = find_neighbors(model, str(folder), [query], index=index, count=3)
    assert again == [(asked, near)]
    assert computed == [1]  # the query
    write(folder / "rows_7.png", 0, 7)
    write(folder / "columns_0.png", 0, 8)  # has rows now
    os.remove(folder / "rows_3.png")
    [(_, near)] = find_neighbors(model, str(folder), [query], index=index, count=3)
    assert computed == [1, 2, 1]
    assert {Path(path).name for path, _ in near} == {"rows_5.png", "rows_7.png", "columns_0.png"}
    with pytest.raises(UserError, match=r"i.npz is of another model or feature: choose another"):
        find_neighbors(model, str(folder), [query], index=index, feature="gap")
    other = str(save_model(tmp_path / "o", seed=1))
    with pytest.raises(UserError, match=r"i.npz is of another model"):
        find_neighbors(other, str(folder), [query], index=index)
    (tmp_path / "i.npz").write_bytes(b"no index")
    with pytest.raises(UserError, match=r"i.npz"):
        find_neighbors(model, str(folder), [query], index=index)
    with pytest.raises(UserError, match=r"--feature='patches' has shape \(4, 16\) per image"):
        find_neighbors(model, str(folder), [query], feature="patches")
    with pytest.raises(UserError, match=r"--count=0 must be at least 1"):
        find_neighbors(model, str(folder), [query], count=0)
    (folder / "broken.png").write_bytes(b"no image")
    with caplog.at_level(logging.WARNING):
        [(_, near)] = find_neighbors(model, str(folder), [query], count=9)
    assert "broken.png: " in caplog.text
    assert len(near) == 5


def test_a_sheet(folder: Path, tmp_path: Path) -> None:
    found = find_neighbors(str(save_model(tmp_path / "m")), str(folder), [str(folder)], count=2)
    draw_neighbors(found[:3], str(tmp_path / "sheet.png"))
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert np.asarray(sheet.convert("L")).std() > 5
