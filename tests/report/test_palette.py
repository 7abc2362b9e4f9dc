"""Contrast of the palettes on both backgrounds, and their colours under simulated colour vision deficiencies."""

from itertools import combinations

import numpy as np
import pytest

from holdfast.report.palette import RAMP_DARK, RAMP_LIGHT, SERIES_DARK, SERIES_LIGHT

PAGES = {"light": ("#ffffff", SERIES_LIGHT, RAMP_LIGHT), "dark": ("#12171d", SERIES_DARK, RAMP_DARK)}

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISION = {
    "all three cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear(colour):
    share = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def luminance(rgb):
    return float(rgb @ [0.2126, 0.7152, 0.0722])


def lab(rgb):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    f = np.cbrt(np.clip(xyz / [0.9505, 1.0, 1.089], 0.008856, None))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("page", PAGES)
def test_series_stand_out_from_the_page(page):
    ground, series, _ = PAGES[page]
    for colour in series:
        low, high = sorted([luminance(linear(colour)), luminance(linear(ground))])
        assert (high + 0.05) / (low + 0.05) >= 3, colour  # WCAG 1.4.11


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("vision", VISION)
def test_series_can_be_distinguished(page, vision):
    seen = [lab(np.clip(VISION[vision] @ linear(colour), 0, 1)) for colour in PAGES[page][1]]
    closest = min(np.linalg.norm(a - b) for a, b in combinations(seen, 2))
    assert closest > 12, closest  # a just noticeable difference is about 2.3


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("vision", VISION)
def test_heat_maps_change_in_lightness_only_one_way(page, vision):
    light = [lab(np.clip(VISION[vision] @ linear(colour), 0, 1))[0] for colour in PAGES[page][2]]
    steps = np.diff(light if page == "dark" else light[::-1])
    assert (steps > 5).all()
