# SPDX-License-Identifier: Apache-2.0
"""Subscription choices, and the history of their changes."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from engage.api import (
    ADDRESS_TRAITS,
    MAX_TIME,
    Kind,
    Page,
    Preferences,
    Subject,
    SubscriptionChange,
    SubscriptionRecord,
    SubscriptionState,
    UserProfile,
    VisitorProfile,
    suppressed_address,
)
from engage.store.erasures import covered
from engage.store.keys import (
    KEY_BYTES,
    is_text,
    key_of,
)
from engage.store.pages import every, page
from engage.store.people import certain, people, visitor
from engage.store.profiles import CHOICES, KIND_OF, KINDS, chose
from engage.store.suppressions import find, forms
from engage.store.tables import (
    MAX_ROWS,
    Add,
    Delete,
    Executor,
    Get,
    Key,
    Pages,
    Put,
    Row,
    Steps,
    Table,
    Under,
    plan,
)

#: The changes that were applied. The key of one without effect is longer: its subject, a number
#: that grows, and the key of the change.
CHANGES: Final = Table("changes", {"key": bytes}, key=1)
#: What the records of one subject have in common.
_SUBJECT: Final = ("workspace", "kind", "name")
HISTORY: Final = Table(
    "history",
    {
        "number": int,
        "change_id": str,
        "workspace": str,
        "kind": int,
        "name": str,
        "group_id": str,
        "before": int,
        "after": int,
        "at": int,
        **dict.fromkeys(("how", "secret", "user_agent", "address"), str),
    },
    key=1,
    indexes=(_SUBJECT,),
    arrival=True,
    followed=True,
)

_USER: Final = KINDS[Kind.USER]
#: Changes without effect that are remembered of one subject.
MAX_IDLE: Final = 16
#: Their numbers.
_NUMBER: Final = struct.Struct(">Q")


def state_of(row: Row) -> SubscriptionState:
    """Return the choice of a row."""
    workspace, kind, name, group, subscribed, at, change = row
    return SubscriptionState(
        workspace_id=workspace,
        subject=Subject(KIND_OF[kind], name),
        group_id=group,
        subscribed=bool(subscribed),
        updated_at=at,
        change_id=change,
    )


def record_of(row: Row) -> SubscriptionRecord:
    """Return the audit record of a row."""
    _, change, workspace, kind, name, group, before, after, at, how, *source = row
    secret, user_agent, address = source
    return SubscriptionRecord(
        change_id=change,
        workspace_id=workspace,
        subject=Subject(KIND_OF[kind], name),
        group_id=group,
        before=None if before is None else bool(before),
        after=bool(after),
        at=at,
        how=how,
        secret=secret,
        user_agent=user_agent,
        address=address,
    )


def _whose(workspace_id: str, subject: Subject) -> Key:
    return workspace_id, KINDS[subject.kind], subject.id


class Chooser:
    """A subject, while its changes are applied one after the other."""

    def __init__(self, whose: Key, rows: Sequence[Row]) -> None:
        self._whose = whose
        #: Group id → row.
        self.choices = {row[3]: row for row in rows}
        #: The groups whose rows are new.
        self.changed: dict[str, None] = {}
        #: The keys of the changes without effect, the oldest first: those that are stored, and all.
        self.stored_idle: list[bytes] = []
        self.idle: list[bytes] = []

    def state(self) -> dict[str, bool]:
        """Return the choices: group id → subscribed."""
        return {group: bool(row[4]) for group, row in sorted(self.choices.items())}

    def apply(self, change: SubscriptionChange) -> list[Row]:
        """Apply a change, and return its audit records."""
        records = []
        for group, subscribed in change.choices.items():
            *_, before, updated_at, _ = self.choices.get(group, (None, None, None))
            if change.dated and updated_at is not None and updated_at >= change.at:
                continue
            at = change.at if updated_at is None else max(change.at, updated_at + 1)
            self.choices[group] = (*self._whose, group, int(subscribed), at, change.id)
            self.changed[group] = None
            if before != subscribed:
                source = change.how, change.secret, change.user_agent, change.address
                record = (*self._whose, group, before, int(subscribed), change.at, *source)
                records.append((None, change.id, *record))
        return records

    def is_idle(self, key: bytes) -> bool:
        """Return whether a change is remembered that had no effect."""
        return any(remembered.endswith(key) for remembered in self.idle)

    def remember(self, key: bytes) -> None:
        """Remember that a change had no effect, and forget the oldest if there are too many."""
        last = self.idle[-1][KEY_BYTES:-KEY_BYTES] if self.idle else None
        number = 0 if last is None else int.from_bytes(last, "big") + 1
        new = _prefix(self._whose) + _NUMBER.pack(number) + key
        self.idle = [*self.idle, new][-MAX_IDLE:]


def _prefix(whose: Key) -> bytes:
    """Return how the keys of the changes of a subject begin that had no effect."""
    workspace, kind, name = whose
    # Without the kind, as in the stores of earlier versions.
    return key_of(workspace, name, *([] if kind == _USER else [KIND_OF[kind].value]))


def _idle(whose: Key) -> Steps[list[bytes]]:
    """Return the keys of the changes without effect that are remembered, the oldest first."""
    prefix = _prefix(whose)
    low, high = prefix + _NUMBER.pack(0), prefix + b"\xff" * _NUMBER.size
    part = yield Pages(CHANGES, MAX_ROWS, by=("key",), low=low, high=high)
    return [key for (key,) in part.rows]


def _named(changes: Sequence[SubscriptionChange]) -> set[Key]:
    """Return the subjects of changes, and their ids."""
    subjects = {(change.workspace_id, change.subject.id) for change in changes}
    return subjects | {(change.workspace_id, "change", change.id) for change in changes}


@plan(locks=_named)
def apply_all(changes: Sequence[SubscriptionChange]) -> Steps[list[dict[str, bool]]]:
    """Apply changes in their order, each once by its id; see
    :meth:`~engage.store.facade.Storage.apply`.

    A change without effect is remembered too, because one that is repeated after a later change
    must not undo that one. But only the latest of a subject are: anyone who has a link can send any
    number of them. A change that an erasure covers is not applied.

    :return: after each change, all choices of its subject.
    """
    keys = [(key_of(change.workspace_id, change.id),) for change in changes]
    whose = [_whose(change.workspace_id, change.subject) for change in changes]
    applied = {*(yield Get(CHANGES, set(keys)))}
    choices = yield Under(CHOICES, set(whose))
    people = {subject: Chooser(subject, choices[subject]) for subject in dict.fromkeys(whose)}
    # When a dated change was received is not known.
    erased = yield from covered(
        [
            (x.workspace_id, x.user_id, x.anonymous_id, MAX_TIME if x.dated else x.at)
            for x in changes
        ]
    )
    # Who has no choice has no change without effect.
    for subject in {x: None for x, key in zip(whose, keys, strict=True) if key not in applied}:
        if choices[subject]:
            people[subject].stored_idle = people[subject].idle = yield from _idle(subject)
    made, new, records, states = [], [], [], []
    for change, subject, key, gone in zip(changes, whose, keys, erased, strict=True):
        person = people[subject]
        if not gone and key not in applied and not person.is_idle(*key):
            made.append((subject, change.at))
            if (changed := person.apply(change)) or not person.choices:
                applied.add(key)
                new.append(key)
                records += changed
            else:
                person.remember(*key)
        states.append(person.state())
    if made:
        everyone = people.values()
        new += [(key,) for x in everyone for key in x.idle if key not in x.stored_idle]
        old = [(key,) for x in everyone for key in x.stored_idle if key not in x.idle]
        yield Put(CHANGES, new)
        yield Delete(CHANGES, old)
        yield Put(CHOICES, [x.choices[group] for x in everyone for group in x.changed])
        yield Add(HISTORY, records)
        yield from chose([choice for choice in made if choice[0][1] == _USER])
    return states


@plan()
def state(workspace_id: str, subject: Subject) -> Steps[dict[str, bool]]:
    """Return the choices of a subject: group id → subscribed."""
    whose = _whose(workspace_id, subject)
    stored = yield Under(CHOICES, [whose])
    return {row[3]: bool(row[4]) for row in stored[whose]}


def unlike(
    whose: Key, choices: Mapping[str, tuple[int, int]], records: Iterable[tuple[str, int, int]]
) -> list[str]:
    """Return the groups of which the choice of a subject is not as its history says, or missing.

    :param choices: group id → whether it is subscribed, and when it was updated.
    :param records: the group id, the choice and the time of each audit record, in their order.
    """
    said = Chooser(whose, ())
    workspace, kind, name = whose
    for group, after, at in records:
        change = SubscriptionChange(
            id="",
            workspace_id=workspace,
            subject=Subject(KIND_OF[kind], name),
            choices={group: bool(after)},
            at=at,
            how="",
        )
        said.apply(change)
    recorded = {group: (row[4], row[5]) for group, row in said.choices.items()}
    # A choice that is repeated is later than its record.
    return [
        group
        for group in sorted({*choices, *recorded})
        if group not in choices
        or group not in recorded
        or choices[group][0] != recorded[group][0]
        or choices[group][1] < recorded[group][1]
    ]


@plan()
def unproven(workspace_id: str, subject: Subject) -> Steps[list[str] | None]:
    """Return the groups of which a choice is not as the history says; ``None``: its history changed
    meanwhile."""
    whose = _whose(workspace_id, subject)
    equal = dict(zip(_SUBJECT, whose, strict=True))
    records = yield from every(HISTORY, by=_SUBJECT, equal=equal)
    stored = yield Under(CHOICES, [whose])
    if records != (yield from every(HISTORY, by=_SUBJECT, equal=equal)):
        return None
    choices = {row[3]: (row[4], row[5]) for row in stored[whose]}
    return unlike(whose, choices, [(row[5], row[7], row[8]) for row in records])


@plan()
def preferences(
    workspace_id: str, subject: Subject, identifier: tuple[str, str] | None, key: str | None
) -> Steps[Preferences]:
    """See :meth:`~engage.store.facade.Storage.preferences`."""
    named: Mapping[str, str | None] = dict([identifier] if identifier else ())
    if identifier is None and subject.kind is Kind.USER:
        named = yield from certain(workspace_id, subject.id)
    elif identifier is None:
        profile = yield from visitor(workspace_id, subject.id)
        named = dict.fromkeys(() if profile is None else profile.traits)
    given = [
        (channel, trait, named[trait])
        for channel, trait in ADDRESS_TRAITS.items()
        if trait in named
    ]
    formed = [(channel, suppressed_address(channel, value or "")) for channel, _, value in given]
    addresses = [(channel, form) for channel, form in formed if form is not None]
    return Preferences(
        choices=(yield from state(workspace_id, subject)),
        suppressions=(yield from find(workspace_id, [*forms(key, workspace_id, addresses)])),
        left_out=sorted({trait for _, trait, value in given if value is None}),
    )


class Known(NamedTuple):
    """What is known of a user, or of a visitor, at one moment, without events."""

    is_visitor: bool
    user: UserProfile | None = None
    #: The visitor with the id, and those that are linked to the user, by their ids.
    visitors: Mapping[str, VisitorProfile] = {}
    choices: Mapping[str, bool] = {}
    history: Sequence[SubscriptionRecord] = ()


@plan()
def person(
    workspace_id: str, name: str, as_visitor: bool, linked: int, after: str, records: int
) -> Steps[Known]:
    """Return what is known of the user of an id, or else of the visitor with this id.

    :param as_visitor: whether the visitor is wanted.
    :param linked: as of :func:`~engage.store.people.people`; so is ``after``.
    :param records: how many changes of the choices, the oldest ones.
    """
    ids = [] if as_visitor else [name]
    users, visitors = yield from people(workspace_id, ids, [name], linked, after)
    is_visitor = not users and (as_visitor or name in visitors)
    subject = Subject(Kind.VISITOR if is_visitor else Kind.USER, name)
    choices = yield from state(workspace_id, subject)
    changes = yield from history(workspace_id, subject, 0, None, records)
    return Known(is_visitor, users.get(name), visitors, choices, changes.items)


@plan()
def scan(workspace_id: str | None, after: str | None, limit: int) -> Steps[Page[SubscriptionState]]:
    """Return a page of the current choices."""
    equal = {} if workspace_id is None else {"workspace": workspace_id}
    return (yield from page(state_of, CHOICES, equal, after, limit))


@plan()
def history(
    workspace_id: str | None, subject: Subject | None, since: int, after: str | None, limit: int
) -> Steps[Page[SubscriptionRecord]]:
    """Return a page of audit records; see :meth:`~engage.store.facade.Storage.history`."""
    equal: dict[str, Any] = {} if workspace_id is None else {"workspace": workspace_id}
    if subject is not None:
        equal |= {"kind": KINDS[subject.kind], "name": subject.id}
    by = _SUBJECT if len(equal) == len(_SUBJECT) else ()
    least = {"at": since} if since else {}
    return (yield from page(record_of, HISTORY, equal, after, limit, by=by, least=least))


# The second of two calls would return that there was nothing.
@plan(repeatable=False, frees=True, overwrites=True)
def erase(workspace_id: str, subject: Subject, pseudonym: str) -> Steps[tuple[int, int]]:
    """Erase the choices of a subject; see :meth:`~engage.store.facade.Storage.erase_choices`."""
    whose = _whose(workspace_id, subject)
    # Their keys begin with a hash of the id, which can be guessed.
    idle = yield from _idle(whose)
    equal = dict(zip(_SUBJECT, whose, strict=True))
    records = yield from every(HISTORY, by=_SUBJECT, equal=equal)
    new = {change: str(uuid.uuid4()) for _, change, *_ in records}
    keys = [key[-KEY_BYTES:] for key in idle] + [key_of(workspace_id, x) for x in new.values()]
    yield Put(CHANGES, [(key,) for key in keys])
    yield Delete(CHANGES, [(key,) for key in idle])
    erased: list[Row] = []
    for number, change, workspace, kind, _, *what, _secret, _user_agent, _address in records:
        erased.append((number, new[change], workspace, kind, pseudonym, *what, "", "", ""))
    yield Put(HISTORY, erased)
    choices = yield Under(CHOICES, [whose])
    deleted: int = yield Delete(CHOICES, [row[: CHOICES.key] for row in choices[whose]])
    return deleted, len(records)


# --------------------------------------------------------------------------------------- storage
class Choices(Executor):
    """Subscription choices with their history.

    A choice belongs to the one user or visitor for whom it was made. Links between ids do not carry
    it to another one.
    """

    async def apply(self, change: SubscriptionChange) -> Mapping[str, bool]:
        """Apply the choices and their audit records as one durable, atomic, idempotent write.

        Changes without effect are remembered too, so that one that is repeated does not undo a
        later one, but only some of the latest (at least ten) of each subject: they must not make
        the store grow.

        Each new change makes the choice's ``updated_at`` greater, also one that repeats the choice.
        It has an audit record if it changes the choice. So the last record of a subject and a group
        always has the choice that is kept for them.

        If the store keeps profiles, a change of a user makes the user exist, as by a :class:`Seen`
        at ``change.at``. A change of a visitor makes no profile.

        A :attr:`SubscriptionChange.dated` change keeps its time. For a group with a later choice of
        this subject, it has no effect.

        :return: as :meth:`state` after the change.
        """
        return (await self.apply_all([change]))[0]

    async def apply_all(
        self, changes: Sequence[SubscriptionChange]
    ) -> Sequence[Mapping[str, bool]]:
        """Apply changes, those of one subject in their order, and return the result of each.

        It need not be atomic.
        """
        if not changes:
            return []
        return await self.run(apply_all, changes)

    async def state(self, workspace_id: str, subject: Subject) -> Mapping[str, bool]:
        """Return group id → subscribed, for each choice that is kept for a subject."""
        if not is_text(subject.id):
            return {}
        return await self.read(state, workspace_id, subject)

    async def preferences(
        self,
        workspace_id: str,
        subject: Subject,
        identifier: tuple[str, str] | None,
        key: str | None,
    ) -> Preferences:
        """Return the choices of a subject, and what is suppressed of its addresses.

        :param identifier: the trait and the value in the link; ``None``: the addresses are those
            that surely are this user's, because anyone can give somebody that of another.
        :param key: of the hashes under which the addresses of erased people are kept; ``None``:
            nobody was erased.
        """
        if not is_text(subject.id, *(identifier or ())):
            return Preferences({}, (), ())
        return await self.read(preferences, workspace_id, subject, identifier, key)

    async def scan_subscriptions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[SubscriptionState]:
        """Return one page of all current choices; each choice once."""
        return await self.read(scan, workspace_id, after, limit)

    async def history(
        self,
        workspace_id: str | None,
        subject: Subject | None,
        *,
        since: int = 0,
        after: str | None,
        limit: int,
    ) -> Page[SubscriptionRecord]:
        """Return one page of audit records, in the order in which they were applied. They are never
        changed or deleted.

        :param subject: only its records.
        :param since: the least ``at``.
        """
        return await self.read(history, workspace_id, subject, since, after, limit)

    async def unproven(self, workspace_id: str, subject: Subject) -> Sequence[str] | None:
        """Return the groups of which the choice of a subject is not as its history says, or is
        missing; ``None`` if the history changed meanwhile."""
        return await self.read(unproven, workspace_id, subject)

    async def erase_choices(
        self, workspace_id: str, subject: Subject, pseudonym: str
    ) -> tuple[int, int]:
        """Erase the subscription choices of a user or a visitor, and give its audit records to a
        pseudonym of the same kind, without the client's address, its ``User-Agent`` and the secret.
        Each change gets a random id there, because the old one can be computed from the id of the
        person.

        The old ids of the changes are not forgotten: a change that is repeated has no effect.

        :return: how many choices and how many audit records there were.
        """
        if not is_text(subject.id):
            return 0, 0
        return await self.run(erase, workspace_id, subject, pseudonym)
