# SPDX-License-Identifier: Apache-2.0
"""Erasing what a store has of a person: the interface of a storage that can do it."""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from typing import Final

from engage.api.events import Event, Kind, Subject

__all__ = ["ERASED", "ErasureStore"]

#: Begins the mark that an erased event leaves in place of its body. The mark that an earlier
#: version of engage left is empty. The body of an event is a JSON object, so it is never a mark.
ERASED: Final = b"hmac-sha256:"


class ErasureStore(abc.ABC):
    """A storage from which a person can be erased. It is also a :class:`ProfileStore` and a
    :class:`RecordStore`. Every method may raise :class:`StorageUnavailable`.

    The core decides what belongs to the person. Each method is one short step: it is durable when
    it returns, and calling it again does no harm, so that an erasure can begin again after a crash.
    """

    @abc.abstractmethod
    async def erase_events(self, events: Sequence[Event], marks: Sequence[bytes]) -> int:
        """Erase events, at most 500, and return how many were stored.

        Only the identity, the time of receipt and the mark are kept, and expire with it. Nothing is
        found or scanned under the identity any more, but an event that has it is a duplicate, of
        which :attr:`Outcome.stored` is always the mark. The changes that it made stay.

        :param marks: one for each event, of at most 128 bytes, which begins with :data:`ERASED` or
            is empty. The core compares it with what arrives later. An event that is erased already
            keeps its own.
        """

    @abc.abstractmethod
    async def erase_profile(self, workspace_id: str, kind: Kind, name: str) -> bool:
        """Erase a user or a visitor with its traits and memberships, a user also with its links and
        what is known of its choices, and return whether there was one.

        What the storage remembers of it, in any process, must not change what later events do: see
        :meth:`settle`.
        """

    @abc.abstractmethod
    async def links_to(self, workspace_id: str, anonymous_id: str) -> Sequence[tuple[str, int]]:
        """Return the links to an anonymous id that count, the first one first, at most 1000: the id
        of the user, whether it exists or not, and when the event that made the link was received.
        """

    @abc.abstractmethod
    async def linked_to(self, workspace_id: str, user_id: str) -> Sequence[str]:
        """Return the anonymous ids of the links of a user that count, whether it exists or not."""

    @abc.abstractmethod
    async def erase_choices(
        self, workspace_id: str, subject: Subject, pseudonym: str
    ) -> tuple[int, int]:
        """Erase the subscription choices of a user or a visitor, and give its audit records to a
        pseudonym of the same kind, without the client's address, its ``User-Agent`` and the secret.
        Each change gets a random id there, because the old one can be computed from the id of the
        person.

        The old ids of the changes are not forgotten: a change that is repeated has no effect.

        :return: how many choices and how many audit records there were.
        """

    @abc.abstractmethod
    async def erase_suppressions(
        self, workspace_id: str, addresses: Collection[tuple[str, str]]
    ) -> int:
        """Erase the suppressions of addresses (channel, address), and return how many there were.
        The core has written them again under hashes of the addresses."""

    @abc.abstractmethod
    async def reapply(self, events: Sequence[Event]) -> None:
        """Apply the changes of stored events again: an erased profile had them."""

    @abc.abstractmethod
    async def settle(self) -> bool:
        """Return when no process uses what it remembered of profiles that were erased before, and
        overwrite what was erased in the files of the store, if it is a part of this process.

        :return: whether nothing of it can be left in a file of the store; false if it is not known.
        """
