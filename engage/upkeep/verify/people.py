# SPDX-License-Identifier: Apache-2.0
"""Compare all users, visitors, groups and links with the events.

What was read is in a spill, in parts by the ids of users and visitors. Two steps look at each part.
The first compares visitors and groups, decides whom each visitor belongs to, and hands the links,
with the visitors, on to the parts of their users. The second compares links and users.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from engage.api import Event, Kind, Link, LinkDecision, ProfileLimits, Version, changes_of, merge
from engage.upkeep.verify.choices import Choice, Choices
from engage.upkeep.verify.compare import EMPTY, TIMES, compare
from engage.upkeep.verify.folds import Fold, View, plain, view_of
from engage.upkeep.verify.folds import Link as LinkFold
from engage.upkeep.verify.report import Doubt, Report
from engage.upkeep.verify.spill import PARTS, Spill, part_of

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

#: A look-up takes a third of the time of ``Kind(…)``.
_KINDS: Final = {kind.value: kind for kind in Kind}
_NAMES: Final = {Kind.USER: "users", Kind.VISITOR: "visitors", Kind.GROUP: "groups"}
#: The merge of the events before the profiles were read, and of all.
_Both = tuple[Fold, Fold]
_NOTHING: Final = Fold()


@dataclasses.dataclass(slots=True)
class _OneLink:
    """A link by the events, and as the store has it: its first event, and whether it counts."""

    low: LinkFold = dataclasses.field(default_factory=LinkFold)
    high: LinkFold = dataclasses.field(default_factory=LinkFold)
    stored: tuple[Version | None, bool] | None = None


class _Linked(NamedTuple):
    """What the first step knows of a link. Pairs are of the events before, and of all."""

    workspace: str
    user: str
    #: The anonymous id.
    name: str
    #: By the events: the first of them, and the decision whether it counts.
    low: tuple[Version | None, tuple[Version, bool]]
    high: tuple[Version | None, tuple[Version, bool]]
    #: In the store: the first event, and whether it counts.
    stored: tuple[Version | None, bool] | None
    #: The first event, if the link is there and counts.
    counting: tuple[Version | None, Version | None]
    #: Whether a user with the anonymous id exists, and whether an event made it.
    is_user: tuple[bool, bool]
    made: tuple[bool, bool]
    #: Whether it is the first link of the anonymous id.
    mine: tuple[bool, bool]
    #: If it is, the visitor, which may belong to the user.
    visitors: tuple[Any, ...]
    #: Why the visitor may differ.
    reason: str | None
    #: If the store has the visitor: the user to whom it belongs there.
    owner: tuple[str | None] | None
    #: Whether the visitor changed.
    late: bool


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
    #: Before this time, the last events of visitors may have expired.
    visitors_before: float
    #: Workspaces that may have no room for more visitors.
    full: Collection[str]
    #: Whether the store's links are known.
    with_links: bool
    doubt: Doubt

    def before(self, workspace: str, kind: Kind) -> tuple[float, str]:
        """Return the time before which events may be missing, and why."""
        erased = self.erased.get(workspace, self.horizon) if kind is Kind.GROUP else self.horizon
        return (erased, _ERASED) if erased > self.horizon else (self.horizon, _EXPIRED)

    @property
    def expires(self) -> bool:
        """Whether events may have expired."""
        return self.horizon > float("-inf")


# ----------------------------------------------------------------------------------- what is kept
def keep_changes(spill: Spill, event: Event, *, late: bool) -> None:
    """Keep the changes of an event.

    :param late: whether the profiles may have been read before it was stored.
    :raises Exception: any, if the event is damaged.
    """
    workspace, version = event.workspace_id, (event.timestamp, event.message_id, event.origin)
    for change in changes_of(event):
        if isinstance(change, Link | LinkDecision):
            if isinstance(change, Link):
                version = (event.received_at, event.message_id, event.origin)
            part = part_of(workspace, change.anonymous_id)
            decision = LinkFold.decision(change)
            names = (change.anonymous_id, change.user_id)
            spill.add(part, ("link", workspace, *names, late, version, decision))
            version = (event.timestamp, event.message_id, event.origin)
        else:
            subject = (workspace, change.kind.value, change.id)
            fields = (late, version, event.received_at, plain(change))
            spill.add(part_of(workspace, change.id), ("change", *subject, *fields))


def keep_profile(spill: Spill, kind: Kind, name: str, profile: Any) -> None:
    """Keep a profile of the store."""
    workspace, view = profile.workspace_id, view_of(profile)
    owner = profile.user_id if kind is Kind.VISITOR else None
    fields = {
        "created_at": view.created_at,
        "updated_at": view.updated_at,
        "traits": dict(view.traits),
        "trait_times": dict(view.trait_times),
        "groups": list(view.groups),
        "anonymous_ids": list(view.anonymous_ids),
        "left_out": view.left_out,
    }
    spill.add(part_of(workspace, name), ("profile", workspace, kind.value, name, fields, owner))


def keep_link(
    spill: Spill, workspace: str, anonymous_id: str, user: str, first: Version | None, counts: bool
) -> None:
    """Keep a link of the store."""
    part = part_of(workspace, anonymous_id)
    spill.add(part, ("stored", workspace, anonymous_id, user, first, counts))


# ------------------------------------------------------------------------------------ a part of it
class _Part:
    """What was kept of the users, visitors and groups whose ids are in one part.

    :param kinds: of other kinds, only what exists is read.
    """

    def __init__(self, spill: Spill, number: int, rules: Rules, kinds: Collection[Kind]) -> None:
        self._expires = rules.expires
        self.events: set[bytes] = set()
        self.repeated: set[bytes] = set()
        self.choices = Choices()
        #: Workspace, kind and id → what the store has, and the user of a visitor.
        self.profiles: dict[tuple[str, Kind, str], tuple[View, str | None]] = {}
        #: Workspace and anonymous id → user → link.
        self.links: dict[tuple[str, str], dict[str, _OneLink]] = {}
        self._folds: dict[tuple[str, Kind, str], Fold] = {}
        self._late: dict[tuple[str, Kind, str], list[Any]] = {}
        late_links = []
        for record in spill.read(number):
            match record:
                case ("change", workspace, kind, name, late, *fields):
                    key = (workspace, _KINDS[kind], name)
                    if key[1] not in kinds and fields[2][0] != "seen":
                        continue
                    if late:
                        self._late.setdefault(key, []).append(fields)
                    else:
                        self._add(self._folds.setdefault(key, Fold()), key, fields, rules)
                case ("event" | "link" | "stored", *_) if Kind.USER in kinds:
                    pass  # The first step has looked at them.
                case ("event", key):
                    (self.repeated if key in self.events else self.events).add(key)
                case ("link", workspace, name, user, late, *fields):
                    link = self._link(workspace, name, user)
                    if late:
                        late_links.append((link, fields))
                    else:
                        link.low.add(*fields)
                case ("profile", workspace, kind, name, view, owner):
                    self.profiles[workspace, _KINDS[kind], name] = (View(**view), owner)
                case ("stored", workspace, name, user, first, counts):
                    self._link(workspace, name, user).stored = (first, counts)
                case _:
                    self.choices.add(*record)
        for of_users in self.links.values():
            for link in of_users.values():
                link.high = dataclasses.replace(link.low)
        for link, fields in late_links:
            link.high.add(*fields)
        self._high: dict[tuple[str, Kind, str], Fold] = {}
        for key, changes in self._late.items():
            high = self._high[key] = self._folds.get(key, _NOTHING).copy()
            for fields in changes:
                self._add(high, key, fields, rules)

    @staticmethod
    def _add(fold: Fold, key: tuple[str, Kind, str], fields: Any, rules: Rules) -> None:
        workspace, kind, _ = key
        declared = rules.identifiers.get(workspace, ()) if kind is not Kind.GROUP else ()
        version, received_at, change = fields
        fold.add(version, received_at, change, rules.limits, declared)

    def _link(self, workspace: str, name: str, user: str) -> _OneLink:
        of_users = self.links.setdefault((workspace, name), {})
        return of_users.setdefault(user, _OneLink())

    def keys(self, *kinds: Kind) -> set[tuple[str, Kind, str]]:
        """Return the workspace, kind and id of everything of some kinds."""
        found = self.profiles.keys() | self._folds.keys() | self._high.keys()
        return {key for key in found if key[1] in kinds}

    def folds(self, workspace: str, kind: Kind, name: str) -> _Both:
        """Return both merges; they are the same object if nothing was late."""
        low = self._folds.get((workspace, kind, name), _NOTHING)
        return low, self._high.get((workspace, kind, name), low)

    def exists(self, workspace: str, name: str, *, chosen: bool = True) -> tuple[bool, bool]:
        """Return whether a user exists, before and after.

        :param chosen: whether a subscription change counts.
        """
        users = self.folds(workspace, Kind.USER, name)
        visitors = self.folds(workspace, Kind.VISITOR, name)
        names = (self.choices.early, self.choices.names) if chosen else ((), ())
        # Events that expired may have made the visitor.
        is_visitor = self._expires and (workspace, Kind.VISITOR, name) in self.profiles
        low, high = (
            user.created_at is not None
            or ((workspace, name) in some and not (visitor.created_at is not None or is_visitor))
            for user, visitor, some in zip(users, visitors, names, strict=True)
        )
        return low, high


def compare_people(
    spill: Spill, rules: Rules, report: Report, on_progress: Callable[[str, int], None]
) -> tuple[set[bytes], set[Choice]]:
    """Compare everything that was kept.

    :param on_progress: called often, with what is compared and how many there were.
    :return: the events that were read twice, and the choices that differ from their history.
    """
    repeated: set[bytes] = set()
    wrong: set[Choice] = set()
    with Spill() as linked:
        for number in range(PARTS):
            part = _Part(spill, number, rules, (Kind.VISITOR, Kind.GROUP))
            repeated |= part.repeated
            report.checked["choices"] += len(part.choices.kept)
            wrong.update(part.choices.wrong())
            _First(part, rules, report, linked).compare()
            on_progress("profiles compared", report.checked["visitors"] + report.checked["groups"])
        for number in range(PARTS):
            part = _Part(spill, number, rules, (Kind.USER,))
            _Second(part, rules, report).compare(linked.read(number))
            on_progress("users compared", report.checked["users"])
    return repeated, wrong


class _Step:
    def __init__(self, part: _Part, rules: Rules, report: Report) -> None:
        self.part, self.rules, self.report = part, rules, report

    def judge(
        self,
        subject: tuple[str, Kind, str],
        views: tuple[View | None, View | None],
        reason: str | None,
        *,
        chosen: bool = False,
    ) -> None:
        """Compare a profile.

        :param views: of both merges; ``None``: it does not exist.
        :param reason: why every difference may be right.
        """
        workspace, kind, name = subject
        what, found = _NAMES[kind], f"{workspace}: {name!r}"
        horizon, missing = self.rules.before(workspace, kind)
        actual, _ = self.part.profiles.get(subject, (None, None))
        self.report.checked[what] += 1
        low, high = views
        if actual is None:
            if low is not None and high is not None:
                reason = reason or self._excuse(subject, EMPTY)
                self.report.judge(what, f"{found} is missing", reason)
            return
        if low is None and high is None:
            if actual.created_at is None or actual.created_at < horizon:
                reason = reason or (missing if horizon > float("-inf") else None)
            reason = reason or self.rules.doubt(*subject)
            self.report.judge(what, f"{found} exists without an event that made it", reason)
            return
        differing = list(compare(low or EMPTY, high or EMPTY, actual, horizon))
        if differing:
            reason = reason or self._excuse(subject, actual)
            bad = [text for text, may in differing if not may and not (chosen and text == TIMES)]
            if not bad and reason is None:
                reason = missing if any(may for _, may in differing) else _CHOSEN
            text = (bad or [text for text, _ in differing])[0]
            self.report.judge(what, f"{found}: {text} differs from the events", reason)

    def _excuse(self, subject: tuple[str, Kind, str], actual: View) -> str | None:
        """Return why a profile may differ from its events, if there is a reason."""
        workspace, kind, _ = subject
        for fold in self.part.folds(*subject):
            if fold.may_exceed(kind, self.rules.limits, actual.traits, actual.groups):
                return _LIMITED
            at = fold.received_at
            if kind is Kind.VISITOR and at is not None and at < self.rules.visitors_before:
                return _OLD
        if kind is Kind.VISITOR and actual is EMPTY and workspace in self.rules.full:
            return _LIMITED
        return self.rules.doubt(*subject)


class _First(_Step):
    """Compares visitors and groups.

    :param linked: gets the links.
    """

    def __init__(self, part: _Part, rules: Rules, report: Report, linked: Spill) -> None:
        super().__init__(part, rules, report)
        self._linked = linked

    def compare(self) -> None:
        part = self.part
        for subject in part.keys(Kind.VISITOR, Kind.GROUP):
            low, high = part.folds(*subject)
            seen = _view(low)
            self.judge(subject, (seen, seen if high is low else _view(high)), None)
            workspace, kind, name = subject
            if kind is Kind.VISITOR and (workspace, name) not in part.links:
                _, owner = part.profiles.get(subject, (None, None))
                if owner is not None:
                    reason = _EXPIRED if self.rules.expires else None
                    reason = reason or self.rules.doubt(workspace, Kind.USER, owner)
                    message = f"{workspace}: {name!r} belongs to a user without a link"
                    self.report.judge("visitors", message, reason)
        for (workspace, name), of_users in part.links.items():
            self._hand_on(workspace, name, of_users)

    def _hand_on(self, workspace: str, name: str, of_users: Mapping[str, _OneLink]) -> None:
        """Decide whom a visitor belongs to, and hand its links on."""
        part, rules = self.part, self.rules
        counting: list[dict[str, Version]] = [{}, {}]
        for user, link in of_users.items():
            for found, wanted in zip(counting, (link.low, link.high), strict=True):
                first, counts = wanted.first, wanted.decided[1]
                if link.stored is not None:
                    stored, stored_counts = link.stored
                    older = [stored] if _is_older(stored, rules.horizon) else []
                    first = min((one for one in (first, *older) if one), default=None)
                    if rules.expires and link.low.decided == link.high.decided:
                        counts = stored_counts  # Events that expired may have decided.
                elif rules.with_links and link.low.first is not None:
                    first = None  # It is missing, which is a difference of its own.
                if first is not None and counts:
                    found[user] = first
        firsts = [min(one, key=one.__getitem__, default=None) for one in counting]
        subject = (workspace, Kind.VISITOR, name)
        folds = part.folds(*subject)
        is_user, made = part.exists(workspace, name), part.exists(workspace, name, chosen=False)
        if rules.expires and (workspace, Kind.USER, name) in part.profiles:
            # Events that expired may have made the user.
            is_user, made = (is_user[0], True), (made[0], True)
        visitors = tuple(
            None if fold.created_at is None or is_made else _packed(fold)
            for fold, is_made in zip(folds, made, strict=True)
        )
        view, owner = part.profiles.get(subject, (None, None))
        if visitors == (None, None):
            reason = rules.doubt(*subject)
        else:
            reason = self._excuse(subject, view or EMPTY)
        # An operator may have undone a link for a moment. An event may have changed the visitor
        # before the next one gave it to a user; a choice makes a user while there is no visitor.
        late, chosen = folds[0] is not folds[1], (workspace, name) in part.choices.names
        if any(link.low.decided != link.high.decided for link in of_users.values()) or (
            late and (firsts[0] != firsts[1] or is_user[0] != is_user[1] or chosen)
        ):
            reason = _CHANGED
        for user, link in of_users.items():
            mine = (firsts[0] == user, firsts[1] == user)
            linked = _Linked(
                workspace=workspace,
                user=user,
                name=name,
                low=(link.low.first, link.low.decided),
                high=(link.high.first, link.high.decided),
                stored=link.stored,
                counting=(counting[0].get(user), counting[1].get(user)),
                is_user=is_user,
                made=made,
                mine=mine,
                visitors=visitors if any(mine) else (None, None),
                reason=reason,
                owner=None if view is None else (owner,),
                late=any(mine) and late,
            )
            self._linked.add(part_of(workspace, user), tuple(linked))


class _Second(_Step):
    """Compares users and links."""

    def compare(self, handed_on: Iterable[Any]) -> None:
        """:param handed_on: what the first step has for this part."""
        part = self.part
        links: dict[tuple[str, str], list[_Linked]] = {}
        for record in handed_on:
            one = _Linked(*record)
            links.setdefault((one.workspace, one.user), []).append(one)
        chosen = {(workspace, Kind.USER, name) for workspace, name in part.choices.names}
        for subject in part.keys(Kind.USER) | chosen:
            self._user(subject, links.get((subject[0], subject[2]), ()), subject in chosen)
        for (workspace, user), found in links.items():
            self._links(workspace, user, found)

    def _user(self, subject: tuple[str, Kind, str], links: Sequence[_Linked], chosen: bool) -> None:
        workspace, _, name = subject
        folds, exists = self.part.folds(*subject), self.part.exists(workspace, name)
        reason = _LIMITED if len(links) > self.rules.limits.links else None
        late = folds[0] is not folds[1] or exists[0] != exists[1]
        for one in links:
            both = (one.counting, one.is_user, one.mine)
            late |= one.late or any(before != after for before, after in both)
            if any(one.mine) or one.reason in (_CHANGED, ERASING):
                reason = reason or one.reason
        low = self._merged(subject, folds[0], links, 0) if exists[0] else None
        high = low
        if late:
            high = self._merged(subject, folds[1], links, 1) if exists[1] else None
        visitor, _ = self.part.folds(workspace, Kind.VISITOR, name)
        if chosen and not any(exists) and visitor.created_at is None:
            # It may have existed by a choice until a visitor with the id was made.
            high = self._merged(subject, folds[1], links, 1)
        actual, _ = self.part.profiles.get(subject, (None, None))
        if actual is not None and self.rules.expires and not self.rules.with_links:
            known = {one.name for one in links}
            reason = reason or (None if set(actual.anonymous_ids) <= known else _EXPIRED)
        self.judge(subject, (low, high), reason, chosen=chosen)

    def _merged(
        self, subject: tuple[str, Kind, str], own: Fold, links: Iterable[_Linked], index: int
    ) -> View:
        """Merge a user with its visitors.

        :param index: 0 for the events before, 1 for all.
        """
        workspace, _, name = subject
        names, visitors = [], []
        for one in links:
            first, visitor = one.counting[index], one.visitors[index]
            if first is not None and not one.is_user[index]:
                names.append(one.name)
                if one.mine[index] and visitor is not None:
                    visitors.append((first, Fold(*visitor).registers(one.name)))
        ordered = [visitor for _, visitor in sorted(visitors, key=lambda one: one[0])]
        registers, limits = own.registers(name), self.rules.limits
        declared = self.rules.identifiers.get(workspace, ())
        profile = merge(workspace, registers, names, ordered, limits, declared)
        return view_of(profile, [registers, *ordered[: limits.user_visitors]])

    def _links(self, workspace: str, user: str, links: Sequence[_Linked]) -> None:
        """Compare the links of a user, and the users of the visitors that belong to it."""
        rules = self.rules
        exists = self.part.exists(workspace, user)
        if rules.expires and (workspace, Kind.USER, user) in self.part.profiles:
            exists = (exists[0], True)
        count = sum(one.stored is not None or one.high[0] is not None for one in links)
        reason = _LIMITED if count > rules.limits.links else None
        reason = reason or rules.doubt(workspace, Kind.USER, user)
        for one in links:
            if rules.with_links:
                self.report.checked["links"] += 1
                if (problem := _link_problem(one, rules.horizon)) is not None:
                    text, excuse = problem
                    message = f"{workspace}: {one.name!r} to {user!r} {text}"
                    self.report.judge("links", message, reason or excuse)
            if one.owner is not None and all(one.mine):
                both = zip(exists, one.made, strict=True)
                owners = [user if there and not made else None for there, made in both]
                if one.owner[0] not in owners:
                    message = f"{workspace}: {one.name!r} belongs to {one.owner[0]!r}"
                    message += f", and not to {owners[1]!r}"
                    self.report.judge("visitors", message, reason or one.reason)


def _link_problem(link: _Linked, horizon: float) -> tuple[str, str | None] | None:
    """Return what is wrong with a link, and why it may be right."""
    low, high = link.low, link.high
    wanted = [first for first, _ in (low, high) if first is not None]
    first, counts = link.stored or (None, True)
    if first is None:
        is_missing = low[0] is not None or not (low[1][1] or link.stored)
        return ("is missing", None) if is_missing else None
    if not wanted or first < min(wanted):
        reason = _EARLIER if not first[1] else _EXPIRED if first[0] < horizon else None
        return ("has an earlier first event than any that is stored", reason)
    if low[0] is not None and (first > low[0] or (low[0] == high[0] != first)):
        return ("has another first event", None)
    if low[1] == high[1] and counts != low[1][1]:
        text = "counts" if counts else "does not count"
        return (text, None if horizon == float("-inf") else _EXPIRED)
    return None


def _is_older(first: Version | None, horizon: float) -> bool:
    """Return whether a stored link may be older than all stored events."""
    return first is not None and (first[0] < horizon or not first[1])


def _packed(fold: Fold) -> tuple[Any, ...]:
    return (fold.created_at, fold.updated_at, fold.received_at, fold.traits, fold.groups)


def _view(fold: Fold) -> View | None:
    """Return the view of a visitor or a group; ``None`` if it does not exist."""
    if fold.created_at is None:
        return None
    return View(
        created_at=fold.created_at,
        updated_at=fold.updated_at,
        traits={name: value[0] for name, (*_, value) in fold.traits.items() if value},
        trait_times={name: at for name, (at, *_) in fold.traits.items()},
        groups=[group for group, (*_, assigned) in fold.groups.items() if assigned],
        group_times={group: at for group, (at, *_) in fold.groups.items()},
    )
