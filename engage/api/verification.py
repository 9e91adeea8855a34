# SPDX-License-Identifier: Apache-2.0
"""What ``engage verify`` learns of a store."""

from __future__ import annotations

import dataclasses
from typing import Literal

from engage.api.people import Version

__all__ = ["StoreProblem", "StoredLink"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreProblem:
    """Something that a storage found wrong in itself."""

    #: Where, in the words of the storage's documentation, such as ``keys``.
    what: str
    #: One line; it may have ids of users and events.
    message: str
    #: Why it may be right nevertheless. ``expired``: if events expire.
    #: ``unfinished``: a crash cut something off, and the next start of a server completes it.
    #: ``unknown``: the storage could not look, for the reason in the message.
    doubt: Literal["", "expired", "unfinished", "unknown"] = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredLink:
    """A link of an anonymous id to a user, or an operator's decision about one."""

    workspace_id: str
    user_id: str
    anonymous_id: str
    #: The least time of receipt, message id and origin of the events that made it; ``None``: there
    #: was none, but an operator's decision. An empty message id: an earlier version of engage did
    #: not keep them.
    first: Version | None
    #: Whether it counts; see :class:`~engage.api.LinkDecision`.
    counts: bool
