"""Tokenizes texts to a fixed length.

A vocabulary is `characters` (printable ASCII, no file needed), or a path that ends in

* `.txt`, BERT's WordPieces: lower-cased, [CLS] first, padded with 0 (LiT);
* `.model`, SentencePiece: ASCII lower-cased, the end-of-text token last, even if truncated,
  padded with it (SigLIP with T5's `c4_en`);
* `.json`, a `tokenizer.json` of Hugging Face, which says itself what it does with a text; padded as
  the `tokenizer_config.json` beside it says (CLIP, SigLIP 2);
* `.gz`, OpenAI's `bpe_simple_vocab_16e6.txt.gz`: between start and end of text, padded with 0.
"""

import dataclasses
import functools
import gzip
import html
import os
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.ops import Example, Op, Rng
from vit_jax.errors import UserError, as_user_error, import_extra, one_line
from vit_jax.files.paths import LARGEST_TEXT, read_file, read_object, reading, to_path
from vit_jax.kinds import check_known

CHARACTERS = "characters"
_END, _UNKNOWN, _FIRST = 1, 2, 3  # of `characters`, as in T5's vocabularies; 0 is padding


class Vocabulary(NamedTuple):
    """A tokenizer."""

    encode: Callable[[str, int], list[int]]  # (text, max. length), with special tokens
    size: int  # number of ids
    fill: int  # padding id
    pads_left: bool = False


@dataclasses.dataclass(frozen=True)
class Tokenize(Op):
    """The text of a column -> `text`, int32 [length]: longer texts are truncated.

    Of a list of texts one is drawn. `clean`, a key of `CLEAN`, is done first; "" is `lower` for
    OpenAI's vocabulary, else `none`.
    """

    column: str = "caption"
    vocab: str = CHARACTERS
    length: int = 16
    clean: str = ""

    def __post_init__(self) -> None:
        check_known("clean", self.clean or "none", CLEAN)
        if not 1 <= self.length <= 1 << 16:
            raise ValueError(f"length={self.length} must be from 1 to 65,536")

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def num_tokens(self) -> int:
        """Vocabulary size for models of such texts; for UserErrors see `load_vocabulary`."""
        return load_vocabulary(self.vocab).size

    def __call__(self, example: Example, rng: Rng) -> Example:
        vocabulary, value = load_vocabulary(self.vocab), example[self.column]
        if not isinstance(value, str):
            value = value[int(rng.integers(len(value)))]
        text = np.full(self.length, vocabulary.fill, np.int32)
        usual = "lower" if self.vocab.endswith(".gz") else "none"
        tokens = vocabulary.encode(CLEAN[self.clean or usual](value), self.length)
        start = self.length - len(tokens) if vocabulary.pads_left else 0
        text[start : start + len(tokens)] = tokens
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
        if kind is _of_transformers:
            return _of_transformers(read_file(vocab, LARGEST_TEXT), *_padding_beside(vocab))
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


def _padding_beside(vocab: str) -> tuple[str, bool]:
    """The token that `tokenizer_config.json` pads with, or "", and whether on the left."""
    path = to_path(vocab).parent / "tokenizer_config.json"
    settings = read_object(path) if path.is_file() else {}
    token = settings.get("pad_token") or ""
    token = token.get("content", "") if isinstance(token, dict) else token
    return str(token), settings.get("padding_side") == "left"


def _of_transformers(data: bytes, padding: str = "", pads_left: bool = False) -> Vocabulary:
    package = import_extra("vocab", "tokenizers", "text")
    tokenizer = package.Tokenizer.from_str(data.decode())
    own = (tokenizer.padding or {}).get("pad_id", 0)
    tokenizer.no_padding()
    known = tokenizer.token_to_id(padding)
    fill = own if known is None else known
    return _tokenizers_vocabulary(tokenizer, fill)._replace(pads_left=pads_left)


def _clip(data: bytes) -> Vocabulary:
    """As openai/CLIP `simple_tokenizer.py`: bytes, the same at the end of a word, merges, ends."""
    package = import_extra("vocab", "tokenizers", "text")
    merges = [tuple(line.split()) for line in gzip.decompress(data).decode().split("\n")[1:48895]]
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = range(256, 256 + 256 - len(shown))  # what stands for bytes that are not shown
    letters = [*map(chr, shown), *map(chr, others)]
    ends = ["<|startoftext|>", "<|endoftext|>"]
    words = [*letters, *(f"{x}</w>" for x in letters), *map("".join, merges), *ends]
    numbers = {word: i for i, word in enumerate(words)}
    model = package.models.BPE(numbers, merges, end_of_word_suffix="</w>")
    tokenizer = package.Tokenizer(model)
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    before = package.pre_tokenizers
    tokenizer.pre_tokenizer = before.Sequence(
        [
            before.Split(package.Regex(pattern), "removed", invert=True),
            before.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens(ends)
    start, end = ((word, numbers[word]) for word in ends)
    tokenizer.post_processor = package.processors.BertProcessing(end, start)
    return _tokenizers_vocabulary(tokenizer, 0)


def _tokenizers_vocabulary(tokenizer: Any, fill: int) -> Vocabulary:
    @functools.cache  # truncation is a state, and threads may want other lengths
    def of_length(most: int) -> Any:
        copy = type(tokenizer).from_str(tokenizer.to_str())
        copy.enable_truncation(most)
        return copy

    def encode(text: str, most: int) -> list[int]:
        return of_length(most).encode(text).ids

    return Vocabulary(encode, tokenizer.get_vocab_size(), fill)


_KINDS = {".txt": _wordpiece, ".model": _sentencepiece, ".json": _of_transformers, ".gz": _clip}
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _fixed(text: str) -> str:
    """As in OpenAI's CLIP: mended encodings, and no entities of HTML."""
    fixed = import_extra("tokenize", "ftfy", "text").fix_text(text)
    return " ".join(html.unescape(html.unescape(fixed)).split())


def _canonical(text: str) -> str:
    return " ".join(text.lower().translate(_NO_PUNCTUATION).split())


def _lowercase(text: str) -> str:
    """As transformers' tokenizer of SigLIP 2: letter by letter, unlike `str.lower`."""
    package = import_extra("tokenize", "tokenizers", "text")
    return package.normalizers.Lowercase().normalize_str(text)


# What is done with a text before it is split into tokens.
CLEAN: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "siglip": _canonical,  # transformers' tokenizer of SigLIP
    "lowercase": _lowercase,
    # open_clip's; "lower" is OpenAI's, too.
    "lower": lambda text: _fixed(text).lower(),
    "whitespace": _fixed,
    "canonicalize": lambda text: _canonical(_fixed(text).replace("_", " ")),
}


# Published for ImageNet by OpenAI: of the paper (2103.00020), and the best seven.
PROMPTS = ("openai", "openai7")


def read_prompts(prompts: Sequence[str]) -> list[str]:
    """Those given, where one without {} is a key of `PROMPTS`, or a file of a prompt per line.

    UserError if it is neither, or the file is not text.
    """
    lines: list[str] = []
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        if "{}" in prompt:
            lines.append(prompt)
            continue
        path = os.path.expanduser(prompt)
        if prompt in PROMPTS:
            path = str(Path(__file__).parent / "prompts" / f"{prompt}.txt")
        if not os.path.isfile(path):
            known = f"{' or '.join(PROMPTS)}, or a file of such texts"
            raise UserError(
                f"prompt {prompt!r} must contain {{}} for the class name, or be {known}."
            )
        with reading(prompt):
            lines += filter(None, read_file(path, LARGEST_TEXT).decode().splitlines())
    return lines
