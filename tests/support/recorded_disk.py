# SPDX-License-Identifier: Apache-2.0
"""A record of all writes and syncs of a store, errors in it, and what a power cut leaves of it.

``recorded_disk.c`` makes the record, and lets calls fail as :class:`Fault` says. A sync that fails
leaves pages in the cache that are not on the disk and count as written, as Linux does.
"""

from __future__ import annotations

import copy
import dataclasses
import mmap
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from support.cache import cached

SHIM: Final = Path(__file__).with_name("recorded_disk.c")
_PAGE: Final = 4096
_SECTOR: Final = 512


class Fault(NamedTuple):
    """A rule by which calls fail."""

    call: str  #: ``database write``, ``database sync``, ``log write`` or ``log sync``.
    thread: str = "any"  #: Or the ``main`` thread of a process, or an ``other``.
    #: Calls before the first that fails; of those after it, each so many-th fails, at most so many.
    skip: int = 0
    every: int = 1
    times: int = 1
    delay: int = 0  #: Microseconds that each call takes longer.
    #: The so many-th call, from the one that fails, kills its process.
    kill: int = 0
    #: 1: the error says that the disk is full; otherwise that it cannot be read or written.
    full: int = 0


class Recorder:
    """Connects the processes that use a store with the record and the faults."""

    _RULE: ClassVar = struct.Struct("=11q")
    _RULES: ClassVar = 4
    _HEAD: ClassVar = struct.Struct("=c3xiqqII")

    def __init__(self, folder: Path, *, record: bool = True) -> None:
        """:param folder: of the store ``engage.db``.
        :param record: whether to keep the record, which has the contents of all writes.
        """
        self._record = folder / "record" if record else Path(os.devnull)
        rules = folder / "rules"
        if not rules.exists():
            self._record.touch()
            rules.write_bytes(bytes(self._RULE.size * self._RULES))
        with rules.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        names = {"DISK_STORE": folder / "engage.db", "DISK_RECORD": self._record}
        names |= {"DISK_FAULTS": rules, "LD_PRELOAD": shim()}
        self.environment = {name: os.path.realpath(path) for name, path in names.items()}

    def set(self, number: int, fault: Fault) -> None:
        """Let calls fail from now on."""
        kind, what = fault.call.split()
        first = ("", "database", "log").index(kind), ord(what[0])
        thread = ("any", "main", "other").index(fault.thread)
        self._RULE.pack_into(self._map, number * self._RULE.size, *first, thread, *fault[2:], 0, 0)

    @property
    def failed(self) -> int:
        """How many calls have failed."""
        return sum(rule[-1] for rule in self._RULE.iter_unpack(self._map))

    def acknowledge(self, names: list[str]) -> None:
        """Record that a client was told that these events are stored."""
        self.note("a", "\n".join(names))

    def note(self, what: str, text: str = "", name: str = "") -> None:
        """Record something else that happened: ``text`` and ``name`` are in the :class:`Call`."""
        data = text.encode()
        with self._record.open("ab", buffering=0) as file:
            head = self._HEAD.pack(what.encode(), 0, 0, 0, len(name), len(data))
            file.write(head + name.encode() + data)

    def calls(self) -> list[Call]:
        """Return what the processes did, in order."""
        content, calls, at = self._record.read_bytes(), [], 0
        while at < len(content):
            call, result, file, offset, name, size = self._HEAD.unpack_from(content, at)
            middle = at + self._HEAD.size + name
            at, path = middle + size, content[middle - name : middle].decode()
            names = os.path.basename(path), content[middle:at]
            calls.append(Call(call.decode(), result, file, offset, *names))
        return calls


def shim() -> Path:
    """Return the compiled library."""

    def build(folder: Path) -> None:
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(folder / "disk.so"), str(SHIM)]
        subprocess.run(command, check=True)

    return cached("recorded-disk", SHIM.read_bytes(), build) / "disk.so"


class Call(NamedTuple):
    """What ``note`` of the shim has written."""

    call: str
    result: int
    file: int
    offset: int
    name: str
    data: bytes


def _some(most: int, chance: random.Random) -> int:
    return chance.choice((0, most, chance.randint(0, most)))


#: A page that is written, with its content up to the end of the file; or the size of a truncation.
_Change = tuple[int, bytes] | int


def _apply(disk: bytearray, change: _Change) -> None:
    size = change if isinstance(change, int) else change[0] * _PAGE
    disk.extend(bytes(max(0, size - len(disk))))
    if isinstance(change, int):
        del disk[size:]
    else:
        disk[size : size + len(change[1])] = change[1]


class _File:
    """A file: as programs see it, as it surely is on the disk, and the changes between."""

    def __init__(self) -> None:
        self.cache, self.disk = bytearray(), bytearray()
        self.changes: list[_Change] = []
        self._synced = 0
        self._begun: dict[int, int] = {}

    def replay(self, call: Call, kept: float, chance: random.Random) -> None:
        """:param kept: the part of the pages that a failed sync writes; of truncations, all."""
        if call.call == "w":
            end = call.offset + len(call.data)
            self.cache.extend(bytes(max(0, end - len(self.cache))))
            self.cache[call.offset : end] = call.data
            for start in range(call.offset // _PAGE * _PAGE, end, _PAGE):
                self.changes.append((start // _PAGE, bytes(self.cache[start : start + _PAGE])))
        elif call.call == "t":
            _apply(self.cache, call.offset)
            self.changes.append(call.offset)
        elif call.call == "s":
            self._begun[call.offset] = self._synced + len(self.changes)
        elif call.call == "S":
            count = max(0, self._begun.pop(call.offset) - self._synced)
            for change in self.changes[:count]:
                if call.result == 0 or isinstance(change, int) or chance.random() < kept:
                    _apply(self.disk, change)
            del self.changes[:count]
            self._synced += count

    def after_cut(self, chance: random.Random) -> bytes:
        """Return a content that the file may have after a cut."""
        disk, changes = self.disk.copy(), self.changes
        if chance.random() < 0.7:
            end = _some(len(changes), chance)
            changes, rest = changes[:end], changes[end:]
            if rest and not isinstance(rest[0], int):
                page, content = rest[0]
                torn = content[: chance.randrange(_PAGE // _SECTOR) * _SECTOR]
                changes = [*changes, (page, torn)]
        else:
            # With a truncation, everything is lost that was written after it.
            ends = [at for at, change in enumerate(changes) if isinstance(change, int)]
            changes, share = changes[: chance.choice([*ends, len(changes)])], chance.random()
            changes = [one for one in changes if isinstance(one, int) or chance.random() < share]
        for change in changes:
            _apply(disk, change)
        return bytes(disk)


@dataclasses.dataclass
class Promised:
    """What clients were told before a cut."""

    #: Events that are stored.
    acknowledged: set[str] = dataclasses.field(default_factory=set)
    #: Old events that retention has deleted.
    expired: set[str] = dataclasses.field(default_factory=set)
    #: Backups that are complete → the events that were acknowledged before each.
    backups: dict[str, set[str]] = dataclasses.field(default_factory=dict)


class _Disk:
    """The files of a store while a record is replayed."""

    def __init__(self, kept: float, chance: random.Random) -> None:
        self._kept, self._chance = kept, chance
        self._files: dict[int, _File] = {}
        self._names: dict[str, _File] = {}
        #: Changes of names that no sync of the folder covers: old name, new name, new file.
        self._renames: list[tuple[str, str, _File | None]] = []
        self.promised = Promised()

    def replay(self, call: Call) -> None:
        names = call.data.decode().split() if call.call in "axb" else []
        if call.call == "a":
            self.promised.acknowledged.update(names)
        elif call.call == "x":
            self.promised.expired.update(names)
        elif call.call == "b":
            self.promised.backups[call.name] = set(names)
        elif call.call == "c":
            self._files[call.file] = _File()
            self._renames.append(("", call.name, self._files[call.file]))
        elif call.call in "ur":
            self._renames.append((call.name, os.path.basename(call.data.decode()), None))
        elif call.call == "F" and call.result == 0:
            self._rename(self._names, len(self._renames))
            self._renames.clear()
        elif call.file in self._files:
            self._files[call.file].replay(call, self._kept, self._chance)

    def _rename(self, names: dict[str, _File], count: int) -> None:
        for old, new, created in self._renames[:count]:
            file = created or names.pop(old, None)
            if new and file is not None:
                names[new] = file

    def after_cut(self) -> dict[str, bytes]:
        """Return the files that may be there after a cut."""
        names = self._names.copy()
        self._rename(names, _some(len(self._renames), self._chance))
        return {name: file.after_cut(self._chance) for name, file in names.items()}


def states(
    calls: list[Call], count: int, seed: str
) -> Iterator[tuple[str, dict[str, bytes], Promised]]:
    """Build states of a disk after cuts, half of them after the first sync that failed.

    :param calls: if ``m`` is noted among them, half of the cuts are soon after it.
    :return: where the cut is, the files, and what was promised.
    """
    chance = random.Random(seed)
    errors = [at for at, call in enumerate(calls) if call.call == "S" and call.result]
    marks = [at for at, call in enumerate(calls) if call.call == "m"]
    while count > 0:
        cuts = [len(calls)]
        for _ in range(min(7, count - 1)):
            start = chance.choice((0, *(marks or errors)[:1]))
            end = min(start + 150, len(calls)) if start in marks else len(calls)
            cuts.append(chance.randrange(start, end))
        count -= len(cuts)
        kept = chance.choice((0, 0, chance.random()))
        disk = _Disk(kept, chance)
        for at in range(len(calls) + 1):
            for _ in range(cuts.count(at)):
                where = f"cut {at} of {len(calls)}, {kept:.0%} kept by failed syncs"
                yield where, disk.after_cut(), copy.deepcopy(disk.promised)
            if at < len(calls):
                disk.replay(calls[at])
