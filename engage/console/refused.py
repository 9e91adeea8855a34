# SPDX-License-Identifier: Apache-2.0
"""Requests that were refused as a whole: a wrong key, too large, not JSON.

No event is made of them, so there is no dead letter either. Each process of the server keeps the
last ones in one record of kind ``refused`` (:mod:`engage.monitoring.recorder`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.console.formats import visible

if TYPE_CHECKING:
    from engage.api import Record

__all__ = ["KIND", "Refused", "refused_of"]

#: The kind of the records.
KIND: Final = "refused"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Requests that were refused for one reason."""

    #: When the last one came, and the first: milliseconds since 1970.
    at: int
    first: int
    count: int
    status: int
    code: str
    message: str
    #: The name of the route, such as ``track``.
    request: str
    #: The beginning of the write key; ``""``: there was none.
    key: str
    #: ``""``: unknown, because the key is.
    workspace_id: str

    def as_dict(self) -> dict[str, Any]:
        """Return it for ``live.json``."""
        return dataclasses.asdict(self)


def refused_of(records: Iterable[Record]) -> list[Refused]:
    """Return the refused requests of all processes, the latest first.

    :param records: of kind :data:`KIND`; what is in them is not trusted.
    """
    found = []
    for record in records:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            for row in orjson.loads(record.body).get("rows") or ():
                at = int(row["at"])
                found.append(
                    Refused(
                        at=at,
                        first=int(row.get("first") or at),
                        count=int(row.get("count") or 1),
                        status=int(row.get("status") or 0),
                        code=visible(row.get("code") or ""),
                        message=visible(row.get("message") or ""),
                        request=visible(row.get("route") or ""),
                        key=visible(row.get("key") or ""),
                        workspace_id=str(row.get("workspace") or ""),
                    )
                )
    return sorted(found, key=lambda row: row.at, reverse=True)
