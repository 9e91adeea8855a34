# SPDX-License-Identifier: Apache-2.0
"""Times in the payloads of clients, in any form of the table in docs/events.md, "Times"."""

from __future__ import annotations

from typing import Any, Final

from engage.api import render_time
from engage.api.times import parse_time, standard_time
from engage.errors import Problem, from_problems, quote

__all__ = ["parse_field", "rfc3339"]


def parse_field(document: dict[str, Any], field: str) -> int:
    """Return the time in a field, in milliseconds since 1970 UTC; rewrite it as RFC 3339.

    :raises ApiError: 400 ``invalid_payload``, if the time does not exist.
    """
    value = document[field]
    milliseconds = parse_time(value)
    if milliseconds is None:
        document[field] = rfc3339(value)
        if document[field] is not None:
            return parse_field(document, field)
        rule = "must be an existing time in the years 1 to 9999 (UTC)"
        raise from_problems([Problem(f"/{field}", f'{rule}, not "{quote(str(value))}"')])
    return milliseconds


def rfc3339(value: object) -> str | None:
    """Return a time as RFC 3339; one that has this form already is returned as it is.

    :param value: a form of the table in docs/events.md, "Times".
    :return: ``None`` for any other value, and for a time that does not exist.
    """
    if isinstance(value, int | float) and type(value) is not bool:
        if not 0 <= value < 1000 * _FIRST_MILLISECONDS:  # as in schemas/payloads/common.json
            return None
        return render_time(round(value * 1000 if value < _FIRST_MILLISECONDS else value))
    text = standard_time(value) if type(value) is str else None
    return None if text is None or parse_time(text) is None else text


#: A number below this is in seconds: as milliseconds it would be before March 1973, as seconds it
#: is before the year 5139.
_FIRST_MILLISECONDS: Final = 100_000_000_000
