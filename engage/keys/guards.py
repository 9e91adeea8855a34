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

    key_id: str
    #: Workspace and id of the key.
    name: tuple[str, str]
    events: tuple[Bucket, str] | None
    bytes: tuple[Bucket, str] | None
    quotas: Quotas | None

    def check(self) -> None:
        """Check before a request costs anything."""
        if self.quotas is not None:
            self.quotas.check(self.name)
        for limited in (self.events, self.bytes):
            if limited is not None and (wait := limited[0].wait()) >= 0:
                seconds = math.floor(wait) + 1
                raise ApiError(
                    "rate_limited",
                    f"the write key {self.key_id} sends more than {limited[1]}; send the same"
                    f" request again in {seconds} s",
                    retry_after=seconds,
                )

    def take(self, events: int, size: int) -> None:
        """Check, and count a request.

        :param events: the number of its events.
        :param size: the bytes of its body, decompressed.
        """
        self.check()
        if self.events is not None:
            self.events[0].take(events)
        if self.bytes is not None:
            self.bytes[0].take(size)


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
        events = self._bucket(name, "events", own, burst={**self._rate, **own}["burst"])
        size = self._bucket(name, "bytes", own)
        if events is None and size is None and self.quotas is None:
            return None
        return Guard(key.id, name, events, size, self.quotas)

    def _bucket(
        self,
        key: tuple[str, str],
        what: str,
        own: Mapping[str, float | None],
        burst: float | None = None,
    ) -> tuple[Bucket, str] | None:
        """Return a bucket, and what it allows in words.

        :param own: the limits of the key itself.
        :param burst: what it holds; ``None``: as much as flows into it in one second.
        """
        option = f"{what}_per_second"
        rate = own[option] if option in own else self._rate[option]
        if not rate:
            return None
        where = f"rate.{option} of the key" if option in own else f"limits.rate.{option}"
        bucket = self._keys.bucket("/".join((*key, what)), rate, burst or rate)
        return bucket, f"{rate:.15g} {what} a second ({where})"

    def answer(self, error: ApiError, address: str) -> ApiError:
        """Return what to answer to a client: a 429 if its address had too many of these.

        :param error: with a status of :data:`STRANGE`.
        """
        bucket = self._bucket_of(address)
        if bucket is None:
            return error
        wait = bucket.wait()
        if wait < 0:
            bucket.take(1)
            return error
        return ApiError(
            "rate_limited",
            f"more than {self._per_second:.15g} requests a second from your address were refused"
            " (limits.rate.unauthenticated_per_second)",
            retry_after=math.floor(wait) + 1,
        )

    def is_over(self, address: str) -> bool:
        """Return whether the bucket of an address is empty."""
        bucket = self._bucket_of(address)
        return bucket is not None and bucket.wait() >= 0

    def _bucket_of(self, address: str) -> Bucket | None:
        """Return the bucket of an address; ``None`` if it has none.

        Clients behind a proxy of this network share its address, unless the proxy is trusted.
        """
        parsed = parsed_address(address)
        if not self._per_second or parsed is None or not parsed.is_global:
            return None
        size = max(self._per_second, 1)
        return self._addresses.bucket(network_of(address), self._per_second, size)
