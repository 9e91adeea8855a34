# SPDX-License-Identifier: Apache-2.0
"""May this key send this now?

================  ==================================================================================
:class:`Rules`    what a key may not do at all: origins, operations, user ids without their hash
:class:`Guard`    how fast a key may send, and whether it has used up a quota
:class:`Guards`   makes the guards of keys, and limits how many refusals an address gets
:class:`Buckets`  the rates, in memory that the processes of a server share
:class:`Quotas`   what keys and workspaces may store in one UTC day, over all hosts
================  ==================================================================================

A key without rules, or without limits, has ``None`` in their place, so its requests cost nothing
here.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import hashlib
import hmac
import logging
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from engage.api import ADDRESS_TRAITS, DAY_MS, StorageError
from engage.errors import ApiError, key_refused, quote
from engage.http1.addresses import network_of, parsed_address
from engage.monitoring.history import DAY, STORED, STORED_BYTES, Values, difference
from engage.reading.scans import all_pages
from engage.reading.time_limit import within

if TYPE_CHECKING:
    from engage.api import Provider
    from engage.config import Config, Limits, Workspace, WriteKey
    from engage.keys.effective import Key
    from engage.monitoring.history import History
    from engage.store.facade import Storage

__all__ = [
    "STRANGE",
    "UNVERIFIED",
    "WITHOUT_LETTER",
    "Bucket",
    "Buckets",
    "Guard",
    "Guards",
    "Quotas",
    "Rules",
    "make_buckets_file",
    "open_buckets",
    "read_used",
    "used_up",
]

_log = logging.getLogger(__name__)

#: The code of an event without a valid hash of its user id.
UNVERIFIED: Final = "identity_not_verified"
#: The codes of events that their key may not send. No dead letter is kept of them.
WITHOUT_LETTER: Final = frozenset({"operation_not_allowed", UNVERIFIED})
#: The statuses that a client without a key or a signature can get.
STRANGE: Final = frozenset({401, 404})
#: Buckets in one table: several for each of the 10,000 keys that a workspace may have. A power of
#: two.
SLOTS: Final = 65536
#: The places in which a bucket can be.
WAYS: Final = 8
#: Bytes of one table: three machine words for each bucket.
TABLE_BYTES: Final = 24 * SLOTS
#: Milliseconds between two reads of what all processes have stored. Each of them writes it every
#: five seconds, so that all know it within a minute.
READ_MS: Final = 50_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one key."""

    #: Whether the key is a secret.
    secret: bool = False
    #: In lower case; empty: the ``Origin`` does not matter.
    origins: frozenset[str] = frozenset()
    #: Empty: all.
    operations: frozenset[str] = frozenset()
    #: The traits that are removed from its events.
    protected: frozenset[str] = frozenset()
    #: The identifiers for which its events vouch: see :data:`engage.api.TRUSTED`. Empty: anyone can
    #: send such events.
    trusted: frozenset[str] = frozenset()
    #: The HMACs of nothing by the secrets that sign user ids, which are copied for each user id;
    #: empty: user ids are not verified.
    identity: tuple[hmac.HMAC, ...] = ()

    @classmethod
    def of(cls, workspace: Workspace, key: WriteKey) -> Rules | None:
        """Return the rules of a key; ``None`` if it has none."""
        secret = key.kind == "server"
        rules = dataclasses.replace(
            cls.of_trusted(workspace) if secret else cls.of_public(workspace),
            secret=secret,
            origins=frozenset(origin.lower() for origin in key.origins),
            operations=frozenset(key.operations),
        )
        return None if rules == cls() else rules

    @classmethod
    def of_public(cls, workspace: Workspace) -> Rules:
        """Return the rules that all public keys of a workspace have."""
        secrets = workspace.identity_secrets if workspace.verify_identity == "required" else ()
        return cls(
            protected=frozenset(workspace.protected_traits),
            identity=tuple(hmac.new(secret.encode(), digestmod="sha256") for secret in secrets),
        )

    @classmethod
    def of_trusted(cls, workspace: Workspace) -> Rules:
        """Return the rules of those who say of a workspace's users what is certain."""
        identifiers = {*ADDRESS_TRAITS.values(), *workspace.subscription_identifiers}
        return cls(trusted=frozenset(identifiers))

    @classmethod
    def of_provider(cls, workspace: Workspace, name: str, provider: Provider) -> Rules | None:
        """Return the rules of a provider's events: it may only pass on what browsers say."""
        if workspace.webhooks.get(name, {}).get("trusted", provider.trusted):
            return cls.of_trusted(workspace)
        protected = frozenset(workspace.protected_traits)
        return cls(protected=protected) if protected else None

    def check_request(
        self, origin: str | None, kind: str | None = None, *, in_query: bool = False
    ) -> None:
        """Check where a request comes from, where its key is, and what it sends.

        :param origin: the header ``Origin``: browsers send it, and no page can choose it.
        :param kind: the type of its events; ``None`` if each names its own.
        :raises ApiError: 403 ``server_key_exposed``, ``origin_not_allowed`` or
            ``operation_not_allowed``.
        """
        if self.secret and (in_query or origin is not None):
            where = "of web pages" if origin is not None else "with the key in the query"
            raise key_refused(
                f"it is a server key, which is a secret: requests {where} must not have it;"
                " replace the key, because others may have read it",
                "server_key_exposed",
            )
        origins = self.origins
        if origins and origin not in origins and (not origin or origin.lower() not in origins):
            source = "has no Origin" if not origin else f"has the Origin {quote(origin)}"
            raise key_refused(
                f"only web pages of its origins may use it, and the request {source}",
                "origin_not_allowed",
            )
        if kind is not None:
            self.check_operation(kind)

    def check_operation(self, kind: str) -> None:
        """Check that the key may send events of a type.

        :raises ApiError: 403 ``operation_not_allowed``.
        """
        if self.operations and kind not in self.operations:
            allowed = ", ".join(sorted(self.operations))
            raise key_refused(
                f"it may not send {kind} events, only {allowed}", "operation_not_allowed"
            )

    def check_user(self, item: Any, common: object) -> None:
        """Check that an item has the hash of its user id: anyone can send any id.

        :param item: as received.
        :param common: the ``userHash`` of its batch.
        :raises ApiError: 403 :data:`UNVERIFIED`.
        """
        user = item.get("userId") if type(item) is dict else None
        if user is None or user == "":
            return
        own = item.get("context")
        given = (own.get("userHash") if type(own) is dict else None) or common
        if type(user) is int:
            user = str(user)  # as it is stored
        # A longer id is not valid, but would be hashed for as long as a body is large.
        if type(user) is str and len(user) <= 512 and type(given) is str:
            sent, text = given.lower().encode(), user.encode()
            for signer in self.identity:
                own_hash = signer.copy()
                own_hash.update(text)
                if hmac.compare_digest(own_hash.hexdigest().encode(), sent):
                    return
        raise ApiError(
            UNVERIFIED,
            f"context.userHash is {'wrong' if given else 'missing'}: events with a userId need the"
            " HMAC-SHA256 of that userId with the identity_secret of the workspace, in hexadecimal",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """Decides whether a write key may send another request now.

    A request passes while the bucket of its key is not empty, and may take more than it holds, so a
    batch that is larger than ``burst`` passes. Every method raises ApiError 429 ``rate_limited`` or
    ``quota_exceeded`` if it does not pass.
    """

    #: Its workspace and id.
    name: tuple[str, str]
    #: Of events and of bytes; ``None``: any amount passes.
    bucket: Bucket | None
    #: The options that count, and those that the key has itself.
    rate: Mapping[str, float | None]
    own: Mapping[str, float | None]
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
            wait, what = max(zip(self.bucket.waits(), ("events", "bytes"), strict=True))
            option, seconds = f"{what}_per_second", max(math.ceil(wait), 1)
            place = f"rate.{option} of the key" if option in self.own else f"limits.rate.{option}"
            raise ApiError(
                "rate_limited",
                f"the write key {self.name[1]} sends more than {self.rate[option]:.15g} {what} a"
                f" second ({place}); send the same request again in {seconds} s",
                retry_after=seconds,
            )


class Guards:
    """Makes the guards of keys, and guards the server against strangers.

    A client whose requests would be answered 401 or 404 has a bucket for its address; when it is
    empty, these answers become 429, and nothing else changes.

    :param memory: see :func:`open_buckets`.
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
        # The burst of another rate would make no sense.
        own = {"burst": None, **key.rate} if "events_per_second" in key.rate else key.rate
        rate = {**self._rate, **own}
        events, size = rate["events_per_second"] or 0, rate["bytes_per_second"] or 0
        bucket = None
        if events or size:
            # Without a burst, as much as flows in in one second.
            held = (rate["burst"] or events) if events else 0
            bucket = Bucket(self._keys, f"{workspace_id}/{key.id}", (events, held), (size, size))
        elif self.quotas is None:
            return None
        return Guard((workspace_id, key.id), bucket, rate, own, self.quotas)

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
        # Clients behind a proxy of this network share its address, unless the proxy is trusted.
        parsed = parsed_address(address)
        if not self._per_second or parsed is None or not parsed.is_global:
            return None
        size = max(self._per_second, 1)
        return Bucket(self._addresses, network_of(address), (self._per_second, size))


class Buckets:
    """A table of token buckets in memory that the processes of a server share.

    What is in a bucket is one number: the time at which it will be full again (the generic cell
    rate algorithm, ITU-T I.371), in seconds of the monotonic clock. It is read and written as one
    machine word, without a lock. Two processes that change one bucket in the same microsecond lose
    one of the two changes, which costs accuracy and nothing else. A process that is stopped or
    killed cannot make the others wait.

    The memory is bounded: a new bucket takes the place of the one nearby that was full first, and a
    bucket that lost its place is full.

    :param memory: of :data:`TABLE_BYTES`.
    """

    def __init__(self, memory: memoryview) -> None:
        third = TABLE_BYTES // 3
        self.names = memory[:third].cast("Q")
        #: When each bucket will be full of the first and the second kind.
        self.first = memory[third : 2 * third].cast("d")
        self.second = memory[2 * third :].cast("d")

    def place_of(self, name: int) -> int:
        """Return the place of a bucket; a new one gets a place and is full."""
        names = self.names
        places = [(name + way) % SLOTS for way in range(WAYS)]
        for place in places:
            if names[place] == name:
                return place
        place = min(places, key=lambda place: max(self.first[place], self.second[place]))
        names[place] = name
        self.first[place] = self.second[place] = 0.0
        return place


class Bucket:
    """One bucket of a table.

    :param first: what flows into it in a second, and what it holds when it is full; (0, 0):
        anything can be taken.
    :param second: the same for another kind: a key has events and bytes.
    """

    __slots__ = ("_each", "_first", "_limits", "_name", "_names", "_place", "_second", "_table")

    def __init__(
        self,
        table: Buckets,
        name: str,
        first: tuple[float, float],
        second: tuple[float, float] = (0, 0),
    ) -> None:
        self._table = table
        self._names, self._first, self._second = table.names, table.first, table.second
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self._name = int.from_bytes(digest) or 1
        self._place = self._name % SLOTS
        kinds = (first, second)
        #: Seconds in which one of each kind flows in, and seconds in which the bucket becomes full.
        self._each = tuple(1 / rate if rate else 0.0 for rate, _ in kinds)
        self._limits = tuple(size / rate if rate else math.inf for rate, size in kinds)

    def take(self, first: float, second: float = 0) -> bool:
        """Take amounts out of the bucket, also more than it holds, unless it is empty."""
        place = self._place
        if self._names[place] != self._name:
            place = self._place = self._table.place_of(self._name)
        now = monotonic()
        full, also = self._first[place], self._second[place]
        limit, limit_also = self._limits
        if full - now >= limit or also - now >= limit_also:
            return False
        each, each_also = self._each
        self._first[place] = (full if full > now else now) + first * each
        self._second[place] = (also if also > now else now) + second * each_also
        return True

    def waits(self) -> tuple[float, float]:
        """Return for how many seconds each kind will be empty; below 0: it is not."""
        place = self._place = self._table.place_of(self._name)
        now, (limit, limit_also) = monotonic(), self._limits
        return self._first[place] - now - limit, self._second[place] - now - limit_also


def make_buckets_file() -> int:
    """Return a descriptor of empty memory for :func:`open_buckets`; the caller closes it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("engage-buckets")
    else:
        with tempfile.TemporaryFile(prefix="engage-buckets-") as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, 2 * TABLE_BYTES)
    return descriptor


def open_buckets(descriptor: int | None = None) -> tuple[Buckets, Buckets]:
    """Return the table of the write keys, and that of the addresses, which clients can fill.

    :param descriptor: what :func:`make_buckets_file` returned; ``None``: no other process has them.
    """
    memory = memoryview(mmap.mmap(-1 if descriptor is None else descriptor, 2 * TABLE_BYTES))
    return Buckets(memory[:TABLE_BYTES]), Buckets(memory[TABLE_BYTES:])


class Quotas:
    """Refuses the keys that have used up a quota.

    A process reads once a minute what all have stored today, and adds every second what it has
    stored itself since then. So its own events count at once, those of the others within a minute,
    and while the store cannot be read, its own alone.

    :param store: where the sums are.
    :param keys: returns the keys of all workspaces.
    :param clock: returns milliseconds since 1970 UTC.
    """

    def __init__(
        self,
        config: Config,
        store: Storage,
        keys: Callable[[], Collection[Key]],
        clock: Callable[[], int],
    ) -> None:
        self._config = config
        self._store = store
        self._keys = keys
        self._clock = clock
        #: The end of the day for which …
        self._ends = 0
        #: … these keys are refused, by workspace and id, and why.
        self.refused: Mapping[tuple[str, str], str] = {}
        #: What all had stored today at the last read, what was in it of this process, and when.
        self._sums: Values = {}
        self._in_sums: Values = {}
        self._read_at = 0

    def check(self, key: tuple[str, str]) -> None:
        """Check that a key may store more today.

        :param key: its workspace and id.
        :raises ApiError: 429 ``quota_exceeded``.
        """
        reason = self.refused.get(key)
        if reason is None or (left := self._ends - self._clock()) <= 0:
            return
        raise ApiError(
            "quota_exceeded",
            f"{reason}; send the same request again after 00:00 UTC",
            retry_after=math.ceil(left / 1000),
        )

    async def look(self, history: History, *, logs: bool) -> None:
        """Find out which keys have used up a quota. It must not run while the history is written.

        :param history: what this process counts.
        :param logs: whether this process logs that a quota is used up: one line is enough for all
            processes of a host.
        """
        now, written = history.now, history.written
        ends = now - now % DAY_MS + DAY_MS
        if ends != self._ends:
            self.refused, self._ends = {}, ends
            self._sums, self._in_sums, self._read_at = {}, history.day_began, 0
        # After a write that failed, nobody knows what the sums have of this process.
        if written is not None and not 0 <= now - self._read_at < READ_MS:
            try:
                async with within(self._config.storage.write_timeout):
                    self._sums = await read_used(self._store, now)
                self._in_sums, self._read_at = written, now
            except StorageError as error:
                _log.debug("the counters of the quotas cannot be read: %s", error)
        used = collections.Counter(self._sums)
        used.update(difference(history.stored(), self._in_sums))
        refused, fullest = used_up(self._config, self._keys(), used)
        history.metrics.gauge("quota_used_ratio", fullest)
        for reason in sorted({*refused.values()} - {*self.refused.values()} if logs else ()):
            until = datetime.datetime.fromtimestamp(ends / 1000, datetime.UTC)
            _log.warning("%s; it is refused until %s", reason, until.isoformat())
        self.refused = refused


async def read_used(store: Storage, now: int) -> Values:
    """Return what was stored in the UTC day of a time, as all processes have written it.

    :raises StorageUnavailable: if the counters cannot be read.
    """
    since, names = now - now % DAY_MS, (STORED, STORED_BYTES)
    read = functools.partial(store.counts, DAY, since=since, until=since + DAY_MS, names=names)
    return {
        (row.workspace_id, row.name, row.labels): row.total
        async for row in all_pages(read, attempts=1)
    }


def used_up(
    config: Config, keys: Collection[Key], used: Values
) -> tuple[dict[tuple[str, str], str], float]:
    """Return the keys that have used up a quota.

    :param used: what was stored today, as :func:`read_used` returns it.
    :return: (workspace, id of the key) → the quota, in words; and the part of its quota that the
        key or the workspace has used which has used most of it: 1 or more if it is used up.
    """
    refused: dict[tuple[str, str], str] = {}
    fullest = 0.0
    keys_of = collections.defaultdict(list)
    for key in keys:  # Once: with a look for each workspace, a thousand took most of a second.
        keys_of[key.workspace_id].append(key)
    for workspace in config.workspaces:
        own = keys_of[workspace.id]
        public = [key.id for key in own if key.kind == "public"]
        counted = [("limits", config.limits.quota, [key.id]) for key in own]
        for table, quota, ids in [*counted, ("workspaces", workspace.quota, public)]:
            for unit, counter in (("events", STORED), ("bytes", STORED_BYTES)):
                if not (limit := getattr(quota, f"{unit}_per_day")):
                    continue
                total = sum(used.get((workspace.id, counter, (key_id,)), 0) for key_id in ids)
                fullest = max(fullest, total / limit)
                if total >= limit:
                    who = f"the workspace {workspace.id!r} with its public write keys"
                    if table == "limits":
                        who = f"the write key {ids[0]!r} of the workspace {workspace.id!r}"
                    option = f"{table}.quota.{unit}_per_day"
                    reason = f"{who} has used up {limit} {unit} a day ({option})"
                    refused.update(((workspace.id, key_id), reason) for key_id in ids)
                    break
    return refused, fullest
