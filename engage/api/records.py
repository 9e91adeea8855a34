# SPDX-License-Identifier: Apache-2.0
"""Small records that all processes of a server share, such as write keys and sessions."""

from __future__ import annotations

import dataclasses
from typing import Final

__all__ = ["MAX_RECORD_BYTES", "Record"]

#: Maximum size of :attr:`Record.body`.
MAX_RECORD_BYTES: Final = 64 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record. Its identity is (``kind``, ``workspace_id``, ``id``)."""

    #: The kind, such as ``key`` or ``audit``: at most 32 characters.
    kind: str
    #: The workspace that it belongs to; ``""``: the whole server.
    workspace_id: str
    #: At most 256 characters.
    id: str
    #: Compact UTF-8 JSON of an object: at most :data:`MAX_RECORD_BYTES`.
    body: bytes
    #: When it was last written: milliseconds since 1970 UTC.
    at: int
    #: How often it was written: 1, 2, … The store sets it, and ignores it in
    #: :meth:`engage.store.records.Records.put_record`.
    version: int = 0

    def check(self) -> None:
        """Check the limits. A store calls it before it writes the record.

        :raises ValueError: if the body, the kind or the id is too long, or if a text contains a
            lone surrogate.
        """
        if len(self.body) > MAX_RECORD_BYTES:
            raise ValueError(f"the body of a record has more than {MAX_RECORD_BYTES} bytes")
        if len(self.kind) > 32 or len(self.id) > 256:
            raise ValueError("the kind of a record has at most 32 characters, its id at most 256")
        (self.kind + self.workspace_id + self.id).encode()
