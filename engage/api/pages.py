# SPDX-License-Identifier: Apache-2.0
"""A page of a scan of a storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["Page"]

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """One page of a scan."""

    items: Sequence[Item]
    #: Pass it as ``after`` to get the next page; ``None``: there are no more items now.
    cursor: str | None
