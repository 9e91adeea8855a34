# SPDX-License-Identifier: Apache-2.0
"""Contrasts, beside those that are published."""

from __future__ import annotations

import pytest

from engage.config.colors import READABLE, contrast, lightened
from support.each import each


@each(
    "one, other, ratio",
    [
        *(("#000000", "#ffffff", 21.0), ("#ffffff", "#FFFFFF", 1.0)),
        # Examples of https://webaim.org/resources/contrastchecker/ and of WCAG's techniques.
        *(("#ffffff", "#767676", 4.54), ("#777777", "#ffffff", 4.48), ("#ff0000", "#ffffff", 4.0)),
        ("#0000ff", "#ffffff", 8.59),
    ],
)
def test_a_contrast_is_that_of_wcag(one: str, other: str, ratio: float) -> None:
    assert contrast(one, other) == pytest.approx(ratio, abs=0.005)


@each("color", ["#000000", "#0000ff", "#1d5bd1", "#7a0019", "#767676"])
def test_a_colour_is_made_readable_on_a_dark_background(color: str) -> None:
    light = lightened(color, "#17191d")
    assert contrast(light, "#17191d") >= READABLE
    assert lightened(light, "#17191d") == light
