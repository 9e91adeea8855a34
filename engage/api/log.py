# SPDX-License-Identifier: Apache-2.0
"""The promises of a log: a replicated queue in front of the storage.

With a log, ``engage serve`` appends events to it and answers when they are durable there.
``engage load`` reads them and writes them to the storage. A log does not look for duplicates: the
storage does, behind it.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from engage.api.log_records import LogRecord
from engage.api.storage import Outcome

__all__ = [
    "Backlog",
    "Batch",
    "EventLog",
    "LogContext",
    "LogFactory",
    "LogReader",
    "Portion",
    "ReadRecord",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecord:
    """A record with its partition and offset."""

    #: The number of the part of the log that has it. Only records of one partition have an order.
    partition: int
    #: Its number in the partition. Numbers grow, and may have gaps.
    offset: int
    #: When it was appended, by the clock of the log: milliseconds since 1970 UTC.
    appended_at: int
    record: LogRecord


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records that were read together."""

    #: In the order of the log within each partition.
    records: Sequence[ReadRecord]
    #: Partitions from which records that were not read have already been deleted: the retention of
    #: the log is over. Each is the number of the first offset that was expected, and of the first
    #: one that is there. It is an alarm: acknowledged events may be lost.
    gaps: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    #: Partitions in which the reader has come to an offset after the last record that was returned,
    #: because the records between are not for readers, such as the markers of transactions. The
    #: caller commits these offsets with those of the records.
    passed: Mapping[int, int] = dataclasses.field(default_factory=dict)


#: The earlier name of :class:`Batch`.
Portion = Batch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The records that a group of readers has not committed yet."""

    #: The number of records. Logs that number with gaps count these too.
    records: int
    #: When the oldest of them was appended: milliseconds since 1970 UTC; ``None``: there is none.
    oldest_at: int | None
    #: How long the log keeps a record, in milliseconds; ``None``: without limit.
    retention: int | None
    #: Partitions whose committed offset is no longer in the log, as in :attr:`Batch.gaps`:
    #: acknowledged events may be lost. A reader that commits again ends the gap.
    gaps: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)


class LogReader(abc.ABC):
    """Reads the log as one member of a group; made by :meth:`EventLog.reader`.

    The partitions are divided between the members of the group. A partition that has no committed
    offset is read from its first record. Every method may raise :class:`StorageUnavailable`.
    """

    @abc.abstractmethod
    async def open(self) -> None:
        """Join the group. Idempotent."""

    @abc.abstractmethod
    async def read(self, *, max_records: int, max_bytes: int, wait: float) -> Batch:
        """Return the next records of the partitions that this member has now.

        A record is returned once, unless the partitions were rebalanced before it was committed,
        or :meth:`rewind` was called. A call that is cancelled has returned none: the next call
        returns them.

        :param max_bytes: of keys, values and headers; one record that is larger is returned alone.
        :param wait: seconds to wait for the first record.
        :return: perhaps no records.
        """

    @abc.abstractmethod
    async def commit(self, offsets: Mapping[int, int]) -> None:
        """Commit where the group continues after this process has ended.

        The caller names the offsets. A reader commits nothing by itself.

        :param offsets: partition → the offset after the last record that is done with. Partitions
            that this member has lost since then are ignored: their next member reads the records
            again.
        """

    @abc.abstractmethod
    async def rewind(self) -> None:
        """Continue each partition at its committed offset, so that records are returned again."""

    @abc.abstractmethod
    def pause(self, partitions: Sequence[int]) -> None:
        """Return no more records of these partitions until the process ends."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Leave the group. Idempotent."""


class EventLog(abc.ABC):
    """A log of records. Every method may raise :class:`StorageUnavailable`."""

    @abc.abstractmethod
    async def open(self, *, create: bool) -> None:
        """Connect, and create missing parts if ``create`` is true. Idempotent.

        With ``create``, a log that cannot be reached *now* is not an error: the server starts, and
        ``check`` raises until it can be reached.

        :raises StorageMissing: if there is no log, and ``create`` is false.
        :raises StorageIncompatible: if the settings of the log allow it to lose acknowledged
            records; the message names the setting. ``check`` looks at them again.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Finish the appends in progress, and release all resources. Idempotent."""

    @abc.abstractmethod
    async def check(self) -> None:
        """Check that a record could be appended to every partition now.

        :raises StorageUnavailable: if it could not.
        """

    @abc.abstractmethod
    async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        """Append records, and return when all of them are durable.

        Many calls run at the same time; the log combines them. A call waits only for the partitions
        of its own records. Records with the same key are in one partition, in the order of the
        calls. A call that is cancelled may have appended its records, or may append them later.

        :return: one outcome for each record, in their order: ``STORED``, or ``REFUSED`` if the log
            can never take it.
        :raises StorageUnavailable: if at least one record may not be durable.
        """

    @abc.abstractmethod
    async def append_dead(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        """Append records to the log of dead letters, which the readers do not read.

        It keeps acknowledged events that the storage refuses. It returns when they are durable.
        The loader repeats a call that raises until it succeeds, and loads nothing until then. So a
        record that is too large must be ``REFUSED``, alone: the loader then appends a shorter one.

        :return: one outcome for each record, as from :meth:`append`.
        :raises StorageUnavailable: if at least one record may not be durable.
        """

    @abc.abstractmethod
    async def ends(self) -> Mapping[int, int]:
        """Return partition → the offset that its next record will have."""

    async def firsts(self) -> Mapping[int, int]:
        """Return partition → the offset of the oldest record that was not deleted.

        If all records were deleted, it is the offset that the next record will have. A partition
        that is left out begins at 0: a log that never deletes need not implement this method.
        """
        return {}

    @abc.abstractmethod
    async def committed(self, group: str) -> Mapping[int, int]:
        """Return partition → the committed offset of a group, without partitions that have none."""

    @abc.abstractmethod
    async def backlog(self, group: str) -> Backlog:
        """Return how much a group has not committed yet."""

    @abc.abstractmethod
    def reader(self, group: str, *, since: int | None = None) -> LogReader:
        """Return a new member of a group of readers.

        :param since: if the group has no committed offsets, begin with the records that were
            appended at or after this time (milliseconds since 1970 UTC) instead of the first ones.
        """

    #: As :attr:`Storage.gauge_texts`.
    gauge_texts: ClassVar[Mapping[str, str]] = {}

    def gauges(self) -> Mapping[str, float]:
        """Return the log's own numbers for the metrics; called often, cheap, never raises.

        The names have the form of those of :meth:`Storage.gauges`; ``engage_log_`` is prepended.
        """
        return {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogContext:
    """The settings that a log receives from the core in addition to its options."""

    #: The folder of the config file: relative paths in the options are relative to it.
    base_dir: Path
    #: Seconds that a call may take; after that it raises :class:`StorageUnavailable`.
    write_timeout: float = 8.0
    #: The largest value of a record that the core appends, in bytes.
    max_value_bytes: int = 1024 * 1024


#: Makes a log from its validated options. Import the driver here, not at the module's top.
LogFactory = Callable[[Mapping[str, Any], LogContext], EventLog]
