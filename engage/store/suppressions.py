# SPDX-License-Identifier: Apache-2.0
"""Addresses to which nothing must be sent: each row is a register."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from engage.api import Page, Suppression
from engage.store.keys import hash_of
from engage.store.pages import page
from engage.store.tables import (
    Delete,
    Executor,
    Put,
    Row,
    Steps,
    Table,
    Under,
    nothing,
    plan,
)

#: The latest holds; at the same time, one that is not lifted.
SUPPRESSIONS: Final = Table(
    "suppressions",
    {
        **dict.fromkeys(("workspace", "channel", "address", "group_id", "reason"), str),
        "at": int,
        "lifted": int,
        "how": str,
        "source_id": str,
    },
    key=5,
    arrival=True,
    register=("at", "-lifted"),
)
#: Begins the address of an erased person, of which only the hash is kept.
HASHED: Final = "hmac-sha256:"


def hashed_address(key: str, workspace_id: str, channel: str, address: str) -> str:
    """Return the form in which the address of an erased person is kept."""
    return HASHED + hash_of(key, workspace_id, f"{channel}:{address}")


def forms(
    key: str | None, workspace_id: str, addresses: Collection[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Return addresses (channel, address) with the forms of those of erased people.

    :param key: of the hashes; ``None``: nobody was erased.
    """
    if key is None:
        return {*addresses}
    hashed = {(name, hashed_address(key, workspace_id, name, it)) for name, it in addresses}
    return {*addresses} | hashed


def suppression_of(row: Row) -> Suppression:
    """Return the suppression of a row."""
    workspace, channel, address, group, reason, at, lifted, how, source = row
    return Suppression(
        workspace_id=workspace,
        channel=channel,
        address=address,
        group_id=group,
        reason=reason,
        at=at,
        lifted=bool(lifted),
        how=how,
        source_id=source,
    )


@plan(locks=nothing)
def suppress(suppressions: Sequence[Suppression]) -> Steps[None]:
    """Write those that are later than what is stored."""
    latest: dict[tuple[str, ...], Row] = {}
    for entry in sorted(suppressions, key=lambda entry: (entry.at, not entry.lifted)):
        key = (entry.workspace_id, entry.channel, entry.address, entry.group_id, entry.reason)
        latest[key] = (*key, entry.at, int(entry.lifted), entry.how, entry.source_id)
    yield Put(SUPPRESSIONS, list(latest.values()))


@plan()
def find(workspace_id: str, addresses: Sequence[tuple[str, str]]) -> Steps[list[Suppression]]:
    """Return the suppressions of addresses (channel, address) that are not lifted."""
    stored = yield Under(SUPPRESSIONS, [(workspace_id, *address) for address in addresses])
    matches = [suppression_of(row) for rows in stored.values() for row in rows]
    return [entry for entry in matches if not entry.lifted]


@plan(frees=True, overwrites=True)
def erase(workspace_id: str, addresses: Sequence[tuple[str, str]]) -> Steps[int]:
    """Delete the suppressions of addresses (channel, address), and return how many."""
    stored = yield Under(SUPPRESSIONS, [(workspace_id, *address) for address in addresses])
    keys = [row[: SUPPRESSIONS.key] for rows in stored.values() for row in rows]
    deleted: int = yield Delete(SUPPRESSIONS, keys)
    return deleted


@plan()
def scan(workspace_id: str | None, after: str | None, limit: int) -> Steps[Page[Suppression]]:
    """Return a page of all, also of those that are lifted."""
    equal = {} if workspace_id is None else {"workspace": workspace_id}
    return (yield from page(suppression_of, SUPPRESSIONS, equal, after, limit))


# --------------------------------------------------------------------------------------- storage
class Suppressions(Executor):
    """Addresses to which nothing must be sent.

    They belong to addresses, and not to users: nothing is known of who has an address.
    """

    async def suppress(self, suppressions: Sequence[Suppression]) -> None:
        """Write registers, and return when they are durable; see :class:`Suppression`. Idempotent,
        also across processes. It is not atomic: after an exception, the caller may write all again.
        """
        if suppressions:
            await self.run(suppress, suppressions)

    async def suppressions(
        self, workspace_id: str, addresses: Collection[tuple[str, str]]
    ) -> Sequence[Suppression]:
        """Return the suppressions of addresses, without those that are lifted, in any order.

        :param addresses: pairs of channel and address, at most a few hundred.
        """
        return await self.read(find, workspace_id, [*addresses])

    async def scan_suppressions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[Suppression]:
        """Return one page of all registers, also those that are lifted; each once.

        Those that were written before the first page was read are all returned.

        :param after: the cursor of the previous page; ``None`` for the first page.
        :param limit: the maximum number of items.
        """
        return await self.read(scan, workspace_id, after, limit)

    async def erase_suppressions(
        self, workspace_id: str, addresses: Collection[tuple[str, str]]
    ) -> int:
        """Erase the suppressions of addresses (channel, address), and return how many there were.
        The core has written them again under hashes of the addresses."""
        return await self.run(erase, workspace_id, [*addresses])
