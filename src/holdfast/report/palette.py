"""Colours that can be distinguished with any colour vision, on a light and on a dark background.

The series colours are those of Okabe and Ito, changed as little as needed for a distance of at least 14 in CIE
Lab between any two under simulated protanopia, deuteranopia and tritanopia, and for a contrast of at least 3 with
the background. After seven series the colours repeat with another dash or marker.
"""

SERIES_LIGHT = ("#306dad", "#b94c20", "#239063", "#bd5391", "#bd7e0c", "#2796dc", "#646464")
SERIES_DARK = ("#549ce1", "#fe8e52", "#39bc8a", "#d464b1", "#e8c030", "#9ed1f7", "#a9b4bf")
DASHES = ((), (6, 3), (2, 2), (8, 3, 2, 3))
MARKERS = ("o", "s", "^", "D")

RAMP_LIGHT = ("#f3f6fa", "#c6dbef", "#7fb2da", "#3a82bd", "#0f579a", "#08306b")
RAMP_DARK = ("#1b232d", "#1f3f63", "#27649c", "#3f8fce", "#7fbdea", "#d7eefc")


def for_page() -> dict[str, object]:
    return {
        "light": {"series": SERIES_LIGHT, "ramp": RAMP_LIGHT},
        "dark": {"series": SERIES_DARK, "ramp": RAMP_DARK},
        "dashes": DASHES,
    }
