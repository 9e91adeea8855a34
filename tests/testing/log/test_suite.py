# SPDX-License-Identifier: Apache-2.0
"""The suite for logs passes with a log in memory, and finds the flaw of each other log here."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from _pytest.outcomes import Skipped

from engage.api import (
    Backlog,
    Batch,
    LogContext,
    LogRecord,
    Outcome,
    Status,
    StorageMissing,
    StorageUnavailable,
)
from engage.testing import LogConformance
from support import flaws
from support.memory_log import BROKERS, MemoryBroker, MemoryLog, MemoryReader

pytestmark = pytest.mark.virtual_time


class OnMemory(LogConformance):
    """The suite on a log in memory."""

    plugin: ClassVar[str] = "support.memory_log"

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"name": str(tmp_path)}

    def can(self, feature: str) -> bool:
        return feature != "durable"

    def break_log(self, options: Mapping[str, Any]) -> None:
        BROKERS[options["name"]].down = True

    def break_partition(self, options: Mapping[str, Any], partition: int) -> None:
        BROKERS[options["name"]].leaderless.add(partition)

    def mend_log(self, options: Mapping[str, Any]) -> None:
        BROKERS[options["name"]].down = False
        BROKERS[options["name"]].leaderless.clear()

    def expire(self, options: Mapping[str, Any], offsets: Mapping[int, int]) -> None:
        for partition, offset in offsets.items():
            BROKERS[options["name"]].expire(partition, offset)


@pytest.fixture(autouse=True)
def _forget(tmp_path: Path) -> Iterator[None]:
    """Forget the broker of a test."""
    yield
    BROKERS.pop(str(tmp_path), None)


class TestMemoryLog(OnMemory):
    """The log of the tests has no flaw."""


# ----------------------------------------------------------------------------- flaws of appending
class Acknowledges(MemoryLog):
    """Reports every record as stored."""

    async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        try:
            return await super().append(records)
        except StorageUnavailable:
            return [Outcome(Status.STORED)] * len(records)


class AppendsLater(MemoryLog):
    """Returns before the records are durable, and forgets them if it is closed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._later: set[asyncio.Task[Any]] = set()

    async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        await self.enter("append")
        self._later.add(asyncio.ensure_future(self._append(records)))
        await asyncio.sleep(0)
        return [Outcome(Status.STORED)] * len(records)

    async def _append(self, records: Sequence[LogRecord]) -> None:
        await asyncio.sleep(0.02)
        await super().append(records)

    async def close(self) -> None:
        for later in self._later:
            later.cancel()
        await super().close()


#: Keeps the headers that engage uses today.
LosesHeaders = flaws.given(MemoryLog, "append", headers=lambda one: {"meta": one.headers["meta"]})
#: Takes values for text.
KeepsText = flaws.given(
    MemoryLog, "append", value=lambda one: one.value.decode(errors="replace").encode()
)


class AppendsTwice(MemoryLog):
    """Retries what has been appended already."""

    async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        await super().append(records)
        return await super().append(records)


class SpreadsKeys(MemoryLog):
    """Chooses partitions in turn, whatever the key is."""

    def __init__(self, broker: MemoryBroker, **options: Any) -> None:
        super().__init__(broker, **options)
        self._turn = 0
        broker.partition_of = self._next  # type: ignore[method-assign]

    def _next(self, key: bytes) -> int:
        self._turn += 1
        return self._turn % 3


class ReordersCalls(MemoryLog):
    """Appends small calls at once, and collects large ones."""

    async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        if len(records) > 1:
            await asyncio.sleep(0.001)
        return await super().append(records)


class RefusesAll(MemoryLog):
    """Refuses a call that has one record that is too large."""

    async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        if any(len(record.value) > self.max_value_bytes for record in records):
            return [Outcome(Status.REFUSED, "too large")] * len(records)
        return await super().append(records)


class HasALowerLimit(MemoryLog):
    """Does not take the largest record that the core appends."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.max_value_bytes = 1_000_000


class LosesTheRestOfALargeCall(MemoryLog):
    """Sends the first megabyte."""

    async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        size = 0
        for number, record in enumerate(records):
            size += record.size
            if size > 2_000_000 and number:
                await super().append(records[:number])
                return [Outcome(Status.STORED)] * len(records)
        return await super().append(records)


class AllowsFewCalls(MemoryLog):
    """Fails if many calls run at the same time."""

    _running = 0

    async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        self._running += 1
        try:
            if self._running > 32:
                raise StorageUnavailable("busy")
            await asyncio.sleep(0.001)
            return await super().append(records)
        finally:
            self._running -= 1


class CancelsTogether(MemoryLog):
    """Combines calls; if one is cancelled, so are the others."""

    _shared: asyncio.Task[None] | None = None
    _waiting: Sequence[LogRecord] = ()

    async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        self._waiting = [*self._waiting, *records]
        if self._shared is None or self._shared.done():
            self._shared = asyncio.ensure_future(self._send())
        await self._shared
        return [Outcome(Status.STORED)] * len(records)

    async def _send(self) -> None:
        await asyncio.sleep(0.005)
        waiting, self._waiting = self._waiting, ()
        await super().append(waiting)


class MixesDeadRecords(MemoryLog):
    """Appends dead letters to the log itself."""

    async def append_dead(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        return await self.append(records)


#: Loses a dead letter that is too large, silently.
DropsLargeDeadRecords = flaws.returned(
    MemoryLog, "append_dead", lambda outcomes: [Outcome(Status.STORED)] * len(outcomes)
)


class HasALowerLimitForDeadRecords(MemoryLog):
    """Does not take the letter of the largest record."""

    def __init__(self, broker: MemoryBroker, **options: Any) -> None:
        super().__init__(broker, **options)
        broker.max_dead = 1000


class Forgets(MemoryLog):
    """Keeps records until it is closed."""

    async def close(self) -> None:
        for number, end in self.broker.ends().items():
            self.broker.expire(number, end)
        await super().close()


class AlwaysCreates(MemoryLog):
    """Creates a log for every command."""

    async def open(self, *, create: bool) -> None:
        self.broker.exists = True
        await super().open(create=create)


#: Works after it was closed.
NeverCloses = flaws.without(MemoryLog, "close")


# ------------------------------------------------------------------------------- flaws of reading
#: Returns everything there is.
IgnoresCounts = flaws.called(MemoryReader, "read", max_records=1000)
#: Returns batches of any size.
IgnoresSizes = flaws.called(MemoryReader, "read", max_bytes=1 << 30)


class IsStuckAtLargeRecords(MemoryReader):
    """Never returns a record that is larger than a batch."""

    async def read(self, *, max_records: int, max_bytes: int, wait: float) -> Batch:
        before = dict(self.offsets)
        batch = await super().read(max_records=max_records, max_bytes=max_bytes, wait=wait)
        if sum(record.record.size for record in batch.records) > max_bytes:
            self.offsets = before
            await asyncio.sleep(wait)
            return Batch(records=[])
        return batch


#: Returns the newest records first.
SortsByTime = flaws.returned(MemoryReader, "read", records=lambda batch: batch.records[::-1])


class ReturnsAgain(MemoryReader):
    """Begins at the committed offset each time."""

    async def read(self, **options: Any) -> Batch:
        await self.rewind()
        return await super().read(**options)


#: Returns at once.
DoesNotWait = flaws.called(MemoryReader, "read", wait=0)


class BeginsAtTheEnd(MemoryReader):
    """Begins with what is appended from now on, as clients do by default."""

    def assign(self, partitions: set[int]) -> None:
        super().assign(partitions)
        for number, offset in self.offsets.items():
            if offset is None:
                self.offsets[number] = self.log.broker.ends()[number]


class CommitsWhereItIs(MemoryReader):
    """Commits its position, whatever the caller names."""

    async def commit(self, offsets: Mapping[int, int]) -> None:
        await super().commit({number: offset or 0 for number, offset in self.offsets.items()})


class CommitsWhenItCloses(MemoryReader):
    """Commits its position when it leaves."""

    async def close(self) -> None:
        if self._open:
            await self.commit({number: offset or 0 for number, offset in self.offsets.items()})
        await super().close()


class HasOneGroup(MemoryReader):
    """Ignores the name of the group."""

    def __init__(self, log: MemoryLog, group: str, since: int | None) -> None:
        super().__init__(log, "g", since)


class RewindsToTheStart(MemoryReader):
    """Forgets the committed offsets when it rewinds."""

    async def rewind(self) -> None:
        await super().rewind()
        self.offsets = dict.fromkeys(self.offsets)


class DoesNotRewind(MemoryReader):
    """Goes on after a failure."""

    async def rewind(self) -> None:
        if not self._open:
            raise StorageUnavailable("not open")


class EndsThePause(MemoryReader):
    """Forgets what is paused when it rewinds."""

    async def rewind(self) -> None:
        await super().rewind()
        self._paused.clear()


#: Reads on.
IgnoresThePause = flaws.without(MemoryReader, "pause")


class IgnoresTheTime(MemoryReader):
    """Begins at the first record."""

    def __init__(self, log: MemoryLog, group: str, since: int | None) -> None:
        super().__init__(log, group, None)


class AlwaysBeginsAtTheTime(MemoryReader):
    """Begins at the time, though the group has committed offsets."""

    def assign(self, partitions: set[int]) -> None:
        super().assign(partitions)
        for number in self.offsets if self.since is not None else ():
            self.offsets[number] = self.log.broker.start("never", number, self.since)


#: Continues at the first record that is there, silently.
JumpsOverGaps = flaws.returned(MemoryReader, "read", gaps={})


class AlwaysReportsAGap(MemoryReader):
    """Takes the first record of a group that has no offset for a gap."""

    def assign(self, partitions: set[int]) -> None:
        super().assign(partitions)
        self.offsets = {number: offset or 0 for number, offset in self.offsets.items()}


#: Works after it was closed.
ReadsAfterTheEnd = flaws.without(MemoryReader, "close")


class IgnoresCommits(MemoryLog):
    """Counts all records as not committed."""

    async def backlog(self, group: str) -> Backlog:
        return await super().backlog("never")


class TakesTheNewest(MemoryLog):
    """Reports the age of the newest record."""

    async def backlog(self, group: str) -> Backlog:
        found = await super().backlog(group)
        newest = max((record.appended_at for record in self.broker.records), default=None)
        return dataclasses.replace(found, oldest_at=newest if found.records else None)


#: Counts what is left after a gap, and does not report the gap.
HidesGapsOfTheBacklog = flaws.returned(MemoryLog, "backlog", gaps={})
#: Has all partitions begin at 0, however many records were deleted.
ForgetsWhatWasDeleted = flaws.returned(MemoryLog, "firsts", lambda firsts: {})


# -------------------------------------------------------------------------------- flaws of groups
class TakesAllPartitions(MemoryReader):
    """Does not divide the partitions."""

    def assign(self, partitions: set[int]) -> None:
        super().assign(set(self.log.broker.ends()))


class CommitsWhatItLost(MemoryReader):
    """Commits for partitions that another member has now."""

    async def commit(self, offsets: Mapping[int, int]) -> None:
        if not self._open:
            raise StorageUnavailable("not open")
        self.log.broker.commit(self.group, offsets)


class ContinuesWhereTheOtherWas(MemoryReader):
    """Skips what the last member read and did not commit."""

    _last: ClassVar[dict[tuple[int, int], int]] = {}

    def assign(self, partitions: set[int]) -> None:
        last = self._last
        broker = id(self.log.broker)
        last.update({(broker, number): offset or 0 for number, offset in self.offsets.items()})
        new = partitions - self.offsets.keys()
        super().assign(partitions)
        self.offsets.update({n: last[broker, n] for n in new if (broker, n) in last})


class DropsWhatItHasRead(MemoryReader):
    """Reads ahead, and commits what it has read when the partitions are divided again."""

    def assign(self, partitions: set[int]) -> None:
        kept = {n: self.log.broker.ends()[n] for n in partitions & self.offsets.keys()}
        super().assign(partitions)
        self.offsets.update(kept)
        self.log.broker.commit(self.group, kept)


# ------------------------------------------------------------------------------ flaws in failures
class RaisesSomethingElse(MemoryLog):
    """Raises an error of a library."""

    async def append_dead(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        try:
            return await super().append_dead(records)
        except StorageUnavailable as error:
            raise RuntimeError("driver") from error


class NeedsTheBrokerToOpen(MemoryLog):
    """Does not open while the log cannot be reached."""

    async def open(self, *, create: bool) -> None:
        await super().open(create=False if self.broker.exists else create)


class WritesOneCallAtATime(MemoryLog):
    """Appends a call when the one before it has ended."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._turn = asyncio.Lock()

    async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        async with self._turn:
            return await super().append(records)


class LosesCancelledReads(MemoryReader):
    """Takes records, and then waits."""

    async def read(self, **options: Any) -> Batch:
        batch = await super().read(**options)
        await asyncio.sleep(0)
        return batch


class StaysBroken(MemoryLog):
    """Does not connect again."""

    _broken = False

    async def enter(self, name: str) -> None:
        self._broken = self._broken or self.broker.down
        if self._broken:
            raise StorageUnavailable("not connected")
        await super().enter(name)


class SkipsAfterAnOutage(MemoryReader):
    """Continues at the end when it has connected again."""

    _broken = False

    async def read(self, **options: Any) -> Batch:
        if self._broken and not self.log.broker.down:
            self._broken = False
            self.offsets.update(self.log.broker.ends())
        self._broken = self.log.broker.down
        return await super().read(**options)


def suite(flawed: type[MemoryLog | MemoryReader], monkeypatch: pytest.MonkeyPatch) -> OnMemory:
    """Return the suite for this log, or for a log with this reader."""

    def register(register: Callable[..., None]) -> None:
        def make(options: Mapping[str, Any], context: LogContext) -> MemoryLog:
            broker = BROKERS.setdefault(options["name"], MemoryBroker(exists=False))
            cls = flawed if issubclass(flawed, MemoryLog) else MemoryLog
            made = cls(
                broker, write_timeout=context.write_timeout, max_value_bytes=context.max_value_bytes
            )
            if issubclass(flawed, MemoryReader):
                made.reader_class = flawed
            return made

        register("flawed", make, {})

    module = ModuleType("flawed")
    module.engage_register_log = register  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flawed", module)

    class Suite(OnMemory):
        plugin = "flawed"
        patience = 2

    return Suite()


FLAWS = [
    (Acknowledges, "test_nothing_is_acknowledged_while_the_log_is_broken"),
    (AppendsLater, "test_what_was_appended_is_seen_by_others"),
    (AppendsLater, "test_closing_finishes_what_is_being_appended"),
    (LosesHeaders, "test_records_are_returned_unchanged"),
    (KeepsText, "test_records_are_returned_unchanged"),
    (AppendsTwice, "test_a_record_is_in_the_log_once"),
    (SpreadsKeys, "test_records_of_a_key_keep_their_order"),
    (ReordersCalls, "test_records_of_a_key_keep_their_order"),
    (RefusesAll, "test_a_record_that_is_too_large_is_refused_alone"),
    (HasALowerLimit, "test_the_largest_record_of_the_core_is_stored"),
    (LosesTheRestOfALargeCall, "test_ten_megabytes_are_appended_by_one_call"),
    (AllowsFewCalls, "test_many_calls_run_at_the_same_time"),
    (CancelsTogether, "test_a_cancelled_call_harms_no_other"),
    (MixesDeadRecords, "test_dead_records_are_not_read"),
    (DropsLargeDeadRecords, "test_a_dead_record_that_is_too_large_is_refused_alone"),
    (HasALowerLimitForDeadRecords, "test_the_largest_record_of_the_core_is_taken_as_a_dead_one"),
    (Forgets, "test_records_are_there_after_reopening"),
    (Forgets, "test_open_and_close_are_idempotent"),
    (AlwaysCreates, "test_a_log_that_does_not_exist_is_missing"),
    (NeverCloses, "test_a_closed_log_raises"),
    (IgnoresCounts, "test_a_batch_has_limits"),
    (IgnoresSizes, "test_a_batch_has_limits"),
    (IsStuckAtLargeRecords, "test_a_batch_has_limits"),
    (SortsByTime, "test_a_record_is_returned_once"),
    (ReturnsAgain, "test_a_record_is_returned_once"),
    (DoesNotWait, "test_a_read_waits_for_the_first_record"),
    (BeginsAtTheEnd, "test_a_reader_begins_at_the_first_record"),
    (CommitsWhereItIs, "test_a_group_continues_at_the_offsets_that_were_named"),
    (CommitsWhenItCloses, "test_a_reader_commits_nothing_by_itself"),
    (HasOneGroup, "test_groups_do_not_know_each_other"),
    (RewindsToTheStart, "test_rewinding_returns_what_is_not_committed_again"),
    (DoesNotRewind, "test_rewinding_returns_what_is_not_committed_again"),
    (EndsThePause, "test_a_paused_partition_waits"),
    (IgnoresThePause, "test_a_paused_partition_waits"),
    (IgnoresTheTime, "test_a_reader_begins_at_a_time"),
    (AlwaysBeginsAtTheTime, "test_a_reader_begins_at_a_time"),
    (IgnoresCommits, "test_the_backlog_is_what_is_not_committed"),
    (TakesTheNewest, "test_the_backlog_is_what_is_not_committed"),
    (JumpsOverGaps, "test_a_gap_is_reported_once"),
    (HidesGapsOfTheBacklog, "test_a_gap_is_reported_once"),
    (ForgetsWhatWasDeleted, "test_a_gap_is_reported_once"),
    (AlwaysReportsAGap, "test_a_gap_is_reported_once"),
    (ReadsAfterTheEnd, "test_a_closed_reader_raises"),
    (TakesAllPartitions, "test_readers_divide_the_partitions"),
    (ContinuesWhereTheOtherWas, "test_a_reader_takes_over_what_another_leaves"),
    (CommitsWhatItLost, "test_a_commit_of_a_lost_partition_is_ignored"),
    (DropsWhatItHasRead, "test_nothing_is_skipped_while_readers_come_and_go"),
    (RaisesSomethingElse, "test_every_method_raises_unavailable"),
    (NeedsTheBrokerToOpen, "test_a_log_is_opened_while_it_is_broken"),
    (WritesOneCallAtATime, "test_a_call_waits_only_for_its_own_partitions"),
    (LosesCancelledReads, "test_a_cancelled_read_loses_nothing"),
    (SkipsAfterAnOutage, "test_acknowledged_records_survive_failures"),
]


#: How a test of the suite fails.
FOUND = (
    *(AssertionError, RuntimeError, StorageUnavailable, StorageMissing, TimeoutError),
    pytest.fail.Exception,
)


@pytest.mark.parametrize(("flawed", "name"), FLAWS)
def test_the_suite_finds_a_flaw(
    flawed: type[MemoryLog | MemoryReader],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test = getattr(suite(flawed, monkeypatch), name)
    with pytest.raises(FOUND):
        test(tmp_path)


def test_the_suite_finds_a_log_that_stays_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def soon(attempt: Callable[[], Any], *errors: type[Exception]) -> Any:
        return await attempt()

    monkeypatch.setattr("engage.testing.log.failures.eventually", soon)
    name = "test_nothing_is_acknowledged_while_the_log_is_broken"
    getattr(suite(MemoryLog, monkeypatch), name)(tmp_path)
    BROKERS.pop(str(tmp_path))
    with pytest.raises(StorageUnavailable):
        getattr(suite(StaysBroken, monkeypatch), name)(tmp_path)


def test_the_suite_skips_features_that_a_server_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = suite(MemoryLog, monkeypatch)
    monkeypatch.setattr(type(one), "can", lambda self, feature: False)
    for name in (
        "test_a_killed_process_loses_no_acknowledged_record",
        "test_a_gap_is_reported_once",
        "test_a_reader_begins_at_a_time",
        "test_nothing_is_acknowledged_while_the_log_is_broken",
    ):
        with pytest.raises(Skipped):
            getattr(one, name)(tmp_path)
