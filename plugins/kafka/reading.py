# SPDX-License-Identifier: Apache-2.0
"""One member of a group of readers: offsets, gaps, rebalances."""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from engage.api import Batch, LogReader, LogRecord, ReadRecord, StorageUnavailable

from .client import Cluster, Member, NoOffset, OutOfRange

_log = logging.getLogger("engage.log.kafka")

#: Seconds after which a reader looks again for new partitions, and one call of the client takes.
_LOOK: Final = 0.2
_POLL: Final = 1.0


class KafkaReader(LogReader):
    """Reads a topic as a member of a group.

    :param make_member: makes a member. Its first argument is called when it loses its partitions,
        the second when it has got some.
    :param since: where to begin in partitions without a committed offset; ``None``: the beginning.
    :param timeout: seconds of a call.
    """

    def __init__(
        self,
        cluster: Cluster,
        make_member: Callable[[Callable[[], None], Callable[[], None]], Member],
        *,
        topic: str,
        since: int | None,
        timeout: float,
    ) -> None:
        self._cluster = cluster
        self._make_member = make_member
        self._topic = topic
        self._since = since
        self._timeout = timeout
        #: Whether the reader is open. It may have no member then, after a failure.
        self._is_open = False
        self._member: Member | None = None
        self._paused: set[int] = set()
        #: Records that were fetched, and that the last batches had no room for.
        self._held: collections.deque[ReadRecord] = collections.deque()
        #: Partition → the offset after the last record that was returned since the member has it.
        #: Nothing beyond it may be committed.
        self._returned: dict[int, int] = {}
        self._gaps: dict[int, tuple[int, int]] = {}
        #: Partitions in which the group may have no committed offset.
        self._unplaced: set[int] = set()
        #: Partition → the last offset that this member committed, also before it lost it.
        self._committed: dict[int, int] = {}

    async def open(self) -> None:
        await self._cluster.start()
        self._is_open = True
        await self._joined()

    async def close(self) -> None:
        self._is_open = False
        await self._leave()

    async def _joined(self) -> Member:
        """Return the member; join the group if there is none."""
        self._check_open()
        if self._member is None:
            member = self._make_member(self._revoked, self._assigned)
            try:
                await member.start(self._timeout)
            except BaseException:
                await member.stop(self._timeout)
                raise
            self._member = member
        return self._member

    async def _leave(self) -> None:
        member, self._member = self._member, None
        self._revoked()
        self._assigned()
        if member is not None:
            await member.stop(self._timeout)

    def _check_open(self) -> None:
        if not self._is_open or not self._cluster.is_open:
            raise StorageUnavailable("the reader is not open")

    def _revoked(self) -> None:
        """Forget the fetched records: the next member of the partition reads them, perhaps this
        one."""
        self._held.clear()

    def _assigned(self) -> None:
        """Forget the records returned before: another member may have committed more since.

        It is kept until now because the group takes commits until the partitions are divided.
        """
        self._returned.clear()
        self._unplaced.clear()

    # ------------------------------------------------------------------------------ reading
    async def read(self, *, max_records: int, max_bytes: int, wait: float) -> Batch:
        member = await self._joined()
        deadline = time.monotonic() + wait
        while not self._held and not self._gaps:
            left = max(0.0, deadline - time.monotonic())
            await self._fetch(member, max_records, left)
            if not left:
                break
        return self._batch(max_records, max_bytes)

    async def _fetch(self, member: Member, max_records: int, wait: float) -> None:
        """Get records, or find the offset in a partition that has none."""
        mine = member.assigned
        for partition in mine & self._paused:
            member.pause(partition)
        partitions = mine - self._paused
        if mine and not partitions:
            await asyncio.sleep(min(wait, _LOOK))
            return
        wait = min(wait, _POLL if partitions else _LOOK)
        try:
            records = await member.poll(partitions, max_records=max_records, wait=wait)
        except NoOffset as error:
            (partition,) = error.args
            await self._start(member, partition)
        except OutOfRange as error:
            await self._jump(member, *error.args)
        except StorageUnavailable:
            # aiokafka's task for the group may have ended: the next call joins again.
            await self._leave()
            raise
        else:
            self._held.extend(map(_record, records))

    async def _start(self, member: Member, partition: int) -> None:
        """Begin in a partition without a committed offset."""
        first = await self._start_of(partition)
        expected = self._committed.get(partition)
        if expected is None:
            self._unplaced.add(partition)
            member.seek(partition, first)
        else:
            self._gone(member, partition, expected, first)

    async def _start_of(self, partition: int) -> int:
        """Return where to begin in a partition without a committed offset."""
        if self._since is not None:
            offset = await self._cluster.since(self._topic, partition, self._since)
            if offset is not None:
                return offset
            return (await self._cluster.ends(self._topic, [partition]))[partition]
        return (await self._cluster.firsts(self._topic, [partition]))[partition]

    async def _jump(self, member: Member, partition: int, expected: int) -> None:
        """Continue at the first record of a partition whose offset is not in the log.

        That is right even if the offset is after the *end*: the log was replaced by another one, or
        an unclean election cut it off, and it is unknown which of its records were read.
        """
        first = (await self._cluster.firsts(self._topic, [partition]))[partition]
        if first == expected:
            # A broker that lags behind; or the log has the offset by now.
            member.seek(partition, expected)
            return
        _log.error(
            "%s, partition %d: the record at %d is no longer in the log; it begins at %d",
            *(self._topic, partition, expected, first),
        )
        self._begin(member, partition, expected, first)

    def _begin(self, member: Member, partition: int, expected: int, first: int) -> None:
        """Continue at the first record of a partition, and report that as a gap."""
        self._held = collections.deque(held for held in self._held if held.partition != partition)
        self._unplaced.add(partition)
        self._gaps[partition] = (expected, first)
        self._returned[partition] = first
        member.seek(partition, first)

    def _batch(self, max_records: int, max_bytes: int) -> Batch:
        """Return the fetched records that fit."""
        gaps, self._gaps = self._gaps, {}
        records: list[ReadRecord] = []
        while self._held and len(records) < max_records:
            held = self._held[0]
            if held.partition in self._paused:
                self._held.popleft()
                continue
            max_bytes -= held.record.size
            if max_bytes < 0 and records:
                break
            records.append(self._held.popleft())
            self._returned[held.partition] = max(
                self._returned.get(held.partition, 0), held.offset + 1
            )
        return Batch(records=records, gaps=gaps, passed=self._passed())

    def _passed(self) -> dict[int, int]:
        """Return where there is nothing for readers between the last record and the offset."""
        if self._held or self._member is None:
            return {}
        passed = {
            partition: offset
            for partition, offset in self._member.positions().items()
            if offset > self._returned.get(partition, 0) and partition not in self._paused
        }
        self._returned.update(passed)
        return passed

    # ------------------------------------------------------------------------------- offsets
    async def commit(self, offsets: Mapping[int, int]) -> None:
        self._check_open()
        member = self._member
        if member is None:
            # It has left the group, and with it all partitions.
            return
        mine = member.assigned & self._returned.keys()
        own = {
            partition: offset
            for partition, offset in offsets.items()
            if partition in mine and offset <= self._returned[partition]
        }
        expected = own.keys() - self._unplaced
        if expected:
            for partition in expected - await member.with_offset(expected, self._timeout):
                await self._start_again(member, partition)
                del own[partition]
            # If the partitions have been rebalanced since, they are read again.
            own = {number: own[number] for number in own.keys() & self._returned.keys()}
        # Without success, the partitions are rebalanced: the next member reads from the
        # committed offsets.
        if own and await member.commit(own, self._timeout):
            self._unplaced -= own.keys()
            self._committed |= own

    async def _start_again(self, member: Member, partition: int) -> None:
        """Read a partition from its first record: the offset of the group is gone.

        Kafka deletes the offsets of a topic with the topic. If it was made again, the next records
        have offsets that this member has passed, so it would skip them, and no other one would
        read them after a commit.
        """
        first = (await self._cluster.firsts(self._topic, [partition]))[partition]
        if partition in self._returned:
            self._gone(member, partition, self._returned[partition], first)

    def _gone(self, member: Member, partition: int, expected: int, first: int) -> None:
        _log.error(
            "%s, partition %d: the offset of the group is gone: the topic was deleted and made"
            " again; it is read from %d",
            *(self._topic, partition, first),
        )
        self._committed.pop(partition, None)
        self._begin(member, partition, expected, first)

    async def rewind(self) -> None:
        member = await self._joined()
        self._held.clear()
        for partition in member.assigned:
            offset = await member.committed(partition, self._timeout)
            if offset is None:
                self._unplaced.add(partition)
                offset = await self._start_of(partition)
            member.seek(partition, offset)
        # A fetch in between may have added records.
        self._held.clear()

    def pause(self, partitions: Sequence[int]) -> None:
        self._paused.update(partitions)


def _record(read: Any) -> ReadRecord:
    # The first of several headers of one name counts.
    headers = {name: value or b"" for name, value in reversed(read.headers)}
    record = LogRecord(key=read.key or b"", value=read.value or b"", headers=headers)
    return ReadRecord(
        partition=read.partition, offset=read.offset, appended_at=read.timestamp, record=record
    )
