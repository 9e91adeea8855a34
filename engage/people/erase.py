# SPDX-License-Identifier: Apache-2.0
"""Erasing people: one user of a workspace, or all of a file of erasures.

Nothing is erased before the erasure is durable in the file beside the config. What belongs to a
user is found by its events and its links, so these are erased last: an erasure that was interrupted
begins again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from engage.api import (
    ADDRESS_TRAITS,
    EngageError,
    Event,
    EventFilter,
    Kind,
    StorageError,
    Suppression,
    render_time,
)
from engage.audit import Actor, record_audit
from engage.config import Config, Workspace
from engage.config.erasures_file import (
    Erasure,
    append,
    check_writable,
    erasures_path,
    key_of,
    newest,
    read,
)
from engage.people.person import (
    OtherVisitor,
    Person,
    addresses_in_letter,
    addresses_of,
    audit_of,
    events_of,
    letters_of,
    other_addresses,
    other_visitors,
    person_of,
    subjects_of,
    visitors_of,
)
from engage.people.requests import noted_requests, request_notes
from engage.people.tombstones import (
    PSEUDONYM,
    Tombstones,
    is_done,
    put_tombstones,
)
from engage.pipeline.operator import decide_link
from engage.reading.scans import PAGE, all_pages
from engage.store.erasures import mark_of
from engage.store.facade import Storage
from engage.store.keys import fingerprint, hash_of
from engage.store.suppressions import hashed_address
from engage.subscriptions.choices import OBJECTION

__all__ = ["Receipt", "erase_user", "in_words", "obstacle", "repeat"]

#: Told what is done at the moment, and how many things of it are done.
Report = Callable[[str, int], None]


#: What a receipt counts.
_COUNTED: Final = (
    *("events", "deadLetters", "auditEntries", "suppressions", "requests", "choices"),
    *("subscriptionHistory", "undoneLinks", "visitors", "users"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was erased of a user."""

    workspace: str
    #: :func:`~engage.store.keys.hash_of` the user id.
    user: str
    #: What was received before is erased: milliseconds since 1970 UTC.
    at: int
    #: Whether anything was known of the id.
    existed: bool
    counts: Mapping[str, int]
    seconds: float
    #: Whether nothing can be left in the files of the store; see :meth:`Storage.settle`.
    overwritten: bool
    #: The addresses that were taken, and those of the person that stay.
    addresses: Sequence[str] = ()
    other_addresses: Sequence[str] = ()
    #: The visitors that may be the person's, and stay.
    other_visitors: Sequence[OtherVisitor] = ()

    def document(self) -> dict[str, Any]:
        """Return the receipt as a JSON object."""
        return {
            "workspace": self.workspace,
            "user": self.user,
            "erasedBefore": render_time(self.at),
            "known": self.existed,
            "erased": dict(self.counts),
            "seconds": round(self.seconds, 1),
            "overwritten": self.overwritten,
            "addresses": self.addresses,
            "otherAddresses": self.other_addresses,
            "otherVisitors": [visitor.document() for visitor in self.other_visitors],
        }


def in_words(error: EngageError) -> str:
    """Return what was done if :func:`erase_user` raised an error, and why it did not go on."""
    if isinstance(error, StorageError):
        return f"the user may be erased in part: {error}; erase it again"
    return f"nothing was erased: {error}"


def obstacle(config: Config) -> str | None:
    """Return in one line why nobody can be erased; ``None``: nothing prevents it."""
    path = erasures_path(config)
    try:
        read(path, key_of(config))
        check_writable(path)
    except EngageError as error:
        return f"people cannot be erased: {' '.join(str(error).split())}"
    return None


async def erase_user(
    store: Storage,
    config: Config,
    workspace_id: str,
    user_id: str,
    *,
    actor: Actor,
    addresses: Collection[str] = (),
    visitors: Collection[str] = (),
    linked: bool = False,
    report: Report = lambda _step, _count: None,
) -> Receipt:
    """Erase what the server received of a user until now, and return the receipt.

    It waits for twice ``storage.write_timeout`` if a request that was received before may still be
    written: see :attr:`~engage.store.facade.Storage.isolated`.

    :param addresses: as :func:`~engage.people.person.person_of`.
    :param visitors: as :func:`~engage.people.person.person_of`.
    :param linked: as :func:`~engage.people.person.person_of`.
    :raises EngageError: if the config has no key, or if the file of erasures cannot be written, or
        has hashes of another key: nothing is erased then.
    :raises StorageUnavailable: if the store failed; calling it again goes on.
    """
    key = key_of(config)
    read(erasures_path(config), key)  # A restore would refuse a file with hashes of two keys.
    user = hash_of(key, workspace_id, user_id)
    began, at = time.monotonic(), _now()
    noted: list[Erasure] = []

    async def note(names: Collection[str]) -> bool:
        lines = [_erasure(key, workspace_id, "visitor", name, at) for name in sorted(names)]
        if not noted:
            lines.insert(0, _erasure(key, workspace_id, "user", user_id, at))
        append(erasures_path(config), lines)
        noted.extend(lines)
        return await put_tombstones(store, lines)

    exists = await store.profile(workspace_id, user_id) is not None
    workspace = _workspace(config, workspace_id)
    find = functools.partial(person_of, store, workspace, user_id, linked=linked)
    earlier = await find(addresses, visitors)
    taken = earlier.addresses
    others = await other_addresses(store, workspace, earlier)
    if not await note(earlier.visitors):
        report("waiting for the requests of this moment", 0)
        await asyncio.sleep(2 * config.storage.write_timeout)
    later = await find(taken, [name for name in earlier.visitors if name not in taken])
    if new := later.visitors.keys() - earlier.visitors.keys():
        await note(new)
    report("searching visitors", 0)
    left = await other_visitors(store, workspace, later, copies=True)
    copies = [visitor.anonymous_id for visitor in left if visitor.is_copy]
    if copies:
        await note(copies)
    visitors = dict.fromkeys((*later.visitors, *copies), at)
    person = Person(workspace_id=workspace_id, users={user_id: at}, visitors=visitors)
    counts, overwritten = await _carry_out(store, config, person, report, copies)
    await put_tombstones(store, noted, done=True)
    receipt = Receipt(
        workspace=workspace_id,
        user=user,
        at=at,
        existed=exists or any(counts.values()),
        counts=counts,
        seconds=time.monotonic() - began,
        overwritten=overwritten,
        addresses=[name.partition(":")[2] for name in taken],
        other_addresses=list(others),
        other_visitors=[visitor for visitor in left if not visitor.is_copy],
    )
    details = receipt.document()
    details |= details.pop("erased")
    details["addresses"] = [hash_of(key, workspace_id, name) for name in taken]
    details |= {"otherAddresses": len(others), "otherVisitors": len(receipt.other_visitors)}
    await record_audit(store, actor, "user-erased", details, now=_now())
    return receipt


async def repeat(
    store: Storage,
    config: Config,
    erasures: Sequence[Erasure],
    *,
    report: Report = lambda _step, _count: None,
) -> Mapping[str, int]:
    """Carry out erasures again, for example on a backup from before, and return what was erased.

    Those that this store has carried out are left out. The others are compared with all ids in the
    store, which takes as long as reading it. They are also appended to the file of this config.

    :raises EngageError: as :func:`erase_user`; ``ErasuresFileError`` if the file of this config
        cannot be read or written.
    """
    key = key_of(config)
    todo = [erasure for erasure in erasures if not await is_done(store, erasure)]
    path = erasures_path(config)
    written = set(read(path, key)[0])
    if missing := [erasure for erasure in erasures if erasure not in written]:
        append(path, missing)
    total = Counter[str]()
    if not todo:
        return total
    await put_tombstones(store, todo)
    for person in await _matching(store, key, todo, report):
        visitors = dict(person.visitors)
        for name, at in person.users.items():
            for visitor in await visitors_of(store, _workspace(config, person.workspace_id), name):
                visitors[visitor] = max(at, visitors.get(visitor, 0))
        counts, _ = await _carry_out(
            store, config, dataclasses.replace(person, visitors=visitors), report
        )
        total.update(counts)
    await put_tombstones(store, todo, done=True)
    return total


def _erasure(key: str, workspace_id: str, kind: Any, name: str, at: int) -> Erasure:
    return Erasure(
        workspace=workspace_id,
        kind=kind,
        hash=hash_of(key, workspace_id, name),
        at=at,
        key=fingerprint(key),
    )


def _workspace(config: Config, workspace_id: str) -> Workspace:
    """Return a workspace, which the config need not have any more."""
    matches = (workspace for workspace in config.workspaces if workspace.id == workspace_id)
    return next(matches, Workspace(id=workspace_id, name=""))


def _now() -> int:
    return time.time_ns() // 1_000_000


# ---------------------------------------------------------------------------------------- matching
async def _matching(
    store: Storage, key: str, erasures: Iterable[Erasure], report: Report
) -> list[Person]:
    """Return whom erasures mean, one for each workspace that has any of them."""
    times = newest(erasures)
    workspaces = {workspace for workspace, *_ in times}
    by_workspace: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
    hashed = functools.lru_cache(maxsize=100_000)(functools.partial(hash_of, key))
    read = 0
    async for workspace, user, visitor in _ids(store):
        read += 1
        if read % PAGE == 0:
            report("comparing ids", read)
        if workspace not in workspaces:
            continue
        for kind, name in (("user", user), ("visitor", visitor)):
            if name is None:
                continue
            at = times.get((workspace, kind, hashed(workspace, name)))
            if at is not None:
                users, visitors = by_workspace.setdefault(workspace, ({}, {}))
                (users if kind == "user" else visitors)[name] = at
    return [
        Person(workspace_id=workspace, users=users, visitors=visitors)
        for workspace, (users, visitors) in by_workspace.items()
    ]


async def _ids(store: Storage) -> AsyncIterator[tuple[str, str | None, str | None]]:
    """Yield all ids in a store, each any number of times: workspace, user id, anonymous id."""
    async for user in all_pages(functools.partial(store.scan_users, None)):
        yield user.workspace_id, user.user_id, None
    async for visitor in all_pages(functools.partial(store.scan_visitors, None)):
        yield visitor.workspace_id, None, visitor.anonymous_id
    async for note, request in request_notes(store, None):
        yield note.workspace_id, request.user_id, None
    async for choice in all_pages(functools.partial(store.scan_subscriptions, None)):
        yield choice.workspace_id, choice.user_id, choice.anonymous_id
    async for record in all_pages(functools.partial(store.history, None, None)):
        yield record.workspace_id, record.user_id, record.anonymous_id
    async for suppression in all_pages(functools.partial(store.scan_suppressions, None)):
        trait = ADDRESS_TRAITS.get(suppression.channel, "phone")
        yield suppression.workspace_id, None, f"{trait}:{suppression.address}"
    async for letter in all_pages(functools.partial(store.scan_dead_letters, None)):
        yield letter.workspace_id, letter.user_id, letter.anonymous_id
        for address in addresses_in_letter(letter):
            yield letter.workspace_id, None, address
    async for event in all_pages(functools.partial(store.scan, EventFilter())):
        yield event.workspace_id, event.user_id, event.anonymous_id


# ----------------------------------------------------------------------------------------- erasing
async def _carry_out(
    store: Storage,
    config: Config,
    person: Person,
    report: Report,
    copies: Collection[str] = (),
) -> tuple[Counter[str], bool]:
    """Erase what belongs to a person.

    :param copies: visitors of the person whose choices are no objections: those of the user say
        more, and a link of the visitor may have made them.
    :return: how much of each kind, and what :meth:`Storage.settle` returned.
    """
    counts, workspace_id = Counter(dict.fromkeys(_COUNTED, 0)), person.workspace_id
    key = key_of(config)
    addresses = addresses_of(_workspace(config, workspace_id), person)

    async def erase_events(whose: Person) -> None:
        async for some in _parts(events_of(store, whose)):
            gone = [e for e in some if whose.owns(e.user_id, e.anonymous_id, e.received_at)]
            marks = [mark_of(e, key) for e in gone]
            counts["events"] += await store.erase_events(gone, marks)
            report("events", counts["events"])

    report("searching events", 0)
    if person.visitors:
        await erase_events(dataclasses.replace(person, users={}))
    letters = [letter.id async for letter in letters_of(store, person)]
    for start in range(0, len(letters), PAGE):
        counts["deadLetters"] += await store.remove(workspace_id, letters[start : start + PAGE])
    counts["auditEntries"] = await _hide_in_audit(store, key, person, addresses)
    counts["suppressions"] = await _hash_addresses(store, key, workspace_id, addresses)
    for record in await noted_requests(store, workspace_id, person.users):
        counts["requests"] += await store.delete_record(record.kind, workspace_id, record.id)
    chose = {name: at for name, at in person.visitors.items() if name not in copies}
    await _keep_objections(store, config, dataclasses.replace(person, visitors=chose), addresses)
    for subject in subjects_of(person):
        pseudonym = f"{PSEUDONYM}{uuid.uuid4()}"
        choices, changes = await store.erase_choices(workspace_id, subject, pseudonym)
        counts["choices"] += choices
        counts["subscriptionHistory"] += changes
    for name, at in person.visitors.items():
        counts["undoneLinks"] += await _keep_apart(store, person, name, at)
        counts["visitors"] += await store.erase_profile(workspace_id, Kind.VISITOR, name)
        report("visitors", counts["visitors"])
    if person.users:
        await erase_events(dataclasses.replace(person, visitors={}))
    for name in person.users:
        counts["users"] += await store.erase_profile(workspace_id, Kind.USER, name)
    overwritten = await store.settle()
    # What the person did since then makes a new user.
    since = min((*person.users.values(), *person.visitors.values()))
    tombstones = Tombstones(store, key)
    async for some in _parts(events_of(store, person, since=since)):
        # A second erasure that has begun meanwhile waits before it erases, or the plan looks again.
        await tombstones.refresh()
        await store.reapply(
            [
                event
                for event in some
                if not person.owns(event.user_id, event.anonymous_id, event.received_at)
                and not tombstones.cover(
                    workspace_id, event.user_id, event.anonymous_id, event.received_at
                )
            ]
        )
    return counts, overwritten


async def _parts(events: AsyncIterator[Event]) -> AsyncIterator[list[Event]]:
    part: list[Event] = []
    async for event in events:
        part.append(event)
        if len(part) == PAGE:
            yield part
            part = []
    if part:
        yield part


async def _keep_apart(store: Storage, person: Person, anonymous_id: str, before: int) -> int:
    """Undo the links of an erased visitor to other users: the next one would inherit it. Return how
    many."""
    undone = 0
    for user_id, at in await store.links_to(person.workspace_id, anonymous_id):
        if user_id not in person.users and at < before:
            try:
                await decide_link(
                    store, person.workspace_id, user_id, anonymous_id, linked=False, now=_now()
                )
            except StorageError:
                raise
            except EngageError:  # The user does not exist, or the id is that of a user.
                continue
            undone += 1
    return undone


async def _hash_addresses(
    store: Storage, key: str, workspace_id: str, addresses: set[tuple[str, str]]
) -> int:
    """Keep suppressions of addresses under hashes, so that nothing is sent to them either."""
    if not addresses:
        return 0
    suppressions = await store.suppressions(workspace_id, sorted(addresses))
    await store.suppress(
        [
            dataclasses.replace(
                suppression,
                address=hashed_address(key, workspace_id, suppression.channel, suppression.address),
                source_id="",
            )
            for suppression in suppressions
        ]
    )
    erased: int = await store.erase_suppressions(workspace_id, sorted(addresses))
    return erased


async def _keep_objections(
    store: Storage, config: Config, person: Person, addresses: set[tuple[str, str]]
) -> None:
    """Suppress the hashes of the addresses for the groups from which the person unsubscribed, so
    that a later import writes to nobody who objected."""
    workspace = next((x for x in config.workspaces if x.id == person.workspace_id), None)
    channels = {x.id: x.channel for x in workspace.subscription_groups} if workspace else {}
    states = [await store.state(person.workspace_id, subject) for subject in subjects_of(person)]
    left = {group for state in states for group, subscribed in state.items() if not subscribed}
    await store.suppress(
        [
            Suppression(
                workspace_id=person.workspace_id,
                channel=channel,
                address=hashed_address(key_of(config), person.workspace_id, channel, address),
                group_id=group,
                reason=OBJECTION,
                at=_now(),
                how="erasure",
            )
            for group in sorted(left)
            for channel, address in sorted(addresses)
            if channels.get(group) == channel
        ]
    )


async def _hide_in_audit(
    store: Storage, key: str, person: Person, addresses: set[tuple[str, str]]
) -> int:
    """Replace ids and addresses in the audit by their hashes, and return in how many entries."""
    hidden = 0
    async for record, named in audit_of(store, person, addresses):
        body = orjson.loads(record.body)
        for name in named:
            body["details"][name] = hash_of(key, person.workspace_id, body["details"][name])
        await store.put_record(dataclasses.replace(record, body=orjson.dumps(body)))
        hidden += 1
    return hidden
