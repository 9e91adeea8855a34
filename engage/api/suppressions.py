# SPDX-License-Identifier: Apache-2.0
"""Addresses to which nothing must be sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from engage.api.events import identifier_value

__all__ = ["ADDRESS_TRAITS", "Suppression", "suppressed_address"]

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
