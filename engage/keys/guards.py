# SPDX-License-Identifier: Apache-2.0
"""How much a write key may send, and how many refusals an address gets.

A request of a key passes while its buckets are not empty, and may take more than they hold, so a
batch that is larger than ``burst`` passes. A client whose requests would be answered 401 or 404 has
a bucket for its address; when it is empty, these answers become 429, and nothing else changes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Final

from engage.errors import ApiError
from engage.http1.addresses import network_of, parsed_address
from engage.keys.buckets import Bucket, open_buckets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engage.config import Limits, WriteKey
    from engage.keys.quotas import Quotas

__all__ = ["STRANGE", "Guard", "Guards"]

#: The statuses that a client without a key or a signature can get.
STRANGE: Final = frozenset({401, 404})


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """Decides whether a write key may send another request now.

    Every method raises ApiError 429 ``rate_limited`` or ``quota_exceeded`` if not.
    """

    #: Workspace and id of the key.
    name: tuple[str, str]
    #: Of events and of bytes; ``None``: any amount passes.
    bucket: Bucket | None
    #: What the bucket allows of events and of bytes, in words.
    words: tuple[str, str]
    quotas: Quotas | None

    def check(self) -> None:
        """Check before a request costs anything."""
        self.take(0, 0)

    def take(self, events: int, size: int) -> None:
        """Check, and count a request.

        :param events: the number of its events.
        :param size: the bytes of its body, decompressed.
        """
        if self.quotas is not None and self.name in self.quotas.refused:
            self.quotas.check(self.name)
        if self.bucket is not None and not self.bucket.take(events, size):
            wait, words = max(zip(self.bucket.waits(), self.words, strict=True))
            seconds = max(math.ceil(wait), 1)
            raise ApiError(
                "rate_limited",
                f"the write key {self.name[1]} sends more than {words}; send the same request"
                f" again in {seconds} s",
                retry_after=seconds,
            )


class Guards:
    """Makes the guards of keys, and guards the server against strangers.

    :param memory: see :func:`~engage.keys.buckets.open_buckets`.
    :param quotas: ``None``: the config has none.
    """

    def __init__(
        self, limits: Limits, memory: int | None = None, quotas: Quotas | None = None
    ) -> None:
        self._rate = dataclasses.asdict(limits.rate)
        #: ``None``: there are none.
        self.quotas = quotas
        self._per_second = limits.rate.unauthenticated_per_second
        self._keys, self._addresses = open_buckets(memory)

    def of(self, workspace_id: str, key: WriteKey) -> Guard | None:
        """Return the guard of a key; ``None`` if it may send without limit."""
        name = (workspace_id, key.id)
        # The burst of another rate would make no sense.
        own = {"burst": None, **key.rate} if "events_per_second" in key.rate else key.rate
        events, its_words = self._limit("events", own, {**self._rate, **own}["burst"])
        size, words = self._limit("bytes", own)
        bucket = None
        if events[0] or size[0]:
            bucket = self._keys.bucket("/".join(name), events, size)
        elif self.quotas is None:
            return None
        return Guard(name, bucket, (its_words, words), self.quotas)

    def _limit(
        self, what: str, own: Mapping[str, float | None], burst: float | None = None
    ) -> tuple[tuple[float, float], str]:
        """Return the rate and the size of a bucket, and both in words.

        :param own: the limits of the key itself.
        :param burst: the size; ``None``: as much as flows in in one second.
        """
        option = f"{what}_per_second"
        rate = (own[option] if option in own else self._rate[option]) or 0
        where = f"rate.{option} of the key" if option in own else f"limits.rate.{option}"
        size = burst or rate if rate else 0
        return (rate, size), f"{rate:.15g} {what} a second ({where})"

    def answer(self, error: ApiError, address: str) -> ApiError:
        """Return what to answer to a client: a 429 if its address had too many of these.

        :param error: with a status of :data:`STRANGE`.
        """
        bucket = self._bucket_of(address)
        if bucket is None or bucket.take(1):
            return error
        return ApiError(
            "rate_limited",
            f"more than {self._per_second:.15g} requests a second from your address were refused"
            " (limits.rate.unauthenticated_per_second)",
            retry_after=max(math.ceil(bucket.waits()[0]), 1),
        )

    def is_over(self, address: str) -> bool:
        """Return whether the bucket of an address is empty."""
        bucket = self._bucket_of(address)
        return bucket is not None and not bucket.take(0)

    def _bucket_of(self, address: str) -> Bucket | None:
        """Return the bucket of an address; ``None`` if it has none.

        Clients behind a proxy of this network share its address, unless the proxy is trusted.
        """
        parsed = parsed_address(address)
        if not self._per_second or parsed is None or not parsed.is_global:
            return None
        size = max(self._per_second, 1)
        return self._addresses.bucket(network_of(address), (self._per_second, size))
