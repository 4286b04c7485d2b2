"""`--check` finds what a disk or a copy does to a set."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
from array_record.python import array_record_module

from tests import fixtures_data
from tests.tiny import Script
from vit_jax.data_preparation.check import check_prepared
from vit_jax.data_preparation.examples import serialize
from vit_jax.data_preparation.prepare import prepare_data
from vit_jax.errors import UserError
from vit_jax.files.manifest import write_manifest


@pytest.fixture
def prepared(tmp_path: pathlib.Path) -> pathlib.Path:
    counts = {"train": {"cat": 25, "dog": 25}, "test": {"cat": 2, "dog": 2}}
    source = fixtures_data.write_folder(tmp_path / "photos", counts)
    return prepare_data("folder", str(source), data_dir=str(tmp_path / "o"), shard_megabytes=0.01)


def shards(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("photos-train.array_record-*"))


def test_every_kind_of_damage_is_found(prepared: pathlib.Path) -> None:
    assert check_prepared(str(prepared)) == check_prepared(str(prepared), full=True) == []
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
    manifest = prepared / "checksums.json"
    manifest.write_text(manifest.read_text().replace("cat", "cow"))
    text = manifest.read_text()
    manifest.write_text(text.replace('"records"', '"recorded"'))
    assert check_prepared(str(prepared)) == [("checksums.json", "is damaged itself")]


def rewrite(folder: pathlib.Path, shard: pathlib.Path, records: list[bytes], count: int) -> None:
    """Another shard, with checksums that are right and a claim on its length."""
    note = json.loads((folder / "checksums.json").read_text())["note"]
    writer = array_record_module.ArrayRecordWriter(str(shard), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    note["records"][shard.name] = count
    (folder / "checksums.json").unlink()
    write_manifest(folder, note)


def test_contents_are_checked_too(prepared: pathlib.Path) -> None:
    good = fixtures_data.encoded(fixtures_data.picture(1))
    records = [serialize(good, 0, b"") for _ in range(40)]
    records[7] = serialize(good[: len(good) // 2], 0, b"")
    shard = shards(prepared)[0]
    rewrite(prepared, shard, records, 40)
    assert check_prepared(str(prepared)) == []
    (found,) = check_prepared(str(prepared), full=True)
    assert found == (shard.name, "the image of record 7 cannot be decoded")


def test_only_prepared_sets_are_checked(prepared: pathlib.Path) -> None:
    for folder in (prepared / "no", prepared.parents[1]):
        with pytest.raises(UserError, match=r"holds no checksums.json; give .*NAME/VERSION"):
            check_prepared(str(folder))


def test_the_script_names_damaged_shards(
    script: Script, prepared: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    result = script("prepare_data.py", "--check=full", str(prepared))
    assert (result.returncode, result.stdout) == (0, "all is well\n")
    copy = shutil.copytree(prepared, tmp_path / "copy")
    shard = shards(copy)[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    result = script("prepare_data.py", "--check", str(copy))
    assert result.returncode == 1
    assert result.stdout.startswith(f"{shard.name}: has ")
    assert "1 of its files are damaged" in result.stdout
    result = script("prepare_data.py", "folder")
    assert result.returncode == 2
    assert "error: give KIND SOURCE" in result.stderr
