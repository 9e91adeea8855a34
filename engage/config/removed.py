# SPDX-License-Identifier: Apache-2.0
"""Keys that an earlier version had: they are read, change nothing, and are reported.

A schema names the removed keys of a table in ``x-removed``, with a sentence that says what decides
now. This is so in ``schemas/config.json`` and in the schema of every plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engage.config.schema_check import dotted

if TYPE_CHECKING:
    from engage.config.schema_check import Path

__all__ = ["without_removed"]


def without_removed(
    schema: Mapping[str, Any], table: Mapping[str, Any], at: Path = ()
) -> tuple[dict[str, Any], list[str]]:
    """Take the removed keys out of a table and the tables in it.

    :param schema: the schema of the table.
    :param at: the path of the table in the file.
    :return: the table without these keys, and a line for each of them that was set.
    """
    removed: Mapping[str, str] = schema.get("x-removed", {})
    kept: dict[str, Any] = {}
    warnings = []
    for key, value in table.items():
        path = (*at, key)
        if key in removed:
            warnings.append(f"{dotted(path)} has no effect: {removed[key]}")
            continue
        if isinstance(value, Mapping):
            value, more = without_removed(schema.get("properties", {}).get(key, {}), value, path)
            warnings += more
        kept[key] = value
    return kept, warnings
