# SPDX-License-Identifier: Apache-2.0
"""Keeps schemathesis from sending JSON that engage refuses and JSON Schema cannot exclude, and what
engage reads beyond its schemas.

See docs/events.md, "Fields of an event"."""

from __future__ import annotations

import re
from typing import Any

import schemathesis

_TIMES = ("timestamp", "originalTimestamp", "sentAt")
_IDS = ("userId", "anonymousId", "groupId", "previousId")
_OBJECTS = ("traits", "properties", "context", "integrations", "changes")


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Remove forms: schemathesis cannot write the style ``deepObject``."""
    for operations in raw_schema["paths"].values():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            content.pop("application/x-www-form-urlencoded", None)


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Replace integers beyond 64 bits, ids and times such as 1.0 (an integer in JSON Schema), and
    wrong days."""
    return _fit(body)


def _fit(value: Any) -> Any:
    if isinstance(value, dict):
        fitted = {name: _fit(inner) for name, inner in value.items()}
        for name in (*_IDS, *_TIMES):
            number = fitted.get(name)
            if isinstance(number, float) and number.is_integer():
                fitted[name] = _fit(int(number))
        for name in _OBJECTS:
            if fitted.get(name) == []:
                fitted[name] = [None]
        for name in _TIMES:
            if fitted.get(name) == "" or isinstance(fitted.get(name), float):
                fitted[name] = "-"
            if isinstance(fitted.get(name), str):
                fitted[name] = re.sub(
                    r"^[0-9]{4}(-[0-9]{2})-(29|30|31)", r"2000\1-28", fitted[name]
                )
                fitted[name] = re.sub(r"^(0000|0001|9999)-", "2000-", fitted[name])
        return fitted
    if isinstance(value, list):
        return [_fit(inner) for inner in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-(2**63), min(2**63 - 1, value))
    return value
