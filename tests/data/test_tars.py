"""WebDataset tars: names, splits, labels, columns, links, and what is refused: cuts, damage."""

import gzip
import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest

from tests.data.test_arrow import png, values
from vit_jax.data.datasets import create_dataset
from vit_jax.data.remote import splits_of
from vit_jax.data.tars import find_tars
from vit_jax.errors import UserError
from vit_jax.files import paths


def sample(number, label):
    return {"png": png(number), "cls": str(label).encode(), "txt": f"a {number}".encode()}


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def link(archive, name, target, kind=tarfile.LNKTYPE):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    archive.addfile(member)


def write(path, samples):
    """A tar of {key: {ending: bytes}}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for key, members in samples.items():
            for ending, content in members.items():
                add(archive, f"{key}.{ending}", content)
    return path


def opened(path, preprocess="decode", **options):
    return create_dataset(name=str(path), split="train", preprocess=preprocess, **options)


def refuses(path, message, **options):
    with pytest.raises(UserError, match=message) as error:
        opened(path, **options)
    assert str(error.value).isprintable()


@pytest.fixture
def root(tmp_path):
    """Two tars of 5 images for training, one of 4 to hold out; classes 0, 2 and 10."""
    labels = [0, 2, 10]
    for name, first, count in (("train-000", 0, 5), ("train-001", 5, 5), ("val-000", 50, 4)):
        samples = {f"d/{i:03}": sample(i, labels[i % 3]) for i in range(first, first + count)}
        write(tmp_path / "data" / f"{name}.tar", samples)
    return tmp_path / "data"


@pytest.mark.parametrize("pattern", ["", "/{train,val}-{000..001}.tar"])
def test_all_tars_are_read_in_order(root, pattern):
    if pattern:
        write(root / "val-001.tar", {})
    options = {"name": f"{root}{pattern}", "preprocess": "decode"}
    dataset = create_dataset(**options, split="train+test").check()
    assert dataset.class_names == ("0", "2", "10")
    expected = [[i % 3, i] for i in (*range(10), *range(50, 54))]
    assert values(pickle.loads(pickle.dumps(dataset))) == expected
    assert dataset.labels().tolist() == [label for label, _ in expected]
    assert dataset.source.describe(6) == f"{root}/train-001.tar: d/006.png"
    before = dataset.fingerprint
    os.utime(root / "train-000.tar", (1, 1))
    assert create_dataset(**options, split="train+test").fingerprint == before
    write(root / "train-001.tar", {f"d/{i:03}": sample(i, [2, 10, 0][i % 3]) for i in range(5, 10)})
    assert create_dataset(**options, split="train+test").fingerprint != before


@pytest.mark.parametrize("how", ["in place", "moved"])
def test_a_rebuilt_tar_has_its_new_labels(root, how):
    """Of the same size and time, as cp -p, rsync -t and touch -d leave them."""
    tar, other = root / "train-000.tar", root / "other"
    before, stat = opened(root).labels().tolist(), tar.stat()
    write(other, {f"d/{i:03}": sample(i, [10, 0, 2][i % 3]) for i in range(5)})
    tar.write_bytes(other.read_bytes()) if how == "in place" else other.rename(tar)
    os.utime(tar, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert tar.stat().st_size == stat.st_size
    assert opened(root).labels().tolist() == [2, 0, 1, 2, 0, *before[5:]]


def test_names_and_json_are_labels_and_columns_too(tmp_path):
    given = [("ant", {"label": "ant", "title": "x"}), ("bee", {"label": "bee", "title": "y"})]
    samples = {
        f"{i}": {"JSON": json.dumps(fields).encode(), "PNG": png(i)}
        for i, (_, fields) in enumerate(given)
    }
    path = str(write(tmp_path / "a.tar", samples))
    dataset = create_dataset(
        name=path, split="train", preprocess="decode|tokenize('title', length=2)"
    )
    assert dataset.class_names == ("ant", "bee")
    texts = [dataset.example(i, np.random.default_rng(0))["text"].tolist() for i in range(2)]
    assert texts[0][0] + 1 == texts[1][0]  # x, y
    unlabelled = write(tmp_path / "b.tar", {"1": {"png": png(1), "txt": b"x"}})
    dataset = create_dataset(
        name=str(unlabelled), split="train", preprocess="decode|tokenize('txt', length=2)", needs=()
    )
    assert dataset.element_spec.keys() == {"image", "text"}
    assert dataset.example(0, np.random.default_rng(0))["text"].tolist() == texts[0]


def test_which_folders_hold_tars(root, tmp_path):
    assert len(find_tars(str(root))) == 3
    for split in ("Training", "seg_val"):
        write(tmp_path / "deep" / split / "0.tar", {})
    paths = find_tars(str(tmp_path / "deep"))
    assert splits_of("x", paths) == ["train", "val"]
    (tmp_path / "deep" / "Training" / "ant").mkdir()  # a folder of images beside its archive
    assert find_tars(str(tmp_path / "deep")) == []
    assert find_tars(str(tmp_path / "nowhere")) == []
    assert find_tars("/x/{08..11}{a,b}.tar")[::3] == ["/x/08a.tar", "/x/09b.tar", "/x/11a.tar"]


def test_what_is_missing_or_damaged_is_named(root):
    def fails(name, message, preprocess="decode", **options):
        with pytest.raises(UserError, match=message):
            create_dataset(name=f"{root}{name}", split="train", preprocess=preprocess, **options)

    fails("/train-{000..002}.tar", r"train-002.tar cannot be read: No such file")
    write(root / "more.tar", {"1": sample(1, 0), "2": {"png": png(2)}})
    fails("/more.tar", r"1 image without KEY.cls or 'label' in KEY.json, first .*2.png")
    message = "without KEY.caption or 'caption' in KEY.json"
    fails("/more.tar", message, "decode|tokenize", needs=())
    write(root / "more.tar", {"1": {"txt": b"x"}})
    fails("/more.tar", r"no images in 1 tar \(.*/more.tar\)")
    (root / "train-001.tar").write_bytes(b"x" * 2000)
    fails("", r"train-001.tar cannot be read: .*(header|read)")


def test_a_tar_that_changes_during_a_run_is_an_error_of_its_example(root):
    dataset, tar = opened(root), root / "train-000.tar"
    whole = tar.read_bytes()
    write(tar, {f"e/{i:03}": sample(i + 100, i % 2) for i in range(5)})
    for content in (whole[:600], tar.read_bytes(), b""):
        tar.write_bytes(content)
        with pytest.raises(UserError, match=r"example 4 of .*d/004.png\): the tar has changed"):
            dataset.example(4, np.random.default_rng(0))
    tar.write_bytes(whole)
    assert values(dataset)[4] == [1, 4]


def test_a_cut_tar_is_refused_or_whole(tmp_path):
    path = tmp_path / "a.tar"
    samples = {f"{i}": sample(i, i % 2) for i in range(4)} | {"n" * 120: sample(5, 1)}
    whole = write(path, samples).read_bytes()
    expected = values(opened(path))
    end = -(-len(whole.rstrip(b"\0")) // 512) * 512 + 1024
    for length in range(0, len(whole), 256):
        path.write_bytes(whole[:length])
        if length < end:
            refuses(path, "a.tar cannot be read: ")
        else:
            assert values(opened(path)) == expected
    path.write_bytes(whole[:2048])
    refuses(path, r"cut: no end marker after 2 members; copy it")


def test_a_damaged_header_is_not_the_end(tmp_path):
    path = tmp_path / "a.tar"
    whole = write(path, {f"{i}": sample(i, i % 2) for i in range(4)}).read_bytes()
    more = write(tmp_path / "b.tar", {"9": sample(9, 0)}).read_bytes()
    start = 2048  # of the third member's header
    assert whole[start : start + 5] == b"0.txt"
    for place in (start, start + 130, start + 150, start + 400):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        refuses(path, "data follow its end after 2 members: damaged")
    for content in (
        whole[:start] + bytes(512) + whole[start + 512 :],
        whole + more,
        whole + b"x",
        whole + bytes(2 << 20),
    ):
        path.write_bytes(content)
        refuses(path, r"data follow its end after \d+ members: damaged, or joined without tar -A")
    path.write_bytes(gzip.compress(whole))
    refuses(path, "cannot be read: [a-z ]*header")
    path.write_bytes(b"")
    refuses(path, "cannot be read: empty file")


def header(name, size, kind=b"0"):
    """A header whose size may be anything, with the right checksum."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    block[124:136] = (
        b"\xff" * 4 + size.to_bytes(8, "big", signed=True)
        if size < 0
        else (b"\x80" + size.to_bytes(11, "big"))
    )
    block[156:157], block[148:156] = kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def extended(*records, kind=b"x"):
    content = b"".join(records)
    return header("x", len(content), kind) + content + bytes(-len(content) % 512)


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (header("1.png", -1), "1.png is sparse, split"),
        (header("1.png", -1024), "1.png is sparse, split"),
        (header("1.png", 1 << 80), "offset-sized integer"),
        (header("L", 1 << 60, b"L"), "MemoryError"),
        (header("x", 1 << 60, b"x"), "MemoryError"),
        (header("3.png", 512, b"S") + bytes(512), "3.png is sparse, split"),
        (header("3.png", 512, b"M") + bytes(512), "3.png is sparse, split"),
        (extended(b"14 size=-1024\n") + header("3.png", 0), "3.png is sparse, split"),
        (extended(b"99 path=3.png\n"), "cannot be read: "),
    ],
    ids=range(9),
)
def test_headers_are_bounded(tmp_path, attack, message):
    path = tmp_path / "a.tar"
    whole = write(path, {"1": sample(1, 0), "2": sample(2, 1)}).read_bytes().rstrip(b"\0")
    path.write_bytes(whole + bytes(-len(whole) % 512) + attack + bytes(10240))
    refuses(path, message)


def test_links_are_what_they_link_to(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for i in (0, 1):
            add(archive, f"./{i}.png", png(i))
            add(archive, f"./{i}.cls", b"%d" % i)
        add(archive, "./texts/one.txt", b"1")
        link(archive, "./2.png", "./1.png")
        link(archive, "./2.cls", "./0.cls")
        link(archive, "./1.png", "./1.png")  # what GNU tar writes of a file that is given twice
        link(archive, "./d/3.png", "../2.png", tarfile.SYMTYPE)
        link(archive, "./d/3.cls", "../texts/one.txt", tarfile.SYMTYPE)
        link(archive, "./README", "nowhere", tarfile.SYMTYPE)
        add(archive, "./0.png", png(7))  # as added by tar -r
        add(archive, "1.cls", b"0")  # the same path
    assert values(opened(path)) == [[0, 7], [0, 1], [0, 1], [1, 1]]


@pytest.mark.parametrize(
    "links",
    [
        {"3.png": ("9.png", tarfile.LNKTYPE)},
        {"3.png": ("9.png", tarfile.SYMTYPE)},
        {"3.png": ("/etc/passwd", tarfile.SYMTYPE)},
        {"3.png": ("../../etc/passwd", tarfile.SYMTYPE)},
        {"3.png": ("3.png", tarfile.SYMTYPE)},
        {"3.png": ("4.png", tarfile.SYMTYPE), "4.png": ("3.png", tarfile.SYMTYPE)},
    ],
)
def test_links_to_nothing_are_named(tmp_path, links):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        add(archive, "1.png", png(1))
        for name, (target, kind) in links.items():
            link(archive, name, target, kind)
    refuses(path, r"3.png is a link to no file in it: pack with tar -h", needs=())


@pytest.mark.parametrize(
    ("ending", "content", "message"),
    [
        ("cls", b"a" * 5000, "3.cls, or the label in it, is too large"),
        ("json", b'{"label": "' + b"a" * 5000 + b'"}', "3.json, or the label in it, is too large"),
        ("json", b" " * 2000 + b'{"label": 1}', "3.json, or the label in it, is too large"),
        ("json", b"[" * 100_000, "1 image without KEY.cls or 'label' in KEY.json, first 3.png"),
        ("json", b"[1]", "1 image without KEY.cls or 'label' in KEY.json, first 3.png"),
        ("cls", b"\xff", "class .* must be a single line of UTF-8"),
        ("n" * 5000, b"", "3.n+ is sparse, split, or has a name over 4,096"),
        ("PNG", png(3), "3.PNG is there twice, in upper and lower case"),
    ],
)
def test_labels_and_names_are_bounded(tmp_path, monkeypatch, ending, content, message):
    monkeypatch.setattr(paths, "LARGEST_TEXT", 2000 if content.startswith(b" ") else 1 << 20)
    samples = {"1": sample(1, "a"), "3": {"png": png(3), ending: content}}
    refuses(write(tmp_path / "a.tar", samples), message)


@pytest.mark.parametrize(
    ("ending", "content", "message"),
    [
        ("note", b"\xff", "1.note has no text 'note': UnicodeDecodeError"),
        ("json", b"[" * 100_000, "1.json has no text 'note': .*nested too deep"),
        ("json", b"[1]", "1.json has no text 'note'"),
        ("json", b"{}", "1.json has no text 'note'"),
        ("note", b"a" * (1 << 21), "1.note has more than 1 MiB"),
    ],
)
def test_texts_are_read_or_named(tmp_path, monkeypatch, ending, content, message):
    monkeypatch.setattr(paths, "LARGEST_TEXT", 1 << 20)
    path = write(tmp_path / "a.tar", {"1": sample(1, 0) | {ending: content}})
    dataset = opened(path, "decode|tokenize('note', length=2)", needs=())
    with pytest.raises(UserError, match=rf"example 0 of .*a.tar: 1.png\): {message}"):
        dataset.example(0, np.random.default_rng(0))


@pytest.mark.parametrize(
    "pattern", ["{000000..100000}", "{0..99999999999}", "{9..0}", "{0..999}{0..999}", "{0..9}" * 6]
)
def test_patterns_are_bounded(pattern):
    refuses(f"/x/{pattern}.tar", "names no file, or over 100,000: check its braces")


def test_a_pattern_may_be_longer_than_a_name(root):
    names = [f"{i:03}" for i in range(100)]
    pattern = f"{root}/train-{{{','.join(names)}}}.tar"
    refuses(pattern, r"train-005.tar and 94 more cannot be read: No such file")
    for name in names[2:]:
        os.link(root / "val-000.tar", root / f"train-{name}.tar")
    assert len(opened(pattern).source) == 10 + 98 * 4


def test_what_is_no_file_is_refused(tmp_path):
    for name, make in {
        "pipe": os.mkfifo,
        "folder": os.mkdir,
        "zero": lambda path: os.symlink("/dev/zero", path),
    }.items():
        make(tmp_path / f"{name}.tar")
        refuses(tmp_path / f"{name}.tar", f"{name}.tar cannot be read: it is a folder or a device")
    refuses(tmp_path / "{a,b}.tar", r"/a.tar, .*/b.tar cannot be read: No such file")


def test_the_split_of_a_tar_is_in_its_name(caplog):
    for names, splits in {
        ("/test/Train-0.tar", "/test/imagenet_validation_000.tar"): ["train", "validation"],
        ("/data/Testing/0.tar",): ["test"],
        ("/my_test/0.tar", "/my_test/1.tar"): ["train", "train"],
    }.items():
        assert splits_of("x", list(names)) == splits
    assert not caplog.records
    assert splits_of("x", ["/d/val-0.tar", "/d/held_out.tar"]) == ["val", "train"]
    assert "no split in the name of /d/held_out.tar: used as 'train'" in caplog.text


def test_masks_and_thumbnails_are_no_images(tmp_path, caplog):
    others = {"0.orig.png": png(0), "thumb.jpg": png(0), "zz.mask.png": png(0)}
    given = {f"{i}": {**others, **sample(i + 1, i)} for i in range(3)}
    path = write(tmp_path / "a.tar", {**given, "about": {"txt": b"x"}})
    dataset = create_dataset(name=str(path), split="train", preprocess="decode")
    assert values(dataset) == [[0, 1], [1, 2], [2, 3]]
    assert "a.tar: no image in 1 of its samples: about" in caplog.text


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"1": {"jpg": png(1), "png": png(2), "cls": b"0"}}, "1.jpg, 1.png in one sample, '1'"),
        ({"cat": {"1.jpg": png(1), "2.jpg": png(2)}}, "cat.1.jpg, cat.2.jpg in one sample"),
        ({"1": {"rgb.png": png(1), "cls": b"0"}}, "1.rgb.png in .*; call its image KEY.jpg"),
    ],
)
def test_samples_that_are_not_one_image(tmp_path, samples, message):
    path = write(tmp_path / "a.tar", samples)
    with pytest.raises(UserError, match=message):
        create_dataset(name=str(path), split="train", preprocess="decode")


def test_parts_of_sorted_samples_have_every_class(tmp_path):
    path = write(tmp_path / "a" / "train.tar", {f"{i:02}": sample(i, i // 10) for i in range(30)})
    parts = []
    for split, count in (("train[:70%]", 7), ("train[70%:]", 3)):
        dataset = create_dataset(name=str(path), split=split, preprocess="decode")
        assert np.bincount(dataset.labels()).tolist() == [count] * 3
        parts.append(values(dataset))
    path.parent.rename(tmp_path / "b")
    moved = create_dataset(name=f"{tmp_path}/b", split="train[:70%]", preprocess="decode")
    assert values(moved) == parts[0]
