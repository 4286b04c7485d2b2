"""Fonts for names in any script, which matplotlib would draw as boxes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping


def font_families(text: str) -> list[str]:
    """Families of the installed fonts that together have the characters of a text.

    For matplotlib's `font.family`; its own font first, which is all that most texts need.
    """
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    default = font_manager.FontProperties().get_family()
    missing = {character for character in text if character.isprintable()} - {" "}
    families = list(default)
    paths = [font_manager.findfont(font_manager.FontProperties())]
    entries = sorted(font_manager.fontManager.ttflist, key=lambda entry: entry.name)
    # The last resort has a box for everything.
    names = {e.fname: e.name for e in entries if not e.name.startswith("Last Resort")}
    for path in [*paths, *names]:
        if not missing:
            break
        known: Mapping[int, int] = {}
        with contextlib.suppress(OSError, RuntimeError):  # gone since matplotlib listed it
            known = FT2Font(path).get_charmap()
        found = {character for character in missing if ord(character) in known}
        if found and path not in paths:
            families.append(names[path])
        missing -= found
    if missing:
        boxes = "".join(sorted(missing))[:20]
        logging.warning(
            f"No font here has {boxes!r}, drawn as boxes; install one, such as fonts-noto-cjk."
        )
    return families
