# SPDX-License-Identifier: Apache-2.0
"""Addresses to which nothing must be sent: the interface of a storage that keeps them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from engage.api.events import identifier_value
from engage.api.pages import Page

__all__ = ["ADDRESS_TRAITS", "Suppression", "SuppressionStore", "suppressed_address"]

#: Channel → the trait that has the addresses of people in it.
ADDRESS_TRAITS: Final[Mapping[str, str]] = {
    "email": "email",
    "sms": "phone",
    "whatsapp": "phone",
    "rcs": "phone",
}


def suppressed_address(channel: str, value: str) -> str | None:
    """Return the form in which an address of a channel is suppressed and looked up.

    :param channel: in a channel of :data:`ADDRESS_TRAITS`, this is the form of its trait; in
        others, an address stays as it is.
    :return: as :func:`identifier_value`.
    """
    return identifier_value(ADDRESS_TRAITS.get(channel, ""), value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Suppression:
    """Nothing must be sent to an address, or (``lifted``) this is over.

    It is a register. Of those with the same ``workspace_id``, ``channel``, ``address``,
    ``group_id`` and ``reason``, the one with the greatest ``at`` is kept; at the same time, one
    that is not lifted. So they may be written again, late and in any order.
    """

    workspace_id: str
    #: As the subscription groups name it, such as ``email`` or ``sms``.
    channel: str
    #: As :func:`suppressed_address` returns it.
    address: str
    #: The subscription group; ``""``: all of the channel.
    group_id: str = ""
    #: ``complaint``, ``bounce``, ``unsubscribe``, ``stop`` or ``objection``. Lifting one reason
    #: leaves the others.
    reason: str
    #: When it was made, or the provider learnt of it: milliseconds since 1970 UTC.
    at: int
    lifted: bool = False
    #: How it became known: ``webhook:<provider>``, ``operator`` for a command, or as
    #: :attr:`SubscriptionChange.how`.
    how: str = ""
    #: The delivery or the provider's event that said so; ``""``: none.
    source_id: str = ""


class SuppressionStore(abc.ABC):
    """A storage that also keeps suppressions. Every method may raise :class:`StorageUnavailable`.

    They belong to addresses, and not to users: nothing is known of who has an address.
    """

    @abc.abstractmethod
    async def suppress(self, suppressions: Sequence[Suppression]) -> None:
        """Write registers, and return when they are durable; see :class:`Suppression`. Idempotent,
        also across processes. It is not atomic: after an exception, the caller may write all again.
        """

    @abc.abstractmethod
    async def suppressions(
        self, workspace_id: str, addresses: Collection[tuple[str, str]]
    ) -> Sequence[Suppression]:
        """Return the suppressions of addresses, without those that are lifted, in any order.

        :param addresses: pairs of channel and address, at most a few hundred.
        """

    @abc.abstractmethod
    async def scan_suppressions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[Suppression]:
        """Return one page of all registers, also those that are lifted; each once.

        Those that were written before the first page was read are all returned.

        :param after: the cursor of the previous page; ``None`` for the first page.
        :param limit: the maximum number of items.
        """
