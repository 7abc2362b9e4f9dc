"""Colours that people with any colour vision can tell apart, on white and on black.

The series colours start from Okabe and Ito's set and are moved just far enough that any two stay apart (14
or more in CIE Lab) under simulated protanopia, deuteranopia and tritanopia, and that each stands out from its
page (contrast of 3 or more). After seven series the dash or the marker changes, not the colour.
"""

SERIES_LIGHT = ("#306dad", "#b94c20", "#239063", "#bd5391", "#bd7e0c", "#2796dc", "#646464")
SERIES_DARK = ("#549ce1", "#fe8e52", "#39bc8a", "#d464b1", "#e8c030", "#9ed1f7", "#a9b4bf")
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
