"""Names of the classes that published heads predict, in the order of their logits.

labels/KEY.txt holds one line per class: WordNet id, tab, short name. Ids and names are those of
WordNet 3.0 (Princeton University, wordnet.princeton.edu); which ids, and in which order, is that of
ImageNet. The short name is the first lemma of the synset; where two classes would have the same,
it is followed by the second lemma, or else by the WordNet id in parentheses.
"""

from __future__ import annotations

import functools
from pathlib import Path

from vit_jax.errors import check_known

FOLDER = Path(__file__).parent / "labels"

# key: number of classes
LABELS = {
    "imagenet2012": 1000,  # ILSVRC 2012, sorted by WordNet id
    "imagenet21k": 21843,  # as in Google's heads: two classes more than the release of fall 2011
}


def class_names(key: str) -> tuple[str, ...]:
    """Short names, one per class, all different; UserError if `key` is not in LABELS."""
    return tuple(name for _, name in _lines(key))


def wordnet_ids(key: str) -> tuple[str, ...]:
    """WordNet ids such as `n01440764`, one per class; errors as above."""
    return tuple(wordnet_id for wordnet_id, _ in _lines(key))


@functools.cache
def _lines(key: str) -> tuple[tuple[str, str], ...]:
    check_known("labels", key, LABELS)
    text = (FOLDER / f"{key}.txt").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines())
    return tuple((wordnet_id, name) for wordnet_id, name in rows)
