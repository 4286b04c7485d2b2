"""Names in any script are drawn with a font that has them, or it is said."""

from __future__ import annotations

import pytest
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

from vit_jax.files.fonts import font_families

KNOWN = "cat 12.5 % Größe"
SYMBOL = "\u20dd"  # an enclosing circle: in matplotlib's STIX, not in its DejaVu


def test_the_usual_font_is_enough_for_most() -> None:
    assert font_families(KNOWN) == font_manager.FontProperties().get_family()


def test_other_fonts_stand_in(caplog: pytest.LogCaptureFixture) -> None:
    families = font_families(KNOWN + SYMBOL)
    assert families[:-1] == font_families(KNOWN)
    path = font_manager.findfont(families[-1], fallback_to_default=False)
    assert ord(SYMBOL) in FT2Font(path).get_charmap()
    assert not caplog.text


def test_what_no_font_has_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert font_families(KNOWN + "\U00012345\ue000") == font_families(KNOWN)
    assert "No font here has" in caplog.text
    assert "fonts-noto-cjk" in caplog.text
