# SPDX-License-Identifier: Apache-2.0
"""The transform ``redact``: removes or replaces values of events before they are stored.

A key without a dot names members at every depth, also within lists. A key with dots is a path from
the top of the event; it also leads through the elements of lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, Final

import orjson

from engage.api import Register, TransformFactory, hookimpl

__all__ = ["engage_register_transform"]

#: Fields of an event at its top, which say what the event is: only their content is redacted.
_FIELDS: Final = {
    *("type", "event", "name", "category", "messageId", "timestamp", "originalTimestamp", "sentAt"),
    *("userId", "anonymousId", "groupId", "previousId", "receivedAt", "workspaceId", "writeKeyId"),
    *("source", "context", "integrations", "properties", "traits"),
}


class _Redact:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self._names = frozenset(key for key in options["keys"] if "." not in key)
        self._paths = [key.split(".") for key in options["keys"] if "." in key]
        self._replacement: str | None = options.get("replacement")

    def __call__(self, event: dict[str, Any]) -> dict[str, Any]:
        self._redact(event, (self._names & event.keys()) - _FIELDS)
        for value in event.values():
            self._everywhere(value)
        for path in self._paths:
            self._at(event, path)
        return event

    def _redact(self, value: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            if self._replacement is None:
                del value[name]
            else:
                value[name] = self._replacement

    def _everywhere(self, value: object) -> None:
        if isinstance(value, dict):
            self._redact(value, self._names & value.keys())
            for inner in value.values():
                self._everywhere(inner)
        elif isinstance(value, list):
            for inner in value:
                self._everywhere(inner)

    def _at(self, value: object, path: Sequence[str]) -> None:
        if isinstance(value, list):
            for element in value:
                self._at(element, path)
        elif isinstance(value, dict) and path[0] in value:
            if len(path) == 1:
                self._redact(value, path)
            else:
                self._at(value[path[0]], path[1:])


@hookimpl
def engage_register_transform(register: Register[TransformFactory]) -> None:
    """Register ``redact``."""
    schema = resources.files("engage_schemas").joinpath("plugins/redact.json").read_bytes()
    register("redact", _Redact, orjson.loads(schema))
