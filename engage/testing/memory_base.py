# SPDX-License-Identifier: Apache-2.0
"""What the stores in memory share: items in the order of their arrival, opening and closing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from engage import api
from engage.store.memory import MemoryTables
from engage.store.tables import Plan

Key = TypeVar("Key")
Item = TypeVar("Item")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Arrivals(dict[Key, Item]):
    """Items in the order in which their keys arrived. A page's cursor is the number of an arrival,
    so neither new items nor deleted ones move the next page."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Key, int] = {}
        self._last = 0

    def __setitem__(self, key: Key, item: Item) -> None:
        if key not in self:
            self._last += 1
            self._numbers[key] = self._last
        super().__setitem__(key, item)

    def page(
        self, wanted: Callable[[Item], bool], cursor: str | None, limit: int, *, back: bool = False
    ) -> api.Page[Item]:
        """Return the wanted items after a cursor; with ``back`` those before it, newest first."""
        keys: Iterable[Key] = reversed(self) if back else self
        end = None if cursor is None else int(cursor)
        found = [
            key
            for key in keys
            if (end is None or (self._numbers[key] < end if back else self._numbers[key] > end))
            and wanted(self[key])
        ]
        more = str(self._numbers[found[limit - 1]]) if len(found) > limit else None
        return api.Page([self[key] for key in found[:limit]], more)


class Stored:
    """Everything that the stores of one name share."""

    def __init__(self, *, exists: bool = False) -> None:
        #: Whether a store was created.
        self.exists = exists
        #: While it is false, every method raises :class:`~engage.api.StorageUnavailable`.
        self.available = True
        #: By identity.
        self.events = Arrivals[tuple[str, str, str], api.Event]()
        #: The identities of erased events, with the time of receipt and the mark.
        self.erased: dict[tuple[str, str, str], tuple[int, bytes]] = {}
        #: What is kept by plans.
        self.tables = MemoryTables()


_STORED: dict[str, Stored] = {}


def stored(name: str) -> Stored:
    """Return what the stores of a name share; the first call makes it."""
    return _STORED.setdefault(name, Stored())


class Memory:
    """Opens and closes.

    :param options: ``name``: which stores share what they keep. Without it, the store is the only
        one of its kind, and it is open from the beginning.
    """

    def __init__(
        self, options: Mapping[str, Any] | None = None, context: api.StorageContext | None = None
    ) -> None:
        name = (options or {}).get("name")
        self.context = context or api.StorageContext(base_dir=Path(), identifiers={})
        self.stored = Stored(exists=True) if name is None else stored(name)
        self.is_open = name is None

    async def open(self, *, create: bool) -> None:
        if not self.stored.available:
            raise api.StorageUnavailable("the store in memory is not available")
        if not self.stored.exists and not create:
            raise api.StorageMissing("there is no store in memory of this name")
        self.stored.exists = self.is_open = True

    async def run(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        return self.contents().tables.execute(plan(*args, **kwargs), self.context)

    read = run

    async def close(self) -> None:
        self.is_open = False

    async def check(self) -> None:
        self.contents()

    def contents(self) -> Stored:
        """Return what is stored.

        :raises StorageUnavailable: if the store is closed or not available.
        """
        if not self.is_open:
            raise api.StorageUnavailable("the store in memory is closed")
        if not self.stored.available:
            raise api.StorageUnavailable("the store in memory is not available")
        return self.stored

    def apply_changes(self, event: api.Event) -> None:
        """Apply the changes of a newly stored event; a store without profiles ignores them."""


def delete(items: dict[Key, Any], keys: Iterable[Key]) -> int:
    """Delete items by their keys, and return how many there were."""
    return sum(items.pop(key, None) is not None for key in keys)
