# SPDX-License-Identifier: Apache-2.0
"""Small curves as SVG path data, which are drawn without script."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["spark_area", "spark_line"]


def _points(values: Sequence[float | None], width: float, height: float) -> list[str]:
    """Return the runs of a curve as SVG path data; ``None`` is a gap."""
    greatest = max((value for value in values if value is not None), default=0) or 1
    step = width / max(1, len(values) - 1)
    runs: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            runs.append([])
            continue
        y = height - 1.5 - (height - 3) * value / greatest
        runs[-1].append(f"{index * step:.1f} {y:.1f}")
        # A value between two gaps is a short line.
        if (index == len(values) - 1 or values[index + 1] is None) and len(runs[-1]) == 1:
            start = min(index * step, width - min(step, 3))
            runs[-1] = [f"{start:.1f} {y:.1f}", f"{start + min(step, 3):.1f} {y:.1f}"]
    return ["L".join(run) for run in runs if run]


def spark_line(values: Sequence[float | None], width: float = 160, height: float = 32) -> str:
    """Return the path data of a sparkline; ``None`` is a gap in it.

    :param width: of the drawing, whose ``viewBox`` is ``0 0 width height``.
    """
    return "".join(f"M{run}" for run in _points(values, width, height))


def spark_area(values: Sequence[float | None], width: float = 160, height: float = 32) -> str:
    """Return the path data of the area below :func:`spark_line`."""
    parts = []
    for run in _points(values, width, height):
        points = run.split("L")
        first, last = points[0].split(" ")[0], points[-1].split(" ")[0]
        parts.append(f"M{first} {height:g}L{run}L{last} {height:g}Z")
    return "".join(parts)
