# SPDX-License-Identifier: Apache-2.0
"""What write keys and workspaces may store in one UTC day, over all hosts.

Every process writes to the store what it has counted, every five seconds. So a quota is exact to
what the keys send in this time. While the counters cannot be read, the last sums hold, together
with what this process has counted since.
"""

from __future__ import annotations

import collections
import datetime
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final

from engage.api import DAY_MS, StorageError
from engage.errors import ApiError
from engage.monitoring.history import DAY, STORED, STORED_BYTES
from engage.reading.scans import all_pages
from engage.reading.time_limit import within
from engage.store.facade import Storage

if TYPE_CHECKING:
    from engage.config import Config, Quota
    from engage.keys.effective import Key
    from engage.monitoring.history import History

__all__ = ["Quotas", "Used", "read_used", "used_up"]

_log = logging.getLogger(__name__)

#: Milliseconds between two reads of the counters: fewer than between two writes.
READ_MS: Final = 2000

#: (Workspace, name of the counter, id of the key) → what was stored today.
Used = Mapping[tuple[str, str, str], int]


class Quotas:
    """Follows what is stored, and refuses the keys that have used up a quota.

    :param store: where the counters are.
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
        self._read: Used = {}
        self._looked = 0
        self._logged: set[str] = set()

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
        """Find out which keys have used up a quota, unless that was done just now.

        It must not run while the history is written, so that it counts nothing twice.

        :param history: what this process counts.
        :param logs: whether this process logs that a quota is used up: one line is enough for all
            processes of a host.
        """
        now = self._clock()
        if 0 <= now - self._looked < READ_MS:
            return
        self._looked = now
        ends = now - now % DAY_MS + DAY_MS
        if ends != self._ends:
            self._read, self._logged = {}, set()
        try:
            async with within(self._config.storage.write_timeout):
                self._read = await read_used(self._store, now)
            history.note_read()
        except StorageError as error:
            _log.debug("the counters of the quotas cannot be read: %s", error)
        used = collections.Counter(self._read)
        used.update(history.unread())
        self.refused, fullest = used_up(self._config, self._keys(), used)
        self._ends = ends
        history.metrics.gauge("quota_used_ratio", fullest)
        for reason in sorted(set(self.refused.values()) - self._logged):
            until = datetime.datetime.fromtimestamp(ends / 1000, datetime.UTC)
            if logs:
                _log.warning("%s; it is refused until %s", reason, until.isoformat())
            self._logged.add(reason)


async def read_used(store: Storage, now: int) -> Used:
    """Return what was stored in the UTC day of a time, as all processes have counted it.

    :raises StorageUnavailable: if the counters cannot be read.
    """
    since, names = now - now % DAY_MS, (STORED, STORED_BYTES)
    read = functools.partial(store.counts, DAY, since=since, until=since + DAY_MS, names=names)
    return {
        (one.workspace_id, one.name, one.labels[0]): one.total
        async for one in all_pages(read, attempts=1)
    }


def used_up(
    config: Config, keys: Collection[Key], used: Used
) -> tuple[dict[tuple[str, str], str], float]:
    """Return the keys that have used up a quota.

    :return: (workspace, id of the key) → the quota, in words; and the part of its quota that the
        key or the workspace has used which has used most of it: 1 or more if it is used up.
    """
    found: dict[tuple[str, str], str] = {}
    fullest = 0.0
    keys_of = collections.defaultdict(list)
    for key in keys:  # Once: with a look for each workspace, a thousand took most of a second.
        keys_of[key.workspace_id].append(key)
    for workspace in config.workspaces:
        here = keys_of[workspace.id]
        public = [key.id for key in here if key.kind == "public"]
        for key in here:
            what = f"the write key {key.id!r} of the workspace {workspace.id!r}"
            quota = config.limits.quota
            ratio, reason = _use(quota, "limits", what, used, workspace.id, [key.id])
            fullest = max(fullest, ratio)
            if reason is not None:
                found[workspace.id, key.id] = reason
        what = f"the workspace {workspace.id!r} with its public write keys"
        ratio, reason = _use(workspace.quota, "workspaces", what, used, workspace.id, public)
        fullest = max(fullest, ratio)
        if reason is not None:
            found.update(((workspace.id, key_id), reason) for key_id in public)
    return found, fullest


def _use(
    quota: Quota, table: str, what: str, used: Used, workspace_id: str, key_ids: Collection[str]
) -> tuple[float, str | None]:
    """Return which part of their quota keys have used together, and why they are refused.

    :return: ``None`` in place of the reason if they have not used it up.
    """
    fullest = 0.0
    for unit, name in (("events", STORED), ("bytes", STORED_BYTES)):
        if limit := getattr(quota, f"{unit}_per_day"):
            total = sum(used.get((workspace_id, name, one), 0) for one in key_ids)
            fullest = max(fullest, total / limit)
            if total >= limit:
                reason = f"{what} has used up {limit} {unit} a day ({table}.quota.{unit}_per_day)"
                return fullest, reason
    return fullest, None
