# SPDX-License-Identifier: Apache-2.0
"""A storage in memory, for tests of plugins and of one's own code.

:class:`MemoryStore` keeps all promises of the conformance suite that do not need a disk: another
process does not see what it stores, and the end of the process loses it. It reads a page by looking
at everything: it is for some thousands of events. A test that needs one method to behave
differently makes a subclass.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from engage import api
from engage.store.events import EVENTS
from engage.store.facade import Storage, StorageFactory
from engage.store.letters import HEADS
from engage.store.memory import MemoryTables
from engage.store.profiles import REMOVED, TRAITS
from engage.store.tables import Plan

__all__ = ["MemoryStore", "Stored", "stored"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Stored:
    """Everything that the stores of one name share."""

    def __init__(self, *, exists: bool = False) -> None:
        #: Whether a store was created.
        self.exists = exists
        #: While it is false, every method raises :class:`~engage.api.StorageUnavailable`.
        self.available = True
        self.tables = MemoryTables()


_STORED: dict[str, Stored] = {}


def stored(name: str) -> Stored:
    """Return what the stores of a name share; the first call makes it."""
    return _STORED.setdefault(name, Stored())


class Memory:
    """Opens and closes, and executes plans.

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

    async def settle(self) -> bool:
        self.contents()
        return True

    def contents(self) -> Stored:
        """Return what is stored.

        :raises StorageUnavailable: if the store is closed or not available.
        """
        if not self.is_open:
            raise api.StorageUnavailable("the store in memory is closed")
        if not self.stored.available:
            raise api.StorageUnavailable("the store in memory is not available")
        return self.stored


class MemoryStore(Memory, Storage):
    """A storage in memory."""

    isolated = True

    async def problems(self) -> AsyncIterator[api.StoreProblem | int]:
        tables = self.contents().tables
        traits = tables.rows(TRAITS)
        yield len(tables.rows(EVENTS)) + len(tables.rows(HEADS)) + len(traits)
        for _, _, name, trait, _, value, *_, size in traits:
            if size and value == REMOVED:
                yield api.StoreProblem(what="sizes", message=f"{name}: of no trait {trait}")


@api.hookimpl
def engage_register_storage(register: api.Register[StorageFactory]) -> None:
    """Register the storage ``memory``, for a conformance suite; no entry point names this."""
    register("memory", MemoryStore, {"type": "object", "required": ["name"]})
