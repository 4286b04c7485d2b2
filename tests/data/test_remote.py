"""Data on servers: a web server, a hub and a bucket of this machine."""

import io
import json
import os
import tarfile
import threading

import cv2
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.file_server import FileServer, Served, pose_as_hub, serve_files
from vit_jax.data.datasets import create_dataset
from vit_jax.data.pipeline import train_batches
from vit_jax.errors import TransientError, UserError
from vit_jax.files import network, remote
from vit_jax.files.paths import bucket_files, to_path

NAMES = ["cat", "dog", "emu"]
FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": NAMES, "_type": "ClassLabel"},
    "caption": {"dtype": "string", "_type": "Value"},
}
IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
COMMIT, JSON = "c" * 40, {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    network._answered.clear()
    return tmp_path / "cache" / "remote"


@pytest.fixture
def server():
    with serve_files() as server:
        yield server


def picture(value: int) -> bytes:
    return cv2.imencode(".png", np.full((6, 6, 3), value, np.uint8))[1].tobytes()


TOLD = {"huggingface": json.dumps({"info": {"features": FEATURES}})}


def table(first: int, count: int, group: int = 10, told=TOLD, **options) -> bytes:
    """A Parquet file as `push_to_hub` writes it; the grey value of an image is its number."""
    rows = range(first, first + count)
    images = pyarrow.array([{"bytes": picture(i), "path": f"{i}.png"} for i in rows], IMAGE)
    columns = {"image": images, "label": [i % 3 for i in rows], "caption": [f"a {i}" for i in rows]}
    content = io.BytesIO()
    options = {"row_group_size": group, "write_page_checksum": True, **options}
    parquet.write_table(pyarrow.table(columns).replace_schema_metadata(told), content, **options)
    return content.getvalue()


def tar(first: int, count: int) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for i in range(first, first + count):
            about = json.dumps({"label": NAMES[i % 3], "caption": f"a {i}"}).encode()
            for name, body in ((f"{i:04}.png", picture(i)), (f"{i:04}.json", about)):
                info = tarfile.TarInfo(name)
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
    return content.getvalue()


PACKERS = {"parquet": table, "tar": tar}


def serve(server: FileServer, kind: str, num_files: int = 3, count: int = 40) -> str:
    """The address of files of `count` images each, and a test file of 5 more."""
    for i in range(num_files):
        body = PACKERS[kind](i * count, count)
        server.files[f"/train-{i:02}.{kind}"] = Served(body, {"ETag": f'"{i}"'})
    server.files[f"/test-00.{kind}"] = Served(PACKERS[kind](num_files * count, 5), {})
    numbers = ",".join([*(f"train-{i:02}" for i in range(num_files)), "test-00"])
    return f"{server.address}/{{{numbers}}}.{kind}"


def opened(name: str, split: str = "train", preprocess: str = "decode", **options):
    options = {"name": name, "split": split, "preprocess": preprocess, **options}
    return create_dataset(**options).check()


def values(dataset) -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    examples = (dataset.example(i, rng) for i in range(dataset.num_examples))
    return [(int(x["image"][0, 0, 0]), int(x["label"])) for x in examples]


def fetched(server: FileServer, end: str) -> int:
    return sum(path.endswith(end) for path in server.requests)


@pytest.mark.parametrize("kind", PACKERS)
def test_every_image_is_there_and_fetched_once(server, kind):
    name = serve(server, kind)
    dataset = opened(name)
    expected = [(i, i % 3) for i in range(120)]
    assert dataset.class_names == tuple(NAMES)
    assert values(dataset) == expected
    before = len(server.requests)
    assert values(dataset) == expected
    again = opened(name)  # in another run, too: what is known of the files is kept
    assert values(again) == expected
    assert again.fingerprint == dataset.fingerprint
    assert len(server.requests) - before == 4  # their sizes
    assert values(opened(name, "test")) == [(i, i % 3) for i in range(120, 125)]
    server.files[f"/train-00.{kind}"].headers["ETag"] = '"new"'
    assert opened(name).fingerprint != dataset.fingerprint


@pytest.mark.parametrize("kind", PACKERS)
def test_texts_come_with_the_images(server, kind):
    tokens = "decode|tokenize('caption', 'characters', 8)"
    dataset = opened(serve(server, kind, 1), preprocess=tokens)
    assert dataset.source[7]["caption"] == "a 7"
    assert dataset.example(7, np.random.default_rng(0))["text"].any()
    other, match = tokens.replace("caption", "nothing"), "no (column|text) 'nothing'"
    with pytest.raises(UserError, match=match):
        _ = opened(serve(server, kind, 1), preprocess=other).element_spec


def test_labels_are_read_without_the_images(server):
    rng = np.random.default_rng(0)
    noise = [{"bytes": rng.bytes(100_000), "path": None} for _ in range(40)]
    columns = {"image": pyarrow.array(noise, IMAGE), "label": [i % 3 for i in range(40)]}
    content = io.BytesIO()
    written = pyarrow.table(columns).replace_schema_metadata(TOLD)
    parquet.write_table(written, content, row_group_size=10)
    server.files["/train.parquet"] = Served(content.getvalue())
    opened(f"{server.address}/train.parquet")
    assert 0 < server.bytes_sent < 200_000


def test_threads_fetch_a_piece_once(server):
    dataset = opened(serve(server, "parquet", 1))
    before = fetched(server, "train-00.parquet")
    start = threading.Barrier(8)

    def read() -> None:
        start.wait()
        dataset.example(0, np.random.default_rng(0))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched(server, "train-00.parquet") - before == 1


def batches(dataset, start: int = 0, stop: int = 30, **options) -> np.ndarray:
    options = {"batch_size": 8, "seed": 3, "start_step": start, "total_steps": stop, **options}
    with train_batches(dataset, **options) as found:
        return np.stack([batch["image"][:, 0, 0, 0] for batch in found])


def test_a_small_cache_reads_in_windows(server, cache):
    name = serve(server, "parquet", 3, 80)  # 24 groups
    size = sum(len(file.body) for file in server.files.values())
    small = opened(name, cache_gib=size / 2 / 2**30)
    epoch = batches(small).ravel()
    assert sorted(epoch.tolist()) == list(range(240))
    assert sum(path.stat().st_size for path in cache.iterdir()) <= size / 2
    before = fetched(server, ".parquet")
    second = batches(small, 30, 60)
    assert 20 <= fetched(server, ".parquet") - before <= 32  # every block, hardly one twice
    np.testing.assert_array_equal(batches(small, 35, 50, num_threads=3), second[5:20])
    assert not np.array_equal(second.ravel(), epoch)
    with pytest.raises(UserError, match=r"dataset\.balance=0\.5 needs .*dataset\.cache_gib"):
        small.balanced(0.5)
    whole = opened(name)
    assert whole.source.windows is None
    plain = batches(whole).ravel()
    assert sorted(plain.tolist()) == sorted(epoch.tolist())

    def spans(order: np.ndarray) -> np.ndarray:
        places = [np.flatnonzero(order // 10 == group) for group in range(24)]
        return np.array([place.max() - place.min() for place in places])

    # A quarter of all blocks are mixed, of 60 images, somewhat more where blocks begin.
    assert spans(epoch).max() < 100 < spans(plain).mean()
    assert spans(epoch).min() > 20  # and are not read one after the other


def test_tars_are_read_in_windows_too(server, cache, monkeypatch):
    monkeypatch.setattr(remote, "CHUNK", 16 << 10)
    monkeypatch.setattr("vit_jax.data.tars.CHUNK", 16 << 10)
    name = serve(server, "tar", 3, 80)
    size = sum(len(file.body) for file in server.files.values())
    small = opened(name, cache_gib=size / 4 / 2**30)
    assert sorted(batches(small).ravel().tolist()) == list(range(240))
    assert sum(path.stat().st_size for path in cache.iterdir()) <= size / 4
    assert small.source.windows.blocks.max() > 10


def test_what_fails_for_a_while_is_read_again(server, caplog):
    faults = [{"status": 503}, {"status": 429}, {"break_after": 10}, {"status": 500}]
    dataset = opened(serve(server, "parquet", 1))
    server.files["/train-00.parquet"].faults = list(faults)
    assert int(dataset.example(3, np.random.default_rng(0))["image"][0, 0, 0]) == 3
    assert caplog.text.count("retrying") == len(faults)
    server.files["/train-00.parquet"].faults = [{"status": 503}] * remote.ATTEMPTS
    with pytest.raises(TransientError, match=r"train-00\.parquet cannot be read, attempt 7: 503"):
        dataset.example(13, np.random.default_rng(0))
    del server.files["/train-00.parquet"]
    with pytest.raises(UserError, match=r"train-00\.parquet cannot be read: ") as error:
        dataset.example(23, np.random.default_rng(0))
    assert not isinstance(error.value, TransientError)


def test_what_a_server_refuses_or_cannot_say_yet(server, caplog):
    name = serve(server, "tar", 1)
    about = server.files["/train-00.tar"]
    about.faults = [{"status": 503}] * 4
    assert opened(name).num_examples == 40
    assert "503" in caplog.text
    about.faults = [{"status": 403}] * 2
    with pytest.raises(UserError, match=r"dataset\.name=.* cannot be read: 403") as error:
        opened(name)
    assert not isinstance(error.value, TransientError)
    with pytest.raises(UserError, match="x.tar.gz' is no .parquet or .tar"):
        opened(f"{server.address}/x.tar.gz")


def test_a_file_that_is_replaced_during_a_run(server):
    dataset = opened(serve(server, "parquet", 1))
    server.files["/train-00.parquet"] = Served(table(40, 40), {"ETag": '"new"'})
    with pytest.raises(UserError, match=r"train-00\.parquet .*has changed since it was opened"):
        dataset.example(0, np.random.default_rng(0))
    server.files["/a.tar"] = Served(tar(0, 40), {"Last-Modified": "Mon, 30 Nov 2026 07:00:00 GMT"})
    first = opened(f"{server.address}/a.tar").fingerprint
    server.files["/a.tar"].headers["Last-Modified"] = "Mon, 30 Nov 2026 08:00:00 GMT"
    assert opened(f"{server.address}/a.tar").fingerprint != first


def test_what_is_kept_is_bounded_by_removing_only_that(server, cache):
    dataset = opened(serve(server, "parquet", 1))
    size = len(server.files["/train-00.parquet"].body)
    (cache / "notes.txt").write_text("mine")
    (cache / ("0" * 32 + ".1.unfinished")).write_bytes(bytes(10_000))
    os.utime(cache / ("0" * 32 + ".1.unfinished"), (0, 0))  # of a run that was killed
    small = opened(serve(server, "parquet", 1), cache_gib=size / 2 / 2**30)
    batches(small)
    assert (cache / "notes.txt").exists()
    assert not (cache / ("0" * 32 + ".1.unfinished")).exists()
    for path in cache.iterdir():
        if len(path.name) == 32:
            path.write_bytes(path.read_bytes()[:50])  # this disk has lost the rest
    assert values(dataset) == [(i, i % 3) for i in range(40)]


def test_odd_columns_of_parquet(server):
    images = pyarrow.array([{"bytes": picture(i), "path": None} for i in range(4)], IMAGE)
    texts = pyarrow.array([["a", "b"], ["c"], ["d"], ["e"]])
    missing = pyarrow.array([{"bytes": None, "path": "/etc/hostname"}] * 4, IMAGE)
    small, large = (pyarrow.array([0, 1, 0, 1], kind) for kind in (pyarrow.int8(), pyarrow.int64()))
    for name, columns in (
        ("train-0", {"image": images, "label": small, "captions": texts}),
        ("train-1", {"image": missing, "label": large, "captions": texts}),
        ("test", {"image": images[:0], "label": small[:0], "captions": texts[:0]}),
    ):
        content = io.BytesIO()
        parquet.write_table(pyarrow.table(columns), content)
        server.files[f"/{name}.parquet"] = Served(content.getvalue())
    tokens = "decode|tokenize('captions', 'characters', 8)"
    dataset = opened(f"{server.address}/{{train-0,train-1,test}}.parquet", preprocess=tokens)
    assert dataset.source[0]["captions"] == ["a", "b"]
    assert dataset.labels().tolist() == [0, 1] * 4
    with pytest.raises(UserError, match="example 4 of .*: the image is missing"):
        dataset.example(4, np.random.default_rng(0))
    content, columns = io.BytesIO(), {"image": images, "label": ["a", "b", "a", "b"]}
    parquet.write_table(pyarrow.table(columns), content)
    server.files["/train-1.parquet"] = Served(content.getvalue())
    with pytest.raises(UserError, match="files of 'train' differ in the type of label"):
        opened(f"{server.address}/{{train-0,train-1}}.parquet")


def test_a_server_without_parts_of_files(server):
    dataset = opened(serve(server, "parquet", 1))
    server.files["/train-00.parquet"].faults = [{"whole": True}]
    with pytest.raises(UserError, match="sends no parts of files; copy it"):
        dataset.example(0, np.random.default_rng(0))


def test_damaged_files_are_named(server):
    for kind in PACKERS:
        name = serve(server, kind, 1)
        file = server.files[f"/train-00.{kind}"]
        file.body = file.body[:-600] + b"x" * 600
        with pytest.raises(UserError, match=r"train-00\.(parquet is damaged|tar cannot be read)"):
            opened(name)


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    from huggingface_hub import HfFileSystem

    pose_as_hub(server, monkeypatch, tmp_path / "hub")
    remote.file_system.cache_clear()
    HfFileSystem.clear_instance_cache()
    yield server
    remote.file_system.cache_clear()
    HfFileSystem.clear_instance_cache()


def push(server: FileServer, name: str, files: dict[str, bytes]) -> None:
    """What the hub answers about a repository of data with one commit."""
    described = json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode()
    for path in ("", "/revision/main", f"/revision/{COMMIT}"):
        server.files[f"/api/datasets/{name}{path}"] = Served(described, JSON)
    folders = {file.rpartition("/")[0] for file in files} - {""}
    entries = [{"type": "directory", "path": folder, "oid": "d" * 40} for folder in folders]
    for i, (file, body) in enumerate(files.items(), 1):
        entries.append({"type": "file", "path": file, "size": len(body), "oid": f"{i:040x}"})
    for folder in {"", *(f"/{folder}" for folder in folders)}:
        tree = [entry for entry in entries if f"/{entry['path']}".startswith(f"{folder}/")]
        path = f"/api/datasets/{name}/tree/{COMMIT}{folder}?recursive=true&expand=false"
        server.files[path] = Served(json.dumps(tree).encode(), JSON)
    for file, body in files.items():
        server.files[f"/datasets/{name}/resolve/{COMMIT}/{file}"] = Served(body)


@pytest.mark.parametrize("kind", PACKERS)
def test_repositories_of_the_hub(hub, kind):
    pack = PACKERS[kind]
    files = {
        "README.md": b"text",
        f"data/train-00000-of-00002.{kind}": pack(0, 40),
        f"data/train-00001-of-00002.{kind}": pack(40, 40),
        f"data/validation-00000-of-00001.{kind}": pack(80, 5),
    }
    push(hub, "some/photos", files)
    for name in ("hf://datasets/some/photos", f"hf://datasets/some/photos@{COMMIT}/data"):
        assert values(opened(name)) == [(i, i % 3) for i in range(80)]
        assert values(opened(name, "test")) == [(i, i % 3) for i in range(80, 85)]
    assert all(COMMIT in path for path in hub.requests if "resolve" in path)


def test_what_a_repository_lacks_is_said(hub):
    two = {f"{part}/train-0.parquet": table(0, 20) for part in ("large", "small")}
    push(hub, "some/sets", two)
    push(hub, "some/texts", {"README.md": b"text"})
    one = "hf://datasets/some/sets/large"
    with pytest.raises(UserError, match=f"several sets; name one: {one}, "):
        opened("hf://datasets/some/sets")
    assert opened(one).num_examples == 20
    for name, message in (
        ("hf://datasets/some/texts", "no .parquet or .tar among its 1 file"),
        ("hf://datasets/some/gated", r"404.*HF_TOKEN"),
        ("hf://some/photos", "must be like hf://datasets/OWNER/NAME"),
        ("s3://some/photos", "must be a path, or hf://"),
        (f"{hub.address}/folder", "lists no folder; name files"),
        (f"{hub.address}/none.tar", "none.tar"),
        (f"{hub.address}/{{0..999999}}.tar", "names no file, or over 100,000"),
    ):
        with pytest.raises(UserError, match=message) as error:
            opened(name)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"on_bad_image='skip': not for files on servers"):
        opened(one, on_bad_image="skip")
    with pytest.raises(UserError, match=r"dataset\.cache_gib: .* GiB are needed in"):
        remote.check_room("dataset.cache_gib", 1 << 60)


def test_parquet_of_this_machine(tmp_path):
    data = tmp_path / "photos/data"
    data.mkdir(parents=True)
    (tmp_path / "photos/README.md").write_text("as `hf download` leaves it")
    for name, first, count in (("train-00", 0, 40), ("train-01", 40, 40), ("test-00", 80, 5)):
        (data / f"{name}.parquet").write_bytes(table(first, count))
    (one := tmp_path / "plain.parquet").write_bytes(table(0, 20, told={}))
    for name in (str(tmp_path / "photos"), str(data), f"{data}/{{train-00,train-01}}.parquet"):
        assert values(opened(name)) == [(i, i % 3) for i in range(80)]
    assert values(opened(str(data), "test")) == [(i, i % 3) for i in range(80, 85)]
    for split in ("train", "test"):  # as `refs/convert/parquet` has it, of one configuration
        (folder := tmp_path / "converted/default" / split).mkdir(parents=True)
        (folder / "0000.parquet").write_bytes(table(0, 20))
    (tmp_path / "photos/assets").mkdir()
    assert opened(str(tmp_path / "photos")).num_examples == 80
    assert opened(str(tmp_path / "converted")).num_examples == 20
    unnamed = opened(str(one))  # as other libraries than `datasets` write it
    assert (unnamed.class_names, values(unnamed)[7]) == (("0", "1", "2"), (7, 1))
    size = sum(path.stat().st_size for path in data.iterdir())
    small = opened(str(data), cache_gib=size / 2 / 2**30)
    assert small.source.windows is not None
    (data / "train-01.parquet").write_bytes(table(40, 40)[:-100])
    with pytest.raises(UserError, match=r"data/train-01\.parquet is damaged"):
        opened(str(tmp_path / "photos"))
    with pytest.raises(UserError, match=r"x\.parquet, .*y\.parquet cannot be read: No such file"):
        opened(f"{data}/{{x,y}}.parquet")


def test_damaged_images_of_this_machine(tmp_path):
    content = table(0, 20, write_page_checksum=False, compression="none")
    (tmp_path / "train.parquet").write_bytes(content.replace(picture(7), b"x" * len(picture(7))))
    with pytest.raises(UserError, match=r"train\[7\]"):
        opened(str(tmp_path / "train.parquet"))
    assert opened(str(tmp_path / "train.parquet"), on_bad_image="skip").num_examples == 19


@pytest.mark.parametrize("kind", PACKERS)
def test_buckets(bucket, tmp_path, kind):
    to_path(f"{bucket}/set")
    for name, body in (("train-0", PACKERS[kind](0, 30)), ("test-0", PACKERS[kind](30, 5))):
        (tmp_path / f"{name}.{kind}").write_bytes(body)
        bucket_files().put_file(str(tmp_path / f"{name}.{kind}"), f"{bucket}/set/{name}.{kind}")
    assert values(opened(f"{bucket}/set")) == [(i, i % 3) for i in range(30)]
    assert values(opened(f"{bucket}/set", "test")) == [(i, i % 3) for i in range(30, 35)]
