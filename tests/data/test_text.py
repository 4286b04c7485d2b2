"""Texts as ids, against the libraries that the vocabularies come from."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.peers import import_transformers
from vit_jax.data.datasets import create_dataset
from vit_jax.data.glyphs import CLASSES
from vit_jax.data.preprocess import parse
from vit_jax.data.text import Tokenize
from vit_jax.errors import UserError

AWKWARD = (
    "",
    " \t\n",
    "The cat  sat on\nthe MAT.",
    "don't un-do it!? (no) #1",
    "Ünïcødé naïve cafés",
    "İstanbul 5 kg",
    "photo of 猫 and dogs",
    "a\u200bb\u00adc \u2028 d\u3000e \ufb01ne \u00bd",
    "\U0001f431 cats\ufffd\x00",
    "x" * 120,
)
PIECES = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat", "on", "mat"]
PIECES += [
    *"abcdefghijklmnopqrstuvwxyz0123456789.,!?'-()#",
    *(f"##{letter}" for letter in "abcdefgin"),
]
PIECES += [
    "un",
    "do",
    "photo",
    "of",
    "and",
    "dog",
    "猫",
    "nai",
    "##ve",
    "cafe",
    "##\u0307",
    "[MASK]",
]


def vocab_size(vocab: str) -> int:
    return Tokenize(vocab=vocab).num_tokens


def create_tokenizer(vocab: str, length: int) -> Callable[[str], np.ndarray]:
    op, rng = Tokenize("caption", vocab, length), np.random.default_rng(0)
    return lambda text: op({"caption": text}, rng)["text"]


@pytest.fixture
def wordpieces(tmp_path: Path) -> str:
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{piece}\n" for piece in PIECES), encoding="utf-8")
    return str(path)


def test_wordpieces_are_those_of_bert(wordpieces: str) -> None:
    """Those of BERT's own Python code. LiT puts [CLS] before them and nothing behind."""
    import_transformers()
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    theirs = BertTokenizerLegacy(wordpieces)
    rng = np.random.default_rng(0)
    pool = np.array([*"abcdefgis 猫.,'ÀßŒé\u0301\u200d\u00a0\t\u0661ªⅣ"])
    random = ["".join(rng.choice(pool, size)) for size in range(2, 100)]
    for length in (1, 2, 7, 200):
        ours = create_tokenizer(wordpieces, length)
        for text in (*AWKWARD, *random):
            ids = [3, *theirs.convert_tokens_to_ids(theirs.tokenize(text))][:length]
            expected = np.array(ids + [0] * (length - len(ids)), np.int32)
            tokens = ours(text)
            np.testing.assert_array_equal(tokens, expected, err_msg=text)
            assert tokens.dtype == np.int32
    assert {*create_tokenizer(wordpieces, 9)("The CATS")} == {3, 5, 6, 7, 0}
    assert vocab_size(wordpieces) == len(PIECES)


@pytest.fixture(scope="module")
def sentencepieces(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a model that is trained here, with the ids of T5's."""
    package = pytest.importorskip("sentencepiece")
    lines = [f"a photo of {name} small cats, in the {name}. park!" for name in CLASSES] * 5
    path, model = tmp_path_factory.mktemp("pieces") / "spiece.model", io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, *AWKWARD[2:]]),
        model_writer=model,
        vocab_size=120,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return str(path)


def test_sentencepieces_end_in_their_end(sentencepieces: str) -> None:
    """As big_vision's `tokenize(eos="sticky", pad_value=1)`."""
    package = pytest.importorskip("sentencepiece")
    theirs = package.SentencePieceProcessor(model_file=sentencepieces)
    for length in (1, 2, 7, 200):
        for text in AWKWARD:
            lowered = "".join(letter.lower() if letter.isascii() else letter for letter in text)
            ids = [*theirs.encode(lowered)[: length - 1], 1]
            expected = ids + [1] * (length - len(ids))
            tokens = create_tokenizer(sentencepieces, length)(text)
            np.testing.assert_array_equal(tokens, expected, err_msg=text)
            assert tokens.dtype == np.int32
    assert vocab_size(sentencepieces) == theirs.get_piece_size()


def test_sentencepieces_of_siglip_are_those_of_transformers(sentencepieces: str) -> None:
    theirs = import_transformers().SiglipTokenizer(sentencepieces)
    op, rng = Tokenize("caption", sentencepieces, 24, "siglip"), np.random.default_rng(0)
    options = {"padding": "max_length", "max_length": 24, "truncation": True}
    for text in AWKWARD:
        expected = theirs([text], **options)["input_ids"][0]
        tokens = op({"caption": text}, rng)["text"]
        np.testing.assert_array_equal(tokens, expected, err_msg=repr(text))


def test_characters_need_no_file() -> None:
    tokenize = create_tokenizer("characters", 6)
    np.testing.assert_array_equal(tokenize("a b"), [68, 3, 69, 1, 1, 1])
    np.testing.assert_array_equal(tokenize(""), [1] * 6)
    np.testing.assert_array_equal(tokenize("~\u00e9~~~~~~"), [97, 2, 97, 97, 97, 1])
    assert vocab_size("characters") == 98
    texts = {tokenize(name).tobytes() for name in CLASSES}
    assert len(texts) == len(CLASSES)


def test_names_of_glyphs() -> None:
    dataset = create_dataset(name="glyphs(size=8)", split="test", preprocess="decode|tokenize")
    tokenize = create_tokenizer("characters", 16)
    for i, name in enumerate(CLASSES):
        tokens = dataset.example(i, np.random.default_rng(0))["text"]
        np.testing.assert_array_equal(tokens, tokenize(name))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", None, "cannot be read: No such file"),
        ("vocab.txt", b"[PAD]\n[UNK]\n", r"cannot be read: it has no \[CLS\]"),
        ("vocab.txt", b"\xff\n", "cannot be read"),
        ("vocab.txt", b"", r"cannot be read: it has no \[CLS\]"),
        ("vocab.txt", b"[CLS]\n[UNK]\na\nb\na\n", "cannot be read: only 4 of its 5 pieces differ"),
        ("spiece.model", b"junk", "cannot be read|needs the package sentencepiece"),
        ("vocab.bpe", b"", r"neither 'characters' nor a .txt or .model"),
    ],
)
def test_a_vocabulary_that_is_none_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"vocab='{path}' .*({message})|{message}") as caught:
        vocab_size(str(path))
    assert "\n" not in str(caught.value)
    for length in (0, 1 << 17):
        with pytest.raises(UserError, match=f"length={length} must be from 1 to 65,536"):
            parse(f"decode|tokenize(length={length})")
    with pytest.raises(UserError, match="gs://b.*not a folder in a bucket"):
        vocab_size("gs://b/vocab.txt")


def test_a_vocabulary_is_a_file(tmp_path):
    for kind in ("txt", "model"):
        os.mkfifo(tmp_path / f"pipe.{kind}")
        (tmp_path / f"zero.{kind}").symlink_to("/dev/zero")
        with open(tmp_path / f"large.{kind}", "wb") as file:
            file.truncate(1 << 30)
        for name, reason in (("pipe", "a device"), ("zero", "a device"), ("large", "64 MiB")):
            with pytest.raises(UserError, match=f"cannot be read: it .*{reason}"):
                vocab_size(str(tmp_path / f"{name}.{kind}"))


def test_lines_of_other_systems(wordpieces: str) -> None:
    other = Path(wordpieces).with_name("other.txt")
    content = Path(wordpieces).read_bytes()
    other.write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"))
    assert vocab_size(str(other)) == len(PIECES)
    text = "The CATS sat"
    np.testing.assert_array_equal(
        create_tokenizer(str(other), 9)(text), create_tokenizer(wordpieces, 9)(text)
    )


def test_a_cut_sentencepiece_model_is_refused(sentencepieces: str, tmp_path: Path) -> None:
    """Also between two pieces, where the package reads a smaller model."""
    pb = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    content = Path(sentencepieces).read_bytes()
    pieces = pb.ModelProto(pieces=pb.ModelProto.FromString(content).pieces[:30]).SerializeToString()
    assert content.startswith(pieces)
    for count in (1, 100, len(pieces), len(content) // 2):
        (tmp_path / f"{count}.model").write_bytes(content[:count])
        with pytest.raises(UserError, match="cannot be read"):
            vocab_size(str(tmp_path / f"{count}.model"))
