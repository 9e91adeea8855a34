# SPDX-License-Identifier: Apache-2.0
"""Read a store once, and compare everything with everything that it follows from.

The choices and the profiles are read first, and the events after them. So an event that arrives
meanwhile is read, and whatever it changed in a profile is explained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from engage.api import (
    DAY_MS,
    Event,
    EventFilter,
    Kind,
    StorageContext,
    StorageUnavailable,
    Subject,
    render_time,
    suppressed_address,
)
from engage.people.tombstones import PSEUDONYM, Tombstones
from engage.reading.scans import all_pages
from engage.store.facade import Storage
from engage.store.people import Wrong
from engage.store.profiles import KIND_OF, Person
from engage.store.suppressions import HASHED
from engage.verify.letters import check_letters
from engage.verify.notes import Notes
from engage.verify.people import (
    ERASING,
    Rules,
    changed_by,
    compare_people,
    identities,
    keep_changes,
    keep_choice,
    keep_link,
    keep_person,
)
from engage.verify.report import TRIES, Doubt, Report

__all__ = ["Settings", "verify"]

#: Milliseconds that an event may take from its receipt until it is stored, in which it waits for
#: other writes, and by which the clocks of two machines may differ.
SLACK: Final = 60_000

_REASONS: Final = {
    "expired": "events that expired",
    "unfinished": "being written, or cut off by a crash",
}
#: Records of a page, and between two reports of the progress: larger pages need more memory.
_STEP: Final = 1000
#: How problems are named that are solved first: with events, with the whole file, and with rows of
#: nobody, which a new user could get.
_FIRST: Final = ("events", "keys", "file", "traits", "memberships", "links", "claims")
#: People who are repaired by one run, so that they fit in memory.
_MOST_REPAIRED: Final = 100_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the config says about a store."""

    context: StorageContext
    #: Days after which visitors expire; ``None``: never.
    visitors_days: int | None
    #: Return whether an event is valid: its type, and what is stored of it.
    is_valid: Callable[[str, Mapping[str, Any]], bool]
    #: Milliseconds that the loaders of a log are behind.
    lag: int = 0
    #: Of the hashes of erased ids; ``None``: nothing can have been erased.
    erasures_key: str | None = None

    @property
    def expires(self) -> bool:
        """Whether events may have expired."""
        return self.context.events_days is not None


async def verify(
    store: Storage,
    settings: Settings,
    *,
    clock: Callable[[], int],
    on_progress: Callable[[str, int], None] = lambda _what, _count: None,
    repair: bool = False,
) -> Report:
    """Compare what a store has with what it follows from.

    :param store: an open store, which may be in use.
    :param clock: returns milliseconds since 1970 UTC.
    :param on_progress: called often, with what is read and how many there were.
    :param repair: apply the events again of the people of whom something differs. Otherwise nothing
        is changed.
    :return: what was found, also if the store failed meanwhile: see :attr:`Report.failures`.
    """
    run = _Run(store, settings, clock, on_progress, repair=repair)
    for check in (run.problems, run.profiles, run.letters, run.suppressions):
        try:
            await check()
        except StorageUnavailable as error:
            run.report.failures.append(str(error))
        except sqlite3.Error as error:
            run.report.failures.append(f"temporary files: {error}")
        except Exception as error:  # Something is damaged that the storage has to read.
            problem = f"damaged: {type(error).__name__}: {error}"
            run.report.failures.append(f"{check.__name__}: {problem}")
    return run.report


class _Run:
    def __init__(
        self,
        store: Storage,
        settings: Settings,
        clock: Callable[[], int],
        on_progress: Callable[[str, int], None],
        *,
        repair: bool,
    ) -> None:
        self.report = Report()
        self._store = store
        self._repairs = repair
        #: Those whom events are to be applied again.
        self._wrong: list[tuple[Person, Wrong]] = []
        self._settings, self._clock, self._on_progress = settings, clock, on_progress

    # ----------------------------------------------------------------------------- one part each
    async def problems(self) -> None:
        """Ask the storage what it finds wrong in itself."""
        async for problem in self._store.problems():
            if isinstance(problem, int):
                self.report.checked["storage"] += problem
                self._on_progress("rows", self.report.checked["storage"])
            elif problem.doubt == "unknown":
                self.report.failures.append(f"{problem.what}: {problem.message}")
            else:
                expires = problem.doubt != "expired" or self._settings.expires
                reason = _REASONS.get(problem.doubt) if expires else None
                self.report.judge(problem.what, problem.message, reason)

    async def letters(self) -> None:
        """Compare the dead letters."""
        days, expires = self._settings.context.dead_letters_days, self._settings.expires
        erased = (await self._erased()).newest()
        await check_letters(self._store, self.report, self._clock(), days, expires, erased)

    async def suppressions(self) -> None:
        """Compare suppressed addresses with the form in which they are looked up."""
        async for row in self._all("suppressions", self._store.scan_suppressions, None):
            form = suppressed_address(row.channel, row.address)
            if form != row.address and not row.address.startswith(HASHED):
                message = f"{row.workspace_id}: {row.address!r} is not as it is looked up"
                self.report.differs("suppressions", message)

    async def profiles(self) -> None:
        """Check the events, and compare the choices, the profiles and the links with them."""
        store, settings = self._store, self._settings
        late_since = self._clock() - SLACK - settings.lag
        # An erasure that is not done, or that begins later, may be half of one.
        before = await self._erased(done=True)
        with contextlib.closing(Notes()) as notes:
            await self._keep_people(notes)
            await self._keep_events(notes, late_since, before)
            after = await self._erased()
            async for record in self._all("choices", store.history, None, None):
                # The records of erased people stay.
                name, erased = record.subject.id, after.newest()
                if not (name.startswith(PSEUDONYM) and record.workspace_id in erased):
                    keep_choice(notes, record)
            unfinished = {*await store.unfinished()}

            def doubt(workspace: str, kind: Kind, name: str) -> str | None:
                if kind is Kind.GROUP:
                    return None
                if (workspace, name) in unfinished:
                    return _REASONS["unfinished"]
                # An id may be that of a user and of a visitor.
                for either in (Kind.USER, Kind.VISITOR):
                    subject = (workspace, either, name)
                    if after.erased_at(*subject) > before.erased_at(*subject):
                        return ERASING
                return None

            now, days = self._clock(), settings.visitors_days
            # What is left of an event that is missing or damaged stays.
            different = self.report.different
            self._repairs &= not (
                self.report.failures
                or any(x.endswith(_FIRST) for x in different)
                or any(x.endswith(_FIRST) for x, _ in self.report.unprovable)
            )
            notes.sort()
            oldest = float("inf")
            # A page of one event is empty if that was erased.
            async for event in all_pages(partial(store.scan, EventFilter())):
                oldest = event.received_at
                break
            rules = Rules(
                limits=settings.context.profile_limits,
                horizon=self._horizon(now, oldest),
                oldest=oldest,
                erased=after.newest(),
                visitors_before=float("-inf") if days is None else now - days * DAY_MS,
                full=notes.full(settings.context.profile_limits.visitors),
                doubt=doubt,
            )
            wrong = compare_people(notes, rules, self.report, self._on_progress, self._on_wrong)
            await self._repair(notes, late_since)
        await self._confirm_choices(wrong, doubt)

    # ------------------------------------------------------------------------------- what is read
    async def _all(self, what: str, scan: Callable[..., Any], *first: Any) -> AsyncIterator[Any]:
        """Yield all that a method scans.

        :param what: for the progress. Events and suppressions are checked when they are read, and
            the others when they are compared.
        """
        count = 0
        async for item in all_pages(partial(scan, *first), most=_STEP):
            count += 1
            if count % _STEP == 0:
                self._on_progress(what, count)
            yield item
        if what in ("events", "suppressions"):
            self.report.checked[what] = count

    async def _keep_people(self, notes: Notes) -> None:
        """Keep the choices, the people and their links."""
        async for choice in self._all("choices", self._store.scan_subscriptions, None):
            keep_choice(notes, choice)
        for kind in Kind:
            async for rows in self._all(f"{kind.name.lower()}s", self._store.scan_rows, kind):
                keep_person(notes, rows)
        async for link in self._all("links", self._store.scan_links):
            keep_link(notes, link)

    def _on_wrong(self, person: Person, wrong: Wrong) -> None:
        if self._repairs and len(self._wrong) < _MOST_REPAIRED:
            self._wrong.append((person, wrong))

    async def _repair(self, notes: Notes, late_since: int) -> None:
        """Apply the events again of people who differ, some at a time: what a crash cuts off is
        found, and done, by the next run."""
        for number, (person, wrong) in enumerate(self._wrong):
            events = identities(person, notes.about(person))
            while True:
                some = [*itertools.islice(events, _STEP)]
                await self._store.rebuild(person, wrong, some)
                wrong = Wrong({}, {}, {})
                if len(some) < _STEP:
                    break
            self.report.repaired[f"{KIND_OF[person[1]].name.lower()}s"] += 1
            self._on_progress("repaired", number)
        if people := {person for person, _ in self._wrong}:
            # What was wrong may have won over an event that arrived meanwhile.
            late = partial(self._store.scan, EventFilter(since=late_since))
            async for event in all_pages(late):
                for person in people & changed_by(event).keys():
                    await self._store.rebuild(person, Wrong({}, {}, {}), [event.identity])

    async def _confirm_choices(self, people: Sequence[Person], doubt: Doubt) -> None:
        """Read the choices again that differ: they may have changed between the two scans."""
        for workspace, number, name in people:
            kind, groups = KIND_OF[number], None
            for _ in range(TRIES):
                groups = await self._store.unproven(workspace, Subject(kind, name))
                if groups is not None:
                    break
            else:
                self.report.unprovable["choices", "changed all the time"] += 1
            for group in groups or ():
                message = (
                    f"{workspace}: {group!r} of {kind} {name!r} is not as its last record says"
                )
                self.report.judge("choices", message, doubt(workspace, kind, name))

    async def _keep_events(self, notes: Notes, late_since: int, erased: Tombstones) -> None:
        """Check all events, and keep their changes."""
        async for event in self._all("events", self._store.scan, EventFilter()):
            try:
                problem = _problem(event, self._settings)
                names = (event.workspace_id, event.user_id, event.anonymous_id)
                if erased.cover(*names, event.received_at):
                    problem = "is of an erased person"
                keep_changes(notes, event, late=event.received_at >= late_since)
            except sqlite3.Error:
                raise
            except Exception as error:
                problem = f"cannot be read ({type(error).__name__})"
            if problem:
                named = f"{event.workspace_id}: {event.origin} {event.message_id!r}"
                self.report.differs("events", f"{named} {problem}")

    async def _erased(self, *, done: bool = False) -> Tombstones:
        tombstones = Tombstones(self._store, self._settings.erasures_key, done=done)
        await tombstones.refresh()
        return tombstones

    def _horizon(self, now: int, oldest: float) -> float:
        """Return the time before which events may have expired."""
        days = self._settings.context.events_days
        return float("-inf") if days is None else max(min(oldest, now), now - days * DAY_MS)


def _problem(event: Event, settings: Settings) -> str:
    """Return what is wrong with an event by itself, if anything."""
    document = event.document()
    own = {
        "type": event.type,
        "messageId": event.message_id,
        "workspaceId": event.workspace_id,
        "userId": event.user_id,
        "anonymousId": event.anonymous_id,
        "receivedAt": render_time(event.received_at),
        "timestamp": render_time(event.timestamp),
    }
    if event.type in ("track", "page", "screen"):
        own["event" if event.type == "track" else "name"] = event.name
    for name, value in own.items():
        if document.get(name) != value:
            return f"has another {name} than it is stored with"
    return "" if settings.is_valid(event.type, document) else "is not valid"
