"""Tokenizes texts to a fixed length.

A vocabulary is `characters` (printable ASCII, no file needed), or a path that ends in

* `.txt`, BERT's WordPieces: lower-cased, [CLS] first, padded with 0 (LiT);
* `.model`, SentencePiece: ASCII lower-cased, the end-of-text token last, even if truncated,
  padded with it (SigLIP with T5's `c4_en`).
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.data.ops import Example, Op, Rng
from vit_jax.errors import UserError, as_user_error, import_extra, one_line
from vit_jax.files.paths import LARGEST_TEXT, read_file

CHARACTERS = "characters"
_END, _UNKNOWN, _FIRST = 1, 2, 3  # of `characters`, as in T5's vocabularies; 0 is padding


class Vocabulary(NamedTuple):
    """A tokenizer."""

    encode: Callable[[str, int], list[int]]  # (text, max. length), with special tokens
    size: int  # number of ids
    fill: int  # padding id


@dataclasses.dataclass(frozen=True)
class Tokenize(Op):
    """The text of a column -> `text`, int32 [length]: longer texts are truncated."""

    column: str = "caption"
    vocab: str = CHARACTERS
    length: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.length <= 1 << 16:
            raise ValueError(f"length={self.length} must be from 1 to 65,536")

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def num_tokens(self) -> int:
        """Vocabulary size for models of such texts; for UserErrors see `load_vocabulary`."""
        return load_vocabulary(self.vocab).size

    def __call__(self, example: Example, _rng: Rng) -> Example:
        vocabulary = load_vocabulary(self.vocab)
        text = np.full(self.length, vocabulary.fill, np.int32)
        tokens = vocabulary.encode(example[self.column], self.length)
        text[: len(tokens)] = tokens
        return {**example, "text": text}


@functools.cache  # once per process
def load_vocabulary(vocab: str) -> Vocabulary:
    """By name or path, also in a bucket; UserError if it is missing, damaged, or needs an extra."""
    if vocab == CHARACTERS:
        return _characters()
    kind = _KINDS.get(os.path.splitext(vocab)[1])
    if kind is None:
        raise UserError(f"vocab={vocab!r} is neither {CHARACTERS!r} nor a {' or '.join(_KINDS)}.")
    try:
        return kind(read_file(vocab, LARGEST_TEXT))
    except UserError:
        raise
    except Exception as error:  # both packages raise plain Exceptions
        raise as_user_error(f"vocab={vocab!r} cannot be read: {one_line(error)}.", error) from error


def _characters() -> Vocabulary:
    numbers = {chr(code): i for i, code in enumerate(range(32, 127), start=_FIRST)}

    def encode(text: str, most: int) -> list[int]:
        return [*(numbers.get(letter, _UNKNOWN) for letter in text[: most - 1]), _END]

    return Vocabulary(encode, _FIRST + len(numbers), _END)


def _sentencepiece(data: bytes) -> Vocabulary:
    package = import_extra("vocab", "sentencepiece", "text")
    model = package.SentencePieceProcessor(model_proto=data)
    end = model.eos_id()
    proto = import_extra("vocab", "sentencepiece.sentencepiece_model_pb2", "text").ModelProto
    # What normalises is stored behind the pieces, which sentencepiece reads as far as they go.
    if end < 0 or not proto.FromString(data).HasField("normalizer_spec"):
        raise ValueError("it has no end-of-text token, or is cut")

    def encode(text: str, most: int) -> list[int]:
        text = text.encode().lower().decode()  # as in TensorFlow, ASCII only
        return [*model.encode(text)[: most - 1], end]

    return Vocabulary(encode, model.get_piece_size(), end)


def _wordpiece(data: bytes) -> Vocabulary:
    package = import_extra("vocab", "tokenizers", "text")
    pieces = data.decode("utf-8-sig").replace("\r\n", "\n").rstrip("\n").split("\n")
    numbers = {piece: i for i, piece in enumerate(pieces)}
    if len(numbers) < len(pieces):
        raise ValueError(f"only {len(numbers)} of its {len(pieces)} pieces differ")
    if missing := {"[CLS]", "[UNK]"} - numbers.keys():
        raise ValueError(f"it has no {min(missing)}")
    tokenizer = package.Tokenizer(package.models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = package.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()

    def encode(text: str, most: int) -> list[int]:
        return [numbers["[CLS]"], *tokenizer.encode(text).ids][:most]

    return Vocabulary(encode, len(numbers), 0)


_KINDS = {".txt": _wordpiece, ".model": _sentencepiece}
