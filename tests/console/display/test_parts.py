# SPDX-License-Identifier: Apache-2.0
"""Pieces of HTML: no value in them is markup, and nothing of them is escaped twice."""

from __future__ import annotations

from tornado.template import Template

from engage.console.display import formats, parts
from support.each import each

#: Shown as it is, it would be an element, end an attribute, or be an entity.
BAD = """<b>"'&amp;{}"""
SHOWN = "&lt;b&gt;&quot;&#x27;&amp;amp;{}"


def rendered(template: str, **values: object) -> str:
    """Return what a template of the console becomes."""
    names = {name: getattr(parts, name) for name in parts.__all__}
    text: bytes = Template(template, autoescape="escaped").generate(**names, **values)
    return text.decode()


@each(
    "template",
    [
        "{{ bad }}",
        "{{ code(bad) }}",
        "{{ code(bad, bad) }}",
        "{{ json([[('', bad), ('k', bad)]]) }}",
        "{{ code(json([[('s', bad)]])) }}",
        "{{ facts({bad: bad}) }}",
        "{{ spark([1], bad, bad) }}",
        "{% apply table(bad, '#' + bad, '-' + bad) %}{{ bad }}{% end %}",
        "{% apply card(bad, bad) %}{% apply table() %}{{ bad }}{% end %}{% end %}",
    ],
)
def test_every_value_is_escaped_once(template: str) -> None:
    text = rendered(template, bad=BAD)
    assert text.count(SHOWN) == template.count("bad")
    assert not [wrong for wrong in ("<b>", "\"'", "&amp;lt;") if wrong in text]


def test_a_time_is_an_element_with_its_time() -> None:
    at, shown = formats.iso(0), formats.clock(0)
    assert rendered("{{ time(0) }}") == f'<time datetime="{at}">{shown}</time>'
    assert rendered("{{ time(0, 'ago') }}") == f'<time datetime="{at}" data-ago>{shown}</time>'


def test_a_curve_has_gaps_and_short_lines() -> None:
    """A value between two gaps is a line of three units."""
    text = rendered("{{ spark([2, 1, None, 1, None]) }}")
    assert 'd="M0.0 1.5L40.0 16.0M120.0 16.0L123.0 16.0"' in text
    assert 'd="M0.0 32L0.0 1.5L40.0 16.0L40.0 32ZM120.0 32L120.0 16.0L123.0 16.0L123.0 32Z"' in text
    assert rendered("{{ spark([], filled=False) }}").count("<path") == 1
