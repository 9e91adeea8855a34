# SPDX-License-Identifier: Apache-2.0
"""The contrast of colours, as WCAG 2.2 defines it (https://www.w3.org/TR/WCAG22/#contrast-minimum).

All colours are ``#rrggbb``.
"""

from __future__ import annotations

import colorsys
from typing import Final

__all__ = ["READABLE", "contrast", "lightened"]

#: The least contrast at which text of any size is readable (level AA).
READABLE: Final = 4.5


def _channels(color: str) -> list[int]:
    return list(bytes.fromhex(color[1:]))


def _luminance(color: str) -> float:
    """Return the relative luminance: 0 for black, 1 for white."""
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in _channels(color))
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(color: str, other: str) -> float:
    """Return the contrast of two colours: from 1 (none) to 21 (black and white)."""
    darker, lighter = sorted((_luminance(color), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def lightened(color: str, background: str) -> str:
    """Return a colour of the same hue, as light as makes it readable on a dark background."""
    hue, lightness, saturation = colorsys.rgb_to_hls(
        *(channel / 255 for channel in _channels(color))
    )
    steps = [lightness + (1 - lightness) * percent / 100 for percent in range(101)]
    shades = (colorsys.hls_to_rgb(hue, step, saturation) for step in steps)
    lighter = [f"#{bytes(round(255 * part) for part in shade).hex()}" for shade in shades]
    return next(shade for shade in lighter if contrast(shade, background) >= READABLE)
