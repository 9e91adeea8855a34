# SPDX-License-Identifier: Apache-2.0
"""Read a store once, and compare everything with everything that it follows from.

The choices and the profiles are read first, and the events after them. So an event that arrives
meanwhile is read, and whatever it changed in a profile is explained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, Final

import orjson

from engage.api import (
    DAY_MS,
    Event,
    EventFilter,
    EventStore,
    Kind,
    ProfileStore,
    StorageContext,
    StorageUnavailable,
    SubscriptionStore,
    SuppressionStore,
    VerifiableStore,
    render_time,
    suppressed_address,
)
from engage.upkeep.export import all_pages
from engage.upkeep.tombstones import HASHED, Tombstones
from engage.upkeep.verify.choices import confirm_choices, keep_choices, keep_history
from engage.upkeep.verify.letters import check_letters
from engage.upkeep.verify.notes import Notes
from engage.upkeep.verify.people import (
    ERASING,
    Rules,
    compare_people,
    keep_changes,
    keep_link,
    keep_profile,
)
from engage.upkeep.verify.report import Report

__all__ = ["Settings", "verify"]

#: Milliseconds that an event may take from its receipt until it is stored, in which it waits for
#: other writes, and by which the clocks of two machines may differ.
SLACK: Final = 60_000

_REASONS: Final = {
    "expired": "events that expired",
    "unfinished": "cut off by a crash, until a server starts",
    "unknown": "could not be looked at",
}
#: Records of a page, and between two reports of the progress: larger pages need more memory.
_STEP: Final = 1000


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
    store: EventStore,
    settings: Settings,
    *,
    clock: Callable[[], int],
    on_progress: Callable[[str, int], None] = lambda _what, _count: None,
) -> Report:
    """Compare what a store has with what it follows from. Nothing is changed.

    :param store: an open store, which may be in use.
    :param clock: returns milliseconds since 1970 UTC.
    :param on_progress: called often, with what is read and how many there were.
    :return: what was found, also if the store failed meanwhile: see :attr:`Report.failures`.
    """
    report = Report()
    for check in (_problems, _profiles, _letters, _suppressions):
        try:
            await check(store, settings, report, clock, on_progress)
        except StorageUnavailable as error:
            report.failures.append(str(error))
        except sqlite3.Error as error:
            report.failures.append(f"temporary files: {error}")
    return report


_Progress = Callable[[str, int], None]
_Clock = Callable[[], int]


async def _problems(
    store: EventStore, settings: Settings, report: Report, _: _Clock, on_progress: _Progress
) -> None:
    if not isinstance(store, VerifiableStore):
        return
    async for problem in store.problems():
        if isinstance(problem, int):
            report.checked["storage"] += problem
            on_progress("rows", report.checked["storage"])
            continue
        reason = _REASONS.get(problem.doubt)
        if problem.doubt == "expired" and not settings.expires:
            reason = None
        report.judge(problem.what, problem.message, reason)


async def _letters(
    store: EventStore, settings: Settings, report: Report, clock: _Clock, _: _Progress
) -> None:
    days = settings.context.dead_letters_days
    erased = (await _erased(store, settings)).newest()
    await check_letters(
        store, report, now=clock(), days=days, expires=settings.expires, erased=erased
    )


async def _suppressions(
    store: EventStore, _settings: Settings, report: Report, _: _Clock, on_progress: _Progress
) -> None:
    if isinstance(store, SuppressionStore):
        scan = _all(store.scan_suppressions, None)
        async for one in _counted(scan, "suppressions", report, on_progress):
            form = suppressed_address(one.channel, one.address)
            if form != one.address and not one.address.startswith(HASHED):
                message = f"{one.workspace_id}: {one.address!r} is not as it is looked up"
                report.differs("suppressions", message)


def _all(scan: Callable[..., Any], *first: Any) -> AsyncIterator[Any]:
    return all_pages(partial(scan, *first), most=_STEP)


async def _counted(
    items: AsyncIterator[Any], what: str, report: Report, on_progress: _Progress
) -> AsyncIterator[Any]:
    async for item in items:
        report.checked[what] += 1
        if report.checked[what] % _STEP == 0:
            on_progress(what, report.checked[what])
        yield item


async def _profiles(
    store: EventStore, settings: Settings, report: Report, clock: _Clock, on_progress: _Progress
) -> None:
    late_since = clock() - SLACK - settings.lag
    # An erasure that is not done, or that begins later, may be half of one.
    before = await _erased(store, settings, done=True)
    with contextlib.closing(Notes()) as notes:
        if isinstance(store, SubscriptionStore):
            await keep_choices(store, notes)
        visitors = await _keep_profiles(store, notes, on_progress)
        with_links = isinstance(store, VerifiableStore)
        await _keep_events(store, settings, notes, report, late_since, before, on_progress)
        after = await _erased(store, settings)
        if isinstance(store, SubscriptionStore):
            await keep_history(store, notes, after.newest())
        unfinished = set(await store.unfinished()) if isinstance(store, VerifiableStore) else set()

        def doubt(workspace: str, kind: Kind, name: str) -> str | None:
            if kind is Kind.GROUP:
                return None
            if (workspace, name) in unfinished:
                return _REASONS["unfinished"]
            # An id may be that of a user and of a visitor.
            for one in (Kind.USER, Kind.VISITOR):
                subject = (workspace, one, name)
                if after.erased_at(*subject) > before.erased_at(*subject):
                    return ERASING
            return None

        now, most = clock(), settings.context.profile_limits.visitors
        days = settings.visitors_days
        rules = Rules(
            limits=settings.context.profile_limits,
            identifiers=settings.context.identifiers,
            horizon=await _horizon(store, settings, now),
            erased=after.newest(),
            visitors_before=float("-inf") if days is None else now - days * DAY_MS,
            full={workspace for workspace, count in visitors.items() if count >= most},
            with_links=with_links,
            doubt=doubt,
        )
        notes.sort()
        repeated = notes.repeated_events()
        wrong = compare_people(notes, rules, report, on_progress)
    await _confirm_repeated(store, repeated, report)
    if isinstance(store, SubscriptionStore):
        await confirm_choices(store, wrong, report, doubt)


async def _keep_profiles(store: EventStore, notes: Notes, on_progress: _Progress) -> Counter[str]:
    """Keep the profiles and links, and return how many visitors each workspace has."""
    visitors: Counter[str] = Counter()
    if not isinstance(store, ProfileStore):
        return visitors
    seen = Report()
    async for user in _counted(_all(store.scan_users, None), "users", seen, on_progress):
        keep_profile(notes, Kind.USER, user.user_id, user)
    async for one in _counted(_all(store.scan_visitors, None), "visitors", seen, on_progress):
        keep_profile(notes, Kind.VISITOR, one.anonymous_id, one)
        visitors[one.workspace_id] += 1
    async for group in _all(store.scan_groups, None):
        keep_profile(notes, Kind.GROUP, group.group_id, group)
    if isinstance(store, VerifiableStore):
        async for link in _counted(_all(store.scan_links), "links", seen, on_progress):
            names = (link.workspace_id, link.anonymous_id, link.user_id)
            keep_link(notes, *names, link.first, link.counts)
    return visitors


async def _keep_events(
    store: EventStore,
    settings: Settings,
    notes: Notes,
    report: Report,
    late_since: int,
    erased: Tombstones,
    on_progress: _Progress,
) -> None:
    """Check all events, and keep their changes."""
    async for event in _counted(_all(store.scan, EventFilter()), "events", report, on_progress):
        try:
            problem = _problem(event, settings)
            names = (event.workspace_id, event.user_id, event.anonymous_id)
            if erased.cover(*names, event.received_at):
                problem = "is of an erased person"
            keep_changes(notes, event, late=event.received_at >= late_since)
        except Exception as error:
            problem = f"cannot be read ({type(error).__name__})"
        if problem:
            report.differs("events", f"{_named(event)} {problem}")
        notes.add_event(_digest(event))


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


def _named(event: Event) -> str:
    return f"{event.workspace_id}: {event.origin} {event.message_id!r}"


def _digest(event: Event) -> bytes:
    encoded = orjson.dumps(event.identity)
    return hashlib.blake2b(encoded, digest_size=16).digest()


async def _confirm_repeated(store: EventStore, repeated: set[bytes], report: Report) -> None:
    """Read the events again that were read twice: one may have expired and have been sent again."""
    if not repeated:
        return
    seen: Counter[bytes] = Counter()
    async for event in _all(store.scan, EventFilter()):
        key = _digest(event)
        if key in repeated:
            seen[key] += 1
            if seen[key] == 2:
                report.differs("events", f"{_named(event)} is stored twice")


async def _erased(store: EventStore, settings: Settings, *, done: bool = False) -> Tombstones:
    tombstones = Tombstones(store, settings.erasures_key, done=done)
    await tombstones.refresh()
    return tombstones


async def _horizon(store: EventStore, settings: Settings, now: int) -> float:
    """Return the time before which events may have expired."""
    if settings.context.events_days is None:
        return float("-inf")
    oldest = await store.scan(EventFilter(), after=None, limit=1)
    first = oldest.items[0].received_at if oldest.items else now
    return max(first, now - settings.context.events_days * DAY_MS)
