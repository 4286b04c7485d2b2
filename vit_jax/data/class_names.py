"""Names of ImageNet's classes.

labels/KEY.txt has one line per class of the published heads, in the order of their logits: WordNet
id, tab, first lemma in WordNet 3.0 (Princeton University, wordnet.princeton.edu); where classes
would share it, also the second, or else the WordNet id in parentheses.
"""

import functools
from pathlib import Path

from vit_jax.kinds import check_known

# Sets of class names, and their sizes.
LABELS = {
    "imagenet2012": 1000,  # ILSVRC 2012, sorted by WordNet id
    "imagenet21k": 21843,  # as in Google's heads: two more than the fall 2011 release
}


def class_names(key: str) -> tuple[str, ...]:
    """Short names, one per class, all different; UserError if `key` is not in LABELS."""
    return tuple(name for _, name in _label_lines(key))


def wordnet_ids(key: str) -> tuple[str, ...]:
    """WordNet ids such as `n01440764`, one per class; errors as above."""
    return tuple(wordnet_id for wordnet_id, _ in _label_lines(key))


@functools.cache
def _label_lines(key: str) -> list[list[str]]:
    check_known("labels", key, LABELS)
    path = Path(__file__).parent / "labels" / f"{key}.txt"
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
