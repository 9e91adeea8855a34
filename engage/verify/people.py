# SPDX-License-Identifier: Apache-2.0
"""Compare users, visitors, groups and links with what their events make of them.

The rules are those of the core: the events are folded as a write does it. Events arrive while the
store is read, so there are two results: of the events that were surely stored before the people
were read (``low``), and of all that were read afterwards (``high``). What is stored must be one of
them or between them.

If events expire, the store also has what expired events made. The time of a value is never later
than the receipt of its event. So a value with a time after the horizon, before which events may
have expired, must come from a stored event.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import orjson

from engage.api import (
    TRUSTED,
    Event,
    Kind,
    Link,
    LinkDecision,
    Membership,
    ProfileLimits,
    Seen,
    StoredLink,
    SubscriptionRecord,
    SubscriptionState,
    Version,
    changes_of,
)
from engage.copy.report import same_json
from engage.store.changes import EncodedChange, Traits, encode, fold
from engage.store.choices import unlike
from engage.store.people import PersonRows, Wrong
from engage.store.profiles import (
    GROUP,
    KIND_OF,
    KINDS,
    REMOVED,
    USER,
    VISITOR,
    Person,
    Profile,
)
from engage.verify.notes import Notes
from engage.verify.report import Doubt, Report

__all__ = [
    "ERASING",
    "Rules",
    "changed_by",
    "compare_people",
    "identities",
    "keep_changes",
    "keep_choice",
    "keep_link",
    "keep_person",
]

_EXPIRED: Final = "made by events that expired"
_ERASED: Final = "made by events that were erased"
_LIMITED: Final = "at a limit"
_OLD: Final = "visitors that may have expired before"
#: Of an erasure that began while the store was read, or that was interrupted.
ERASING: Final = "erased meanwhile, or not completely"
_CHOSEN: Final = "users with subscription changes"
_EARLIER: Final = "made by an earlier version"

_MISSING: Final = " is missing"
_UNMADE: Final = " exists without an event that made it"
_DIFFERS: Final = "differs from the events"
_TIMES: Final = f": the times of the first and the last event {_DIFFERS}"

_NAMES: Final = {USER: "users", VISITOR: "visitors", GROUP: "groups"}
_CHANGES: Final[Mapping[str, Callable[..., EncodedChange]]] = {
    change.__name__: change for change in (Seen, Traits, Membership, Link, LinkDecision)
}

#: A version, and the value that it has.
_Register = tuple[Version, Any]
#: What is wrong, and why it may be right.
_Difference = tuple[str, str | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What decides whether a difference may be right."""

    limits: ProfileLimits
    #: Before this time, events may have expired; ``-inf``: none.
    horizon: float
    #: When the oldest stored event was received. Before, events may have expired under another
    #: config: what no event made is reported, and not deleted.
    oldest: float
    #: Workspace → the time before which events of people were erased, which stay in groups.
    erased: Mapping[str, int]
    #: Before this time, the last events of visitors may have expired.
    visitors_before: float
    #: Workspaces in which visitors may have given way to new ones.
    full: Collection[str]
    doubt: Doubt

    def excuse(self, person: Person, at: int) -> str | None:
        """Return why a value may be right that no event made, if it has an old enough time."""
        workspace, kind, _ = person
        if at < self.horizon:
            return _EXPIRED
        return _ERASED if kind == GROUP and at < self.erased.get(workspace, at) else None


# ----------------------------------------------------------------------------------- what is kept
def changed_by(event: Event) -> dict[Person, list[tuple[Any, ...]]]:
    """Return the changes of an event: the name of the kind of each, and its values.

    :raises Exception: any, if the event is damaged.
    """
    people: dict[Person, list[tuple[Any, ...]]] = {}
    for change in map(encode, changes_of(event)):
        kind, name, *values = (getattr(change, field) for field in change.__slots__)
        if isinstance(change, Link | LinkDecision):
            kind, name, values = Kind.USER, kind, [name, *values]
        person = (event.workspace_id, KINDS[kind], name)
        people.setdefault(person, []).append((type(change).__name__, *values))
    return people


def keep_changes(notes: Notes, event: Event, *, late: bool) -> None:
    """Keep the changes of an event.

    :param late: whether the people may have been read before it was stored.
    :raises Exception: any, if the event is damaged.
    """
    for person, changes in changed_by(event).items():
        version = (event.timestamp, event.message_id, event.origin)
        notes.add(person, ("event", late, event.received_at, version, changes))


def keep_person(notes: Notes, rows: PersonRows) -> None:
    """Keep a person of the store."""
    row, traits, memberships = rows
    notes.add(
        row[:3],
        (
            "stored",
            row[3:7],
            {name: ((at, *version), value) for _, _, _, name, at, value, *version, _ in traits},
            {name: (tuple(version), on) for _, _, _, name, *version, on in memberships},
        ),
    )


def keep_link(notes: Notes, link: StoredLink) -> None:
    """Keep a link of the store."""
    person = (link.workspace_id, USER, link.user_id)
    notes.add(person, ("link", link.anonymous_id, link.first, link.counts))


def keep_choice(notes: Notes, choice: SubscriptionState | SubscriptionRecord) -> None:
    """Keep a choice or a record of one."""
    person = (choice.workspace_id, KINDS[choice.subject.kind], choice.subject.id)
    if isinstance(choice, SubscriptionState):
        notes.add(person, ("choice", choice.group_id, choice.subscribed, choice.updated_at))
    else:
        notes.add(person, ("record", choice.group_id, choice.after, choice.at))


def identities(person: Person, records: Iterable[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the identities of the events in the records of a person."""
    for what, *fields in records:
        if what == "event":
            _, message_id, origin = fields[2]
            yield person[0], origin, message_id


class _Case:
    """All that was kept of a user, a visitor or a group."""

    def __init__(self, person: Person, records: Iterable[Any]) -> None:
        self.person = person
        self.profile = Profile(*person)
        self.traits: dict[str, _Register] = {}
        self.memberships: dict[str, _Register] = {}
        #: Anonymous id → the first event of the link, and whether it counts.
        self.links: dict[str, tuple[Version | None, bool]] = {}
        #: Group id → whether it is subscribed, and since when.
        self.choices: dict[str, tuple[int, int]] = {}
        self.records: list[tuple[str, int, int]] = []
        #: When the first of the events was received.
        self.received_at = float("inf")
        #: Trait → the size of its largest value so far.
        self._sizes: dict[str, int] = {}
        self._late: list[tuple[Event, list[EncodedChange]]] = []
        #: Whether something is proven to be wrong, and what no event made.
        self.is_wrong = False
        self.wrong = Wrong({}, {}, {})
        self.low = self.high = fold(self._early(records), {}, {})
        if self._late:
            self.high = fold(self._late, {}, {}, copy.deepcopy(self.low))

    def _early(self, records: Iterable[Any]) -> Iterator[tuple[Event, list[EncodedChange]]]:
        """Yield the events that were surely stored before the people were read, and keep the rest.
        There may be more of them than fit in memory."""
        workspace, kind, name = self.person
        whose: dict[str, tuple[Any, ...]] = dict.fromkeys(_CHANGES, (KIND_OF[kind], name))
        whose |= dict.fromkeys(("Link", "LinkDecision"), (name,))
        for what, *fields in records:
            match what:
                case "event":
                    late, received_at, version, encoded = fields
                    at, message_id, origin = version
                    event = Event(
                        workspace_id=workspace,
                        origin=origin,
                        message_id=message_id,
                        type="",
                        user_id=None,
                        anonymous_id=None,
                        name=None,
                        received_at=received_at,
                        timestamp=at,
                        body=b"",
                    )
                    changes = [_CHANGES[how](*whose[how], *values) for how, *values in encoded]
                    self._measure(event, changes)
                    if late:
                        self._late.append((event, changes))
                    else:
                        yield event, changes
                case "stored":
                    times, self.traits, self.memberships = fields
                    self.profile = Profile(*self.person, *times)
                    self._measure_values({x: value for x, (_, value) in self.traits.items()})
                case "link":
                    self.links[fields[0]] = fields[1], fields[2]
                case "choice":
                    self.choices[fields[0]] = fields[1], fields[2]
                case _:
                    self.records.append(tuple(fields))

    def _measure(self, event: Event, changes: Iterable[EncodedChange]) -> None:
        self.received_at = min(event.received_at, self.received_at)
        for change in changes:
            if isinstance(change, Traits):
                self._measure_values(change.traits)

    def _measure_values(self, values: Mapping[str, bytes | None]) -> None:
        for name, value in values.items():
            if value not in (None, REMOVED):
                self._sizes[name] = max(len(value), self._sizes.get(name, 0))

    def may_exceed(self, limits: ProfileLimits) -> bool:
        """Return whether a limit may have been reached at any time: which changes were dropped then
        depends on the order in which the events arrived."""
        most, most_bytes, memberships = limits.of(KIND_OF[self.person[1]])
        size = sum(len(orjson.dumps(name)) + size for name, size in self._sizes.items())
        groups = self.memberships.keys() | self.high.memberships.get(self.person, {}).keys()
        return len(self._sizes) > most or size > most_bytes or len(groups) > memberships


# --------------------------------------------------------------------------------------- comparing
def compare_people(
    notes: Notes,
    rules: Rules,
    report: Report,
    on_progress: Callable[[str, int], None],
    on_wrong: Callable[[Person, Wrong], None],
) -> list[Person]:
    """Compare everything that was kept.

    :param on_wrong: called with those of whom something differs, but not their choices.
    :param on_progress: called often, with what is compared and how many there were.
    :return: those whose choices differ from their history.
    """
    wrong = []
    for number, (person, records) in enumerate(notes.people()):
        case = _Case(person, records)
        report.checked["choices"] += len(case.choices)
        _compare(case, rules, report)
        _compare_links(case, rules, report)
        if case.is_wrong:
            on_wrong(person, case.wrong)
        if unlike(person, case.choices, case.records):
            wrong.append(person)
        on_progress("ids compared", number)
    return wrong


def _compare(case: _Case, rules: Rules, report: Report) -> None:
    workspace, kind, name = case.person
    what, low, high = _NAMES[kind], case.low, case.high
    pairs = [*_times(case, rules)]
    excuse = functools.partial(rules.excuse, case.person)
    for text, stored, least, most, wrong in (
        ("the trait", case.traits, low.traits, high.traits, case.wrong.traits),
        (
            "the membership in",
            case.memberships,
            low.memberships,
            high.memberships,
            case.wrong.memberships,
        ),
    ):
        for key, reason in _registers(
            stored, least.get(case.person, {}), most.get(case.person, {}), excuse
        ):
            pairs.append((f": {text} {key!r} {_DIFFERS}", reason))
            if reason is None and key in stored:
                version, value = stored[key]
                if value == REMOVED and rules.horizon > float("-inf"):
                    continue  # An operator may have removed a trait of the future.
                made = most.get(case.person, {}).get(key)
                if version[0] >= rules.oldest or (made is not None and version <= made[0]):
                    wrong[key] = version
    if case.profile.exists or case.person in high.seen or (kind == USER and case.choices):
        report.checked[what] += 1
    if not pairs:
        return
    text, reason = next((pair for pair in pairs if pair[1] is None), pairs[0])
    limited = _LIMITED if case.may_exceed(rules.limits) else None
    if kind == VISITOR:
        limited = limited or (_OLD if case.received_at < rules.visitors_before else None)
        limited = limited or (_LIMITED if workspace in rules.full else None)
    reason = limited or rules.doubt(workspace, KIND_OF[kind], name) or reason
    report.judge(what, f"{workspace}: {name!r}{text}", reason)
    case.is_wrong = reason is None
    if not case.is_wrong:
        case.wrong = Wrong({}, {}, {})


def _times(case: _Case, rules: Rules) -> Iterator[_Difference]:
    """Compare whether somebody exists, and since when."""
    low, high, profile = (*(x.seen.get(case.person) for x in (case.low, case.high)), case.profile)
    chosen = _CHOSEN if case.person[1] == USER and (case.choices or case.records) else None
    if profile.created_at is None or profile.updated_at is None:
        if low is not None or (case.choices and chosen and not profile.exists):
            yield _MISSING, None
        elif profile.exists and chosen is None:
            yield _UNMADE, None
    else:
        first, last = stored = profile.created_at, profile.updated_at
        early, late = (rules.excuse(case.person, at) or chosen for at in stored)
        right: tuple[int, int] | None = stored
        kept, kept_late = early or first < rules.oldest, late or last < rules.oldest
        if high is not None:
            right = (
                first if kept else max(first, high[0]),
                last if kept_late else min(last, high[1]),
            )
            if first < high[0]:
                yield _TIMES, early
            if last > high[1]:
                yield _TIMES, late
            if low is not None and (first > low[0] or last < low[1]):
                yield _TIMES, chosen
        else:
            yield _UNMADE, early
            right = stored if kept else None
        case.wrong = case.wrong._replace(stored_times=stored, times=right)
    times = (*(high or ()), *(at for *_, at in case.records))
    if (
        chosen
        and profile.exists
        and profile.times != (min(times, default=0), max(times, default=0))
    ):
        yield _TIMES, chosen


def _registers(
    stored: Mapping[str, _Register],
    low: Mapping[str, _Register],
    high: Mapping[str, _Register],
    excuse: Callable[[int], str | None],
) -> Iterator[_Difference]:
    """Yield the names of the registers that differ."""
    for name in {**low, **high, **stored}:
        least, most = low.get(name), high.get(name)
        if name not in stored:
            # Earlier versions did not keep that what engage sets was removed.
            if least is not None and (least[1] is not None or not name.startswith(TRUSTED)):
                yield name, None
            continue
        version, value = stored[name]
        if most is None or version > most[0]:
            yield name, excuse(version[0])
        elif (least is not None and version < least[0]) or any(
            end and end[0] == version and not _is_same(end[1], value) for end in (least, most)
        ):
            yield name, None


def _is_same(made: Any, stored: Any) -> bool:
    if made is None or stored == REMOVED or isinstance(made, bool):
        return bool(stored == (REMOVED if made is None else made))
    return same_json(made, stored)


def _compare_links(case: _Case, rules: Rules, report: Report) -> None:
    """Compare the links of a user."""
    workspace, kind, user = case.person
    names = {*case.links, *(name for _, name in (*case.high.links, *case.high.decisions))}
    # Beyond the limit, nothing can be proven.
    limited = _LIMITED if len(names) > rules.limits.links else None
    for name in names:
        report.checked["links"] += 1
        for text, excuse in _link(case, name, rules.horizon):
            reason = limited or rules.doubt(workspace, KIND_OF[kind], user) or excuse
            report.judge("links", f"{workspace}: {name!r} to {user!r} {text}", reason)
            if reason is None:
                case.is_wrong = True
                made = case.high.links.get((case.person, name))
                first, _ = case.links.get(name, (None, True))
                if first and (first[0] >= rules.oldest or (made is not None and first >= made)):
                    case.wrong.links[name] = first


def _link(case: _Case, name: str, horizon: float) -> Iterator[_Difference]:
    pair = case.person, name
    low, high = case.low.links.get(pair), case.high.links.get(pair)
    decided, decided_later = (x.decisions.get(pair) for x in (case.low, case.high))
    undone = decided is not None and decided[1]
    first, counts = case.links.get(name, (None, True))
    if first is None:
        if low is not None or (undone and name not in case.links):
            yield "is missing", None
    elif high is None or first < high:
        is_early = not first[1]
        reason = _EARLIER if is_early else _EXPIRED if first[0] < horizon else None
        yield "has an earlier first event than any that is stored", reason
    elif low is not None and first > low:
        yield "has another first event", None
    elif decided == decided_later and undone == counts:
        text = "counts" if counts else "does not count"
        yield text, _EXPIRED if horizon > float("-inf") else None
