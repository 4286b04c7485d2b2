"""`map` in threads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def map_threads(
    function: Callable[[A], B],
    arguments: Iterable[A],
    *,
    chunk: int = 64,
    num_threads: int | None = None,
) -> Iterator[B]:
    """`map` in threads, by default a few more than there are cores; results come in order.

    A thread takes `chunk` arguments at a time, as a future costs 40 us and `os.stat` only 2.
    """
    rest = iter(arguments)
    parts = iter(lambda: tuple(itertools.islice(rest, chunk)), ())
    with ThreadPoolExecutor(num_threads or (os.cpu_count() or 1) + 2) as pool:
        for results in pool.map(lambda part: list(map(function, part)), parts):
            yield from results
