# SPDX-License-Identifier: Apache-2.0
"""Pieces of HTML that many templates have.

Templates escape all that they show except :class:`Markup`, which only :func:`html` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tornado.escape import to_unicode, utf8, xhtml_escape

from engage.console.display.formats import clock, iso, visible

__all__ = ["card", "code", "escaped", "facts", "json", "spark", "table", "time"]

#: The width and the height of a curve, which a style sheet stretches.
_WIDTH, _HEIGHT = 160, 32


class Markup(bytes):
    """HTML. It is bytes, because Tornado encodes a text before it escapes it."""


def escaped(value: str | bytes) -> str | bytes:
    """Return a value as a template shows it."""
    return value if isinstance(value, Markup) else xhtml_escape(value)


def html(pattern: str, *values: str | Markup) -> Markup:
    """Return HTML with values in its braces, each as a template shows it."""
    return Markup(utf8(pattern.format(*(to_unicode(escaped(value)) for value in values))))


def _joined(parts: Iterable[Markup]) -> Markup:
    return Markup(b"".join(parts))


def time(at: int, show: str = "") -> Markup:
    """Return a time as an element, whose text a script replaces.

    :param at: milliseconds since 1970.
    :param show: ``ago`` or ``clock``; see ``static/page.js``.
    """
    return html('<time datetime="{}"{}>{}</time>', iso(at), show and f" data-{show}", clock(at))


def table(*columns: str) -> Callable[[bytes], Markup]:
    """Return what makes a table of its rows.

    :param columns: the names: that of a column of numbers begins with ``#``, one that only screen
        readers tell with ``-``.
    """
    kinds = {"#": '<th class="num">{}</th>', "-": '<th><span class="hidden">{}</span></th>'}
    names = _joined(html(kinds.get(name[0], "<th>{}</th>"), name.lstrip("#-")) for name in columns)
    head = html("<thead><tr>{}</tr></thead>", names) if columns else ""
    pattern = '<div class="table"><table>{}<tbody>{}</tbody></table></div>'
    return lambda rows: html(pattern, head, Markup(rows))


def card(title: str, note: str = "") -> Callable[[bytes], Markup]:
    """Return what makes a card of tables."""
    shown = html('<span class="muted small">{}</span>', note) if note else ""
    pattern = '<section class="card bare"><header><h2>{}</h2>{}</header>{}</section>'
    return lambda content: html(pattern, title, shown, Markup(content))


def code(text: str | Markup, kind: str = "code", *, scrolls: bool = True) -> Markup:
    """Return a text with a button that copies it.

    :param text: or a ``pre``.
    :param kind: the classes; ``code full`` is as high as its text.
    :param scrolls: whether a long text scrolls, so that one has to reach it with the keyboard.
    """
    pattern = '<pre tabindex="0">{}</pre>' if scrolls else "<pre>{}</pre>"
    shown = text if isinstance(text, Markup) else html(pattern, text)
    button = html('<button class="small js-only" data-copy>Copy</button>')
    return html('<div class="{}">{}{}</div>', kind, shown, button)


def json(lines: Iterable[Iterable[Sequence[str]]]) -> Markup:
    """Return lines of (class, text), as :mod:`engage.console.display.json_text` makes them."""
    tokens = (
        html('<span class="{}">{}</span>', kind, text) if kind else html("{}", text)
        for line in lines
        for kind, text in (*line, ("", "\n"))
    )
    return html('<pre class="json" tabindex="0">{}</pre>', _joined(tokens))


def facts(values: Mapping[str, object]) -> Markup:
    """Return a list of names and values."""
    rows = (
        html("<dt>{}</dt><dd>{}</dd>", visible(name), visible(value))
        for name, value in values.items()
    )
    return html('<dl class="facts">{}</dl>', _joined(rows))


def spark(
    values: Sequence[float | None], status: str = "", label: str = "", *, filled: bool = True
) -> Markup:
    """Return a small curve, which is drawn without script.

    :param values: ``None`` is a gap.
    :param status: the class of its colour.
    :param label: for screen readers.
    :param filled: whether the area below it is tinted.
    """
    runs = _runs(values)
    area = "".join(
        f"M{run[0].split(' ')[0]} {_HEIGHT}L{'L'.join(run)}L{run[-1].split(' ')[0]} {_HEIGHT}Z"
        for run in runs
    )
    return html(
        '<svg class="spark {}" viewBox="0 0 {} {}" preserveAspectRatio="none" {}>{}<path d="{}"'
        ' fill="none" stroke="currentColor" stroke-width="1.5" vector-effect="non-scaling-stroke"/>'
        "</svg>",
        status,
        str(_WIDTH),
        str(_HEIGHT),
        html('role="img" aria-label="{}"', label) if label else html('aria-hidden="true"'),
        html('<path d="{}" fill="currentColor" opacity=".12"/>', area) if filled else "",
        "".join(f"M{'L'.join(run)}" for run in runs),
    )


def _runs(values: Sequence[float | None]) -> list[list[str]]:
    """Return the points of a curve between its gaps, as SVG path data."""
    greatest = max((value for value in values if value is not None), default=0) or 1
    step = _WIDTH / max(1, len(values) - 1)
    runs: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            runs.append([])
            continue
        y = _HEIGHT - 1.5 - (_HEIGHT - 3) * value / greatest
        runs[-1].append(f"{index * step:.1f} {y:.1f}")
        # A value between two gaps is a short line.
        if (index == len(values) - 1 or values[index + 1] is None) and len(runs[-1]) == 1:
            start = min(index * step, _WIDTH - min(step, 3))
            runs[-1] = [f"{start:.1f} {y:.1f}", f"{start + min(step, 3):.1f} {y:.1f}"]
    return [run for run in runs if run]
