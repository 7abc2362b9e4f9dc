"""Colours that people with any colour vision can tell apart, on white and on black.

The series colours are Okabe and Ito's set, without its yellow and black, which vanish on white and on black;
each has a lighter twin for dark pages. After seven series the dash or the marker changes, not the colour.
"""

SERIES_LIGHT = ("#0072b2", "#d55e00", "#008f68", "#b5508f", "#b07900", "#3d9bd6", "#5b6570")
SERIES_DARK = ("#4aa8e0", "#ff8f4a", "#2fc79b", "#e08cc0", "#e8b33a", "#9ad4f7", "#a9b4bf")
DASHES = ((), (6, 3), (2, 2), (8, 3, 2, 3))
MARKERS = ("o", "s", "^", "D")

RAMP_LIGHT = ("#f3f6fa", "#c6dbef", "#7fb2da", "#3a82bd", "#0f579a", "#08306b")
RAMP_DARK = ("#1b232d", "#1f3f63", "#27649c", "#3f8fce", "#7fbdea", "#d7eefc")


def for_page() -> dict[str, object]:
    """The palette as the page's scripts read it."""
    return {
        "light": {"series": SERIES_LIGHT, "ramp": RAMP_LIGHT},
        "dark": {"series": SERIES_DARK, "ramp": RAMP_DARK},
        "dashes": DASHES,
    }
