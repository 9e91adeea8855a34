# SPDX-License-Identifier: Apache-2.0
"""Requests that were refused as a whole: a wrong key, too large, not JSON.

No event is made of them, so there is no dead letter either. Each process of the server keeps its
latest ones in one record, see :mod:`engage.monitoring.sampler`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import orjson

from engage.monitoring.visible import visible

if TYPE_CHECKING:
    from engage.api import Record

__all__ = ["Refused", "refused_of"]


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
    #: The id of the write key, or the beginning of an unknown one; ``""``: there was none.
    key: str
    #: ``""``: unknown, because the key is.
    workspace_id: str

    def as_dict(self) -> dict[str, Any]:
        """Return it for ``live.json``."""
        return dataclasses.asdict(self)


def refused_of(records: Iterable[Record]) -> list[Refused]:
    """Return the refused requests of all processes, the latest first.

    :param records: of kind ``refused``; texts in them come from clients.
    """
    sums: dict[tuple[int, str, str, str, str], Refused] = {}
    for record in records:
        for row in orjson.loads(record.body)["rows"]:
            message = row["message"]
            if row.get("origin"):
                message = f"{message} (page of {row['origin']})".lstrip()
            item = Refused(
                at=row["at"],
                first=row["first"],
                count=row["count"],
                status=row["status"],
                code=visible(row["code"]),
                message=visible(message),
                request=visible(row["route"]),
                key=visible(row["writeKeyId"] or row["key"]),
                workspace_id=row["workspace"],
            )
            same = (item.status, item.code, item.request, item.key, item.workspace_id)
            sums[same] = item if same not in sums else _together(sums[same], item)
    return sorted(sums.values(), key=lambda row: row.at, reverse=True)


def _together(item: Refused, other: Refused) -> Refused:
    """Add up what two processes refused for the same reason."""
    latest = max(item, other, key=lambda row: row.at)
    return dataclasses.replace(
        latest, first=min(item.first, other.first), count=item.count + other.count
    )
