"""`--check` finds what a disk or a copy does to a set."""

import pytest

from tests import fixtures_data
from vit_jax.data_preparation.prepare import check_prepared, prepare_data
from vit_jax.errors import UserError


@pytest.fixture
def prepared(tmp_path):
    counts = {"train": {"cat": 25, "dog": 25}, "test": {"cat": 2, "dog": 2}}
    source = fixtures_data.write_folder(tmp_path / "photos", counts)
    return prepare_data("folder", str(source), data_dir=str(tmp_path / "o"), shard_megabytes=0.01)


def shards(folder):
    return sorted(folder.glob("photos-train.array_record-*"))


def test_every_kind_of_damage_is_found(prepared, script):
    result = script("prepare_data.py", "--check", str(prepared))
    assert (result.returncode, result.stdout) == (0, "all is well\n")
    one, two, three = shards(prepared)[:3]
    content = bytearray(one.read_bytes())
    content[len(content) // 2] ^= 1
    one.write_bytes(content)
    two.write_bytes(two.read_bytes()[:-1000])
    three.unlink()
    (prepared / "label.labels.txt").write_text("cat\ncow\n")
    damage = dict(check_prepared(str(prepared)))
    assert list(damage) == sorted([one.name, two.name, three.name, "label.labels.txt"])
    assert damage[one.name] == damage["label.labels.txt"] == "its bytes have changed"
    assert "bytes instead of" in damage[two.name]
    assert damage[three.name] == "No such file or directory"
    result = script("prepare_data.py", "--check", str(prepared))
    assert result.returncode == 1
    assert f"\n{two.name}: has " in result.stdout
    assert "4 of its files are damaged" in result.stdout
    manifest = prepared / "checksums.json"
    manifest.write_text(manifest.read_text().replace('"plan"', '"plans"'))
    with pytest.raises(UserError, match=r"has no intact checksums.json"):
        check_prepared(str(prepared))


def test_only_prepared_sets_are_checked(prepared, script):
    for folder in (prepared / "no", prepared.parents[1]):
        with pytest.raises(UserError, match=r"no intact checksums.json; give a .*NAME/VER"):
            check_prepared(str(folder))
    result = script("prepare_data.py", "folder")
    assert result.returncode == 2
    assert "error: give KIND SOURCE" in result.stderr
