# SPDX-License-Identifier: Apache-2.0
"""Compare all users, visitors, groups and links with the events.

Two merges of the events are compared with each profile: index 0 is that of the events which were
surely stored before the profiles were read, and index 1 that of all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from engage.api import (
    Event,
    Kind,
    Link,
    LinkDecision,
    Membership,
    ProfileLimits,
    RemovedTraits,
    StoredLink,
    Traits,
    Version,
    changes_of,
    merge,
    visitor_of,
)
from engage.upkeep.verify.choices import Choice, Choices
from engage.upkeep.verify.compare import TIMES, compare
from engage.upkeep.verify.folds import EMPTY, Fold, LinkFold, View, view_of
from engage.upkeep.verify.notes import Notes
from engage.upkeep.verify.report import Doubt, Report

__all__ = ["ERASING", "Rules", "compare_people", "keep_changes", "keep_link", "keep_profile"]

_EXPIRED: Final = "made by events that expired"
_ERASED: Final = "made by events that were erased"
_LIMITED: Final = "at a limit"
_OLD: Final = "visitors that may have expired before"
_CHANGED: Final = "linked or unlinked meanwhile"
#: Of an erasure that began while the store was read, or that was interrupted.
ERASING: Final = "erased meanwhile, or not completely"
_CHOSEN: Final = "users with subscription changes"
_EARLIER: Final = "made by an earlier version"

_NAMES: Final = {Kind.USER: "users", Kind.VISITOR: "visitors", Kind.GROUP: "groups"}
_NOTHING: Final = Fold()
_ALWAYS: Final = float("-inf")
#: Ids of which all is remembered, because many links may lead to one.
_REMEMBERED: Final = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What decides whether a difference may be right."""

    limits: ProfileLimits
    #: Workspace id → the traits by which its users are looked up.
    identifiers: Mapping[str, Collection[str]]
    #: Before this time, events may have expired; ``-inf``: none.
    horizon: float
    #: Workspace → the time before which events of people were erased, which stay in groups.
    erased: Mapping[str, int]
    #: Workspaces in which people were erased meanwhile, or not completely.
    erasing: Collection[str]
    #: Before this time, the last events of visitors may have expired.
    visitors_before: float
    #: Workspaces in which visitors may have given way to new ones.
    full: Collection[str]
    doubt: Doubt

    @property
    def expires(self) -> bool:
        """Whether events may have expired."""
        return self.horizon > _ALWAYS

    def before(self, workspace: str, kind: Kind) -> tuple[float, str]:
        """Return the time before which events may be missing, and why."""
        erased = self.erased.get(workspace, _ALWAYS) if kind is Kind.GROUP else _ALWAYS
        return (erased, _ERASED) if erased > self.horizon else (self.horizon, _EXPIRED)


# ----------------------------------------------------------------------------------- what is kept
def keep_changes(notes: Notes, event: Event, *, late: bool) -> None:
    """Keep the changes of an event.

    :param late: whether the profiles may have been read before it was stored.
    :raises Exception: any, if the event is damaged.
    """
    workspace, version = event.workspace_id, (event.timestamp, event.message_id, event.origin)
    subjects: dict[tuple[str, str], Any] = {}
    for change in changes_of(event):
        if isinstance(change, Link | LinkDecision):
            decision = change.counts if isinstance(change, LinkDecision) else None
            at = event.received_at if decision is None else event.timestamp
            record: Any = ("link", late, change.user_id, (at, *version[1:]), decision)
            notes.add(workspace, change.anonymous_id, record, change.user_id)
            continue
        what = subjects.setdefault((change.kind.value, change.id), [False, {}, {}])
        if isinstance(change, Traits):
            what[1].update((name, (value,)) for name, value in change.traits.items())
        elif isinstance(change, RemovedTraits):
            what[1].update(dict.fromkeys(change.names, ()))
        elif isinstance(change, Membership):
            what[2][change.group_id] = change.assigned
        else:
            what[0] = True
    for (kind, name), what in subjects.items():
        record = ("change", late, kind, version, event.received_at, what)
        notes.add(workspace, name, record, visitor=kind == Kind.VISITOR)


def keep_profile(notes: Notes, kind: Kind, name: str, profile: Any) -> None:
    """Keep a profile of the store."""
    owner = profile.user_id if kind is Kind.VISITOR else None
    record = ("profile", kind.value, tuple(view_of(profile)), owner)
    notes.add(profile.workspace_id, name, record, visitor=kind is Kind.VISITOR)


def keep_link(notes: Notes, link: StoredLink) -> None:
    """Keep a link of the store."""
    record = ("stored", link.user_id, link.first, link.counts)
    notes.add(link.workspace_id, link.anonymous_id, record, link.user_id)


# ---------------------------------------------------------------------------------- all about an id
@dataclasses.dataclass(slots=True)
class _Link:
    """The link of an anonymous id to a user, by the events and in the store."""

    folds: tuple[LinkFold, LinkFold] = dataclasses.field(
        default_factory=lambda: (LinkFold(), LinkFold())
    )
    #: The first event, and whether it counts.
    stored: tuple[Version | None, bool] | None = None

    def counting(self, index: int, rules: Rules) -> Version | None:
        """Return the first event, if the link is there and counts."""
        fold, before = self.folds[index], self.folds[0]
        first, counts = fold.first, fold.decided[1]
        if self.stored is not None:
            stored, stored_counts = self.stored
            # It may be older than all stored events.
            if stored is not None and (stored[0] < rules.horizon or not stored[1]):
                first = stored if first is None else min(first, stored)
            if rules.expires and before.decided == self.folds[1].decided:
                counts = stored_counts  # Events that expired may have decided.
        elif before.first is not None:
            return None  # It is missing, which is a difference of its own.
        return first if counts else None

    def problem(self, horizon: float) -> tuple[str, str | None] | None:
        """Return what is wrong, and why it may be right."""
        low, high = self.folds
        wanted = [one.first for one in self.folds if one.first is not None]
        first, counts = self.stored or (None, True)
        if first is None:
            is_missing = low.first is not None or not (low.decided[1] or self.stored)
            return ("is missing", None) if is_missing else None
        if not wanted or first < min(wanted):
            reason = _EARLIER if not first[1] else _EXPIRED if first[0] < horizon else None
            return ("has an earlier first event than any that is stored", reason)
        if low.first is not None and (first > low.first or (low.first == high.first != first)):
            return ("has another first event", None)
        if low.decided == high.decided and counts != low.decided[1]:
            text = "counts" if counts else "does not count"
            return (text, None if horizon == _ALWAYS else _EXPIRED)
        return None


class _Id:
    """Everything about one id of a workspace: the user, the visitor and the group that have it, and
    the users to whom it is linked as an anonymous id."""

    def __init__(self, workspace: str, name: str, records: Iterable[Any], rules: Rules) -> None:
        self.workspace, self.name, self._rules = workspace, name, rules
        #: What the store has, and the user of a visitor.
        self.profiles: dict[str, tuple[View, str | None]] = {}
        self.choices = Choices()
        #: User → link.
        self.links: dict[str, _Link] = {}
        self._folds: dict[str, tuple[Fold, Fold]] = {}
        late: list[Any] = []
        for what, *fields in records:
            match what:
                case "change" | "link" if fields[0]:
                    late.append((what, *fields[1:]))
                case "change":
                    self._change(0, *fields[1:])
                case "link":
                    self._link(fields[1]).folds[0].add(*fields[2:])
                case "profile":
                    kind, view, owner = fields
                    self.profiles[kind] = (View(*view), owner)
                case "stored":
                    self._link(fields[0]).stored = (fields[1], fields[2])
                case _:
                    kind, group, *rest = fields
                    self.choices.add(what, (workspace, kind, name, group), *rest)
        for link in self.links.values():
            link.folds = (link.folds[0], dataclasses.replace(link.folds[0]))
        for what, *fields in late:
            if what == "change":
                self._change(1, *fields)
            else:
                self._link(fields[0]).folds[1].add(*fields[1:])

    def _change(self, index: int, kind: str, version: Version, received_at: int, what: Any) -> None:
        low, high = self._folds.get(kind) or (_NOTHING, _NOTHING)
        if index and high is low:
            high = low.copy()
        elif low is _NOTHING and not index:
            low = high = Fold()
        self._folds[kind] = (low, high)
        rules = self._rules
        declared = rules.identifiers.get(self.workspace, ()) if kind != Kind.GROUP else ()
        (low, high)[index].add(version, received_at, what, rules.limits, declared)

    def _link(self, user: str) -> _Link:
        return self.links.setdefault(user, _Link())

    def view(self, kind: Kind) -> View | None:
        """Return what the store has."""
        return self.profiles.get(kind, (None, None))[0]

    def folds(self, kind: Kind) -> tuple[Fold, Fold]:
        """Return both merges; they are the same object if nothing was late."""
        return self._folds.get(kind, (_NOTHING, _NOTHING))

    # ------------------------------------------------------------------------------------ a user
    def exists(self, index: int) -> bool:
        """Return whether a user has the id."""
        return self.folds(Kind.USER)[index].exists or self.choices.chosen(index)

    # --------------------------------------------------------------------------------- a visitor
    def visitor(self, index: int) -> Fold | None:
        """Return the visitor that may belong to a user."""
        fold = self.folds(Kind.VISITOR)[index]
        return fold if fold.exists else None

    @functools.cached_property
    def counting(self) -> tuple[Mapping[str, Version], Mapping[str, Version]]:
        """User → the first event, of the links that count."""
        low, high = (
            {
                user: first
                for user, link in self.links.items()
                if (first := link.counting(index, self._rules)) is not None
            }
            for index in (0, 1)
        )
        return low, high

    @functools.cached_property
    def firsts(self) -> tuple[str | None, str | None]:
        """The user of the first link that counts."""
        low, high = (min(one, key=one.__getitem__, default=None) for one in self.counting)
        return low, high

    @functools.cached_property
    def reason(self) -> str | None:
        """Why the visitor, and the user to whom it belongs, may differ from the events."""
        # An operator may have undone a link for a moment. An event may have changed the visitor
        # before the next one gave it to a user.
        low, high = self.folds(Kind.VISITOR)
        late = low is not high and self.firsts[0] != self.firsts[1]
        folds = (link.folds for link in self.links.values())
        if late or any(low.decided != high.decided for low, high in folds):
            return _CHANGED
        if self.visitor(0) is None is self.visitor(1):
            return self._rules.doubt(self.workspace, Kind.VISITOR, self.name)
        # Its user may be erased without it: it belongs to the next one then.
        erasing = self.links and self.workspace in self._rules.erasing
        return self.excuse(Kind.VISITOR) or (ERASING if erasing else None)

    def excuse(self, kind: Kind) -> str | None:
        """Return why a profile may differ from its events, if there is a reason."""
        actual, rules = self.view(kind), self._rules
        for fold in self.folds(kind):
            if fold.may_exceed(kind, rules.limits, actual or EMPTY):
                return _LIMITED
            if kind is Kind.VISITOR and fold.received_at < rules.visitors_before:
                return _OLD
        if kind is Kind.VISITOR and self.workspace in rules.full:
            return _LIMITED
        return rules.doubt(self.workspace, kind, self.name)


# --------------------------------------------------------------------------------------- comparing
def compare_people(
    notes: Notes, rules: Rules, report: Report, on_progress: Callable[[str, int], None]
) -> set[Choice]:
    """Compare everything that was kept.

    :param on_progress: called often, with what is compared and how many there were.
    :return: the choices that differ from their history.
    """
    wrong: set[Choice] = set()
    comparison = _Comparison(notes, rules, report)
    for number, (workspace, name) in enumerate(notes.names()):
        one = comparison.find(workspace, name)
        report.checked["choices"] += len(one.choices.kept)
        wrong.update(one.choices.wrong())
        comparison.compare(one)
        if number % _REMEMBERED == 0:
            on_progress("ids compared", number)
    return wrong


class _Comparison:
    def __init__(self, notes: Notes, rules: Rules, report: Report) -> None:
        self._notes, self._rules, self._report = notes, rules, report
        self.find = functools.lru_cache(_REMEMBERED)(self._find)

    def _find(self, workspace: str, name: str) -> _Id:
        return _Id(workspace, name, self._notes.about(workspace, name), self._rules)

    def compare(self, one: _Id) -> None:
        """Compare all that has an id."""
        for kind in (Kind.VISITOR, Kind.GROUP):
            low, high = one.folds(kind)
            seen = _view(low)
            self._judge(one, kind, (seen, seen if high is low else _view(high)), None)
        _, owner = one.profiles.get(Kind.VISITOR, (None, None))
        if owner is not None and not one.links:
            reason = _EXPIRED if self._rules.expires else None
            reason = reason or self._rules.doubt(one.workspace, Kind.USER, owner)
            message = f"{one.workspace}: {one.name!r} belongs to a user without a link"
            self._report.judge("visitors", message, reason)
        # Beyond the limit, nothing of a user can be proven.
        most = self._rules.limits.links
        linked = self._notes.linked(one.workspace, one.name, most + 1)
        links = [self.find(one.workspace, name) for name in linked]
        limited = _LIMITED if len(links) > most else None
        self._user(one, links, limited)
        self._links(one, links, limited)

    def _judge(
        self,
        one: _Id,
        kind: Kind,
        views: tuple[View | None, View | None],
        reason: str | None,
        *,
        chosen: bool = False,
    ) -> None:
        """Compare a profile.

        :param views: of both merges; ``None``: it does not exist.
        :param reason: why every difference may be right.
        """
        (low, high), actual = views, one.view(kind)
        if low is high is actual is None:
            return
        what, found = _NAMES[kind], f"{one.workspace}: {one.name!r}"
        self._report.checked[what] += 1
        horizon, missing = self._rules.before(one.workspace, kind)
        if actual is None:
            if low is not None and high is not None:
                self._report.judge(what, f"{found} is missing", reason or one.excuse(kind))
        elif low is high is None:
            if horizon > _ALWAYS and (actual.created_at is None or actual.created_at < horizon):
                reason = reason or missing
            reason = reason or self._rules.doubt(one.workspace, kind, one.name)
            self._report.judge(what, f"{found} exists without an event that made it", reason)
        elif differing := list(compare(low or EMPTY, high or EMPTY, actual, horizon)):
            reason = reason or one.excuse(kind)
            bad = [text for text, may in differing if not may and not (chosen and text == TIMES)]
            if not bad and reason is None:
                reason = missing if any(may for _, may in differing) else _CHOSEN
            text = (bad or [text for text, _ in differing])[0]
            self._report.judge(what, f"{found}: {text} differs from the events", reason)

    def _user(self, one: _Id, links: Sequence[_Id], reason: str | None) -> None:
        """:param links: the anonymous ids that are linked to it."""
        name, chosen = one.name, one.choices.chosen(1)
        low, high = one.folds(Kind.USER)
        exists = one.exists(0), one.exists(1)
        late = low is not high or exists[0] != exists[1]
        for link in links:
            mine, visitors = name in link.firsts, link.folds(Kind.VISITOR)
            before, after = (
                (link.counting[index].get(name), link.firsts[index] == name) for index in (0, 1)
            )
            late |= before != after or (mine and visitors[0] is not visitors[1])
            if mine or link.reason in (_CHANGED, ERASING):
                reason = reason or link.reason
        views = (self._merged(one, links, 0) if exists[0] else None,) * 2
        if late:
            views = views[0], self._merged(one, links, 1) if exists[1] else None
        self._judge(one, Kind.USER, views, reason, chosen=chosen)

    def _merged(self, one: _Id, links: Iterable[_Id], index: int) -> View:
        """Merge a user with its visitors."""
        names, visitors = [], []
        for link in links:
            first, visitor = link.counting[index].get(one.name), link.visitor(index)
            if first is not None:
                names.append(link.name)
                if link.firsts[index] == one.name and visitor is not None:
                    visitors.append((first, visitor))
        ordered = [visitor for _, visitor in sorted(visitors, key=lambda pair: pair[0])]
        own, limits = one.folds(Kind.USER)[index], self._rules.limits
        declared = self._rules.identifiers.get(one.workspace, ())
        profile = merge(one.workspace, own, names, ordered, limits, declared)
        return view_of(profile, [own, *ordered[: limits.user_visitors]])

    def _links(self, one: _Id, links: Sequence[_Id], reason: str | None) -> None:
        """Compare the links of a user, and the users of the visitors that belong to it."""
        rules, user = self._rules, one.name
        # Events that expired may have made it.
        exists = one.exists(0), one.exists(1) or (rules.expires and Kind.USER in one.profiles)
        reason = reason or rules.doubt(one.workspace, Kind.USER, user)
        for link in links:
            self._report.checked["links"] += 1
            if (problem := link.links[user].problem(rules.horizon)) is not None:
                text, excuse = problem
                message = f"{one.workspace}: {link.name!r} to {user!r} {text}"
                self._report.judge("links", message, reason or excuse)
            view, owner = link.profiles.get(Kind.VISITOR, (None, None))
            if view is not None and link.firsts == (user, user):
                owners = [user if there else None for there in exists]
                if owner not in owners:
                    message = f"{one.workspace}: {link.name!r} belongs to {owner!r}"
                    message += f", and not to {owners[1]!r}"
                    self._report.judge("visitors", message, reason or link.reason)


def _view(fold: Fold) -> View | None:
    """Return the view of a visitor or a group; ``None`` if it does not exist."""
    return view_of(visitor_of("", fold, None), [fold]) if fold.exists else None
