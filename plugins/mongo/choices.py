# SPDX-License-Identifier: Apache-2.0
"""Subscription choices with their history.

The choices of a user or a visitor are one document, changed by compare-and-set on its ``version``.
The record of the change is part of the same update (``pending``), so choice and record are one
atomic write. The record is then copied to the history, where its ``_id`` is the id of the change,
and removed from the document. A process that finds it there later (after a crash) copies it first.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import bson
from bson.datetime_ms import DatetimeMS
from bson.objectid import ObjectId
from pymongo.errors import DuplicateKeyError

from engage.api import (
    ENGAGE_VERSION,
    Kind,
    StorageUnavailable,
    Subject,
    SubscriptionChange,
)
from engage.store.choices import MAX_IDLE, Chooser
from engage.store.profiles import CHOICES, KINDS

from .connection import BATCH, DUPLICATE, MAX_ATTEMPTS, Connection
from .counts import Counts
from .documents import (
    Sequencer,
    any_of,
    escape_key,
    is_text,
    scoped_id,
    subject_id,
    subject_of,
)
from .paging import STEP
from .profiles import Visitors, ensure_user, parts
from .schema import (
    EVENTS,
    HISTORY,
    LINKS,
    META,
    OWN_CHOICES,
    PLACES,
    SUBSCRIPTIONS,
    USERS,
    VERSION,
    VISITORS,
)
from .tables import FORMS

#: Ids whose subscription choices are changed at once: a change takes several calls of a server.
_AT_ONCE: Final = 16


#: Milliseconds after which a process that wrote no counter of a new minute has ended.
_ALIVE: Final = 75_000
#: Seconds that reading all events may take.
_SCAN_SECONDS: Final = 3600.0

#: The beginning of the ids of its changes.
_PREFIX: Final = "upgrade-"

_Document = Mapping[str, Any]
#: Workspace and id → what the id is known to be. That a choice made a user exist is no proof.
_Kinds = collections.defaultdict[tuple[str, str], set[Kind]]


async def apply_all(
    apply: Callable[[SubscriptionChange], Awaitable[Mapping[str, bool]]],
    changes: Sequence[SubscriptionChange],
) -> Sequence[Mapping[str, bool]]:
    """Apply changes, those of one subject in their order, and several subjects at the same time.

    A plan would change several documents that must still be the same.
    """
    choices: list[Mapping[str, bool]] = [{}] * len(changes)
    of_subject: dict[tuple[str, Subject], list[int]] = {}
    for index, change in enumerate(changes):
        of_subject.setdefault((change.workspace_id, change.subject), []).append(index)
    waiting = iter(of_subject.values())

    async def work() -> None:
        for indexes in waiting:
            for index in indexes:
                choices[index] = await apply(changes[index])

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    return choices


class Subscriptions:
    """Reads and changes the choices of users and visitors."""

    def __init__(self, connection: Connection, sequence: Sequencer) -> None:
        self._connection = connection
        self._sequence = sequence
        #: ``_id`` and version of the documents whose record is in the history now.
        self._copied: list[tuple[str, int]] = []

    async def apply(self, change: SubscriptionChange) -> dict[str, bool]:
        """Apply a change, and return all choices of its subject."""
        key = subject_id(change.workspace_id, change.subject)
        change_key = scoped_id(change.workspace_id, change.id)
        with self._connection.calling() as db:
            record, document = await asyncio.gather(
                db[HISTORY].find_one({"_id": change_key}), self._document(key)
            )
            if record is not None:
                # It is written again, because it may not be durable yet.
                await self._connection.insert(HISTORY, [bson.encode(record)])
                # Both were read at the same time, and the document is written before the record.
                document = document or await self._document(key)
            for _ in range(MAX_ATTEMPTS):
                if document is not None and (pending := document.get("pending")) is not None:
                    await self._copy(document, pending)
                    if pending["changeId"] == change.id:
                        record = pending
                if record is not None:
                    if await self._is_durable(key, document):
                        return _chooser(change.workspace_id, change.subject, document).state()
                else:
                    kind, name = change.subject
                    if kind is Kind.USER:
                        await ensure_user(self._connection, change.workspace_id, name, change.at)
                    choices = await self._change(key, document, change)
                    if choices is not None:
                        return choices
                document = await self._document(key)
        raise StorageUnavailable("these choices are being changed by too many callers")

    async def _document(self, key: str) -> Mapping[str, Any] | None:
        document: _Document | None = await self._connection.db[SUBSCRIPTIONS].find_one({"_id": key})
        return document

    async def _is_durable(self, key: str, document: Mapping[str, Any] | None) -> bool:
        """Write a document again as it was read: a majority may not have it yet, and a failover
        would undo it.

        :return: whether it was still the same; then it is durable.
        """
        if document is None:
            return True
        version = {"version": document["version"]}
        async with self._connection.updating:
            done = await self._connection.db[SUBSCRIPTIONS].update_one(
                {"_id": key, **version}, {"$set": version}
            )
        return bool(done.matched_count)

    async def _change(
        self, key: str, document: Mapping[str, Any] | None, change: SubscriptionChange
    ) -> dict[str, bool] | None:
        """Return the choices after the change, or ``None`` if another caller changed the document
        first."""
        collection = self._connection.db[SUBSCRIPTIONS]
        at = DatetimeMS(change.at)
        seq = self._sequence(None if document is None else document.get("seq"))
        names = _named(change.workspace_id, change.subject)
        chooser = _chooser(change.workspace_id, change.subject, document)
        records = [
            {
                "groupId": group,
                "before": None if before is None else bool(before),
                "after": bool(after),
            }
            for _, _, _, _, _, group, before, after, *_ in chooser.apply(change)
        ]
        choices = {
            escape_key(group): {
                "subscribed": bool(subscribed),
                "updatedAt": DatetimeMS(updated_at),
                "changeId": change_id,
            }
            for group, (*_, subscribed, updated_at, change_id) in chooser.choices.items()
        }
        source = {
            "secret": change.secret,
            "userAgent": change.user_agent,
            "address": change.address,
        }
        record: dict[str, Any] = {
            "changeId": change.id,
            "_seq": seq,
            "at": at,
            "how": change.how,
            "records": records,
            **{name: value for name, value in source.items() if value},
        }
        version = 1 if document is None else document["version"] + 1
        fields = {"version": version, "choices": choices, "seq": seq, "pending": record}
        if document is None:
            try:
                await collection.insert_one({"_id": key, **names, **fields})
            except DuplicateKeyError:
                return None
        else:
            async with self._connection.updating:
                done = await collection.update_one(
                    {"_id": key, "version": document["version"]}, {"$set": fields}
                )
            if not done.matched_count:
                return None
        await self._copy({"_id": key, **names}, record)
        self._copied.append((key, version))
        if not records:
            # Also remembered: repeated after a later change it must not undo that one. Only the
            # latest are: anyone who has a link can send any number.
            await self._forget_idle(names)
        return chooser.state()

    async def _forget_idle(self, names: Mapping[str, Any]) -> None:
        """Remove the changes of a subject that had no effect, except the latest."""
        history = self._connection.db[HISTORY]
        idle = history.find({**names, "records": []}, {"_id": 1}).sort([("_seq", -1)])
        old = [record["_id"] async for record in idle.skip(MAX_IDLE).limit(BATCH)]
        if old:
            await history.delete_many({"_id": any_of(old)})

    async def _copy(self, document: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Store a record in the history, once."""
        workspace, subject = document["workspaceId"], subject_of(document)
        key = scoped_id(workspace, record["changeId"])
        entry = {"_id": key, **_named(workspace, subject), **record}
        codes = await self._connection.insert(HISTORY, [bson.encode(entry)])
        if codes.get(0) != DUPLICATE:
            return
        stored = await self._connection.db[HISTORY].find_one({"_id": key})
        if stored is not None and subject_of(stored) != subject:
            # Two subjects with one change id at the same moment: the history keeps both records.
            entry["_id"] = f"{key}\0{document['_id']}"
            await self._connection.insert(HISTORY, [bson.encode(entry)])

    async def erase(self, workspace_id: str, subject: Subject, pseudonym: str) -> tuple[int, int]:
        """Erase choices; see :meth:`Storage.erase_choices`."""
        if not is_text(subject.id):
            return 0, 0
        whose = _named(workspace_id, subject)
        gone = {"secret": "", "userAgent": "", "address": ""}
        with self._connection.calling() as db:
            document = await self._document(subject_id(workspace_id, subject))
            if document is not None and "pending" in document:
                await self._copy(document, document["pending"])
            records = [record async for record in db[HISTORY].find(whose, {"records": 1})]
            # The ``_id`` stays, so that the change is known if it is repeated.
            new = {PLACES[subject.kind].name: pseudonym, "erased": True}
            await self._connection.update(
                HISTORY,
                [
                    {
                        "q": {"_id": record["_id"]},
                        "u": {"$set": {**new, "changeId": str(uuid.uuid4())}, "$unset": gone},
                    }
                    for record in records
                ],
            )
            async with self._connection.updating:
                if document is not None:
                    await db[SUBSCRIPTIONS].delete_many({"_id": document["_id"]})
        return len((document or {"choices": ()})["choices"]), sum(
            len(record["records"]) for record in records
        )

    # ----------------------------------------------------------------------------- later
    @property
    def has_copied(self) -> bool:
        """Whether :meth:`remove_copied` has something to do."""
        return bool(self._copied)

    async def remove_copied(self) -> None:
        """Remove the records that are in the history from the documents of choices. To be called
        within :meth:`Connection.calling`."""
        copied, self._copied = self._copied, []
        try:
            await self._connection.update(
                SUBSCRIPTIONS,
                [
                    {"q": {"_id": key, "version": version}, "u": {"$unset": {"pending": ""}}}
                    for key, version in copied
                ],
            )
        except BaseException:
            self._copied += copied
            raise

    async def recover(self) -> None:
        """Copy the records that are not in the history because of a crash. To be called within
        :meth:`Connection.calling`."""
        collection = self._connection.db[SUBSCRIPTIONS]
        for document in await collection.find({"pending": {"$exists": True}}).to_list(None):
            await self._copy(document, document["pending"])
            self._copied.append((document["_id"], document["version"]))
        await self.remove_copied()


def _named(workspace_id: str, subject: Subject) -> dict[str, str]:
    """Return the fields that say whose a document is."""
    return {"workspaceId": workspace_id, PLACES[subject.kind].name: subject.id}


def _rows(document: _Document) -> Iterable[_Document]:
    """Return the choices of a document, each as a document."""
    return FORMS[CHOICES.name].rows(document)


def _chooser(workspace_id: str, subject: Subject, document: _Document | None) -> Chooser:
    """Return a subject with the choices of a document."""
    rows = [FORMS[CHOICES.name].row(CHOICES, part) for part in _rows(document)] if document else []
    return Chooser((workspace_id, KINDS[subject.kind], subject.id), rows)


@dataclasses.dataclass(frozen=True)
class Upgrade:
    """Brings a store of version 1 up to date, in which a choice belonged to an id, whatever it was.

    Now it belongs to the user or the visitor with the id. A kill may end the upgrade anywhere, and
    two hosts may run it at the same time: each step can be repeated, what is written follows from
    what is stored, and the document of version 1 is the last to go.
    """

    connection: Connection
    visitors: Visitors
    subscriptions: Subscriptions
    counts: Counts
    #: Completes writes that a crash cut off.
    complete: Callable[[], Awaitable[None]]

    async def run(self) -> None:
        """Give each choice to the user or the visitor."""
        await self.complete()
        await self.visitors.forget_vouched()
        kinds_by_id, unsure = _Kinds(set), set()
        async for workspace, part in self._parts("userId", kinds_by_id):
            for choices in part:
                kinds = kinds_by_id[key := (workspace, choices["userId"])]
                if Kind.USER not in kinds or (Kind.VISITOR not in kinds and _unsubscribed(choices)):
                    unsure.add(key)
        if unsure:
            await self._look_in_events(unsure, kinds_by_id)
        async for workspace, part in self._parts("userId"):
            kinds_of = [(choices, kinds_by_id[workspace, choices["userId"]]) for choices in part]
            await self._move([choices for choices, kinds in kinds_of if kinds == {Kind.VISITOR}])
            await self._unsubscribe(
                (Subject(Kind.VISITOR, choices["userId"]), choices)
                for choices, kinds in kinds_of
                if len(kinds) != 1
            )
        async for workspace, part in self._parts("anonymousId"):
            left = {choices["anonymousId"]: choices for choices in part if _unsubscribed(choices)}
            with self.connection.calling(scan=True):
                owners = await self.visitors.owners(workspace, left)
            await self._unsubscribe(
                (Subject(Kind.USER, user), left[name]) for name, user in owners.items()
            )

    async def lost(self) -> int:
        """Return how many subscriptions of visitors no longer count for their users after it."""
        kinds, count = _Kinds(set), 0
        async for workspace, part in self._parts("userId", kinds):
            names = [choices["userId"] for choices in part]
            names = [name for name in names if Kind.USER not in kinds[workspace, name]]
            with self.connection.calling(scan=True):
                owners = await self.visitors.owners(workspace, names)
                people = await self.visitors.visitors_of(workspace, owners.values())
                for name, user in owners.items():
                    keys = [scoped_id(workspace, person) for person in (user, *people[user])]
                    latest: dict[str, tuple[Any, ...]] = {}
                    for whose in await self.connection.read(SUBSCRIPTIONS, keys):
                        for row in _rows(whose):
                            group = row["groupId"]
                            version = (int(row["updatedAt"]), row["changeId"])
                            choice = (*version, whose["userId"], row["subscribed"])
                            latest[group] = max(choice, latest.get(group, choice))
                    count += sum(choice[2:] == (name, True) for choice in latest.values())
        return count

    async def fence(self) -> None:
        """Keep processes of older versions from opening the store.

        :raises StorageUnavailable: also while processes of another version use it.
        """
        await self._refuse_others()
        with self.connection.calling() as db:
            earlier = {"_id": "schema", "version": {"$lt": VERSION}}
            fence = {"minReader": VERSION, "engage": ENGAGE_VERSION}
            await db[META].update_one(earlier, {"$set": fence})

    async def _refuse_others(self) -> None:
        now = time.time_ns() // 1_000_000
        since, until = now - _ALIVE, now + _ALIVE
        up = await self.counts.sums(60, since=since, until=until, names=("up",), limit=BATCH)
        others = {total.labels[0]: total.processes for total in up.items}
        others.pop(ENGAGE_VERSION, None)
        if others:
            text = ", ".join(f"{count} of engage {name}" for name, count in sorted(others.items()))
            raise StorageUnavailable(
                f"{self.connection.name}: processes of another version use this store ({text}); "
                f"stop all of them: engage brings it up to date {_ALIVE // 1000} seconds later"
            )

    async def _parts(
        self, name: str, kinds: _Kinds | None = None
    ) -> AsyncIterator[tuple[str, list[_Document]]]:
        """Read the choices that have a field, in parts of one workspace, unless another process has
        completed the upgrade meanwhile.

        :param known: gets what profiles and links tell.
        """
        after: str | None = ""
        while after is not None:
            query = {"_id": {"$gt": after}, name: {"$exists": True}}
            with self.connection.calling(scan=True) as db:
                schema = await db[META].find_one({"_id": "schema"})
                cursor = db[SUBSCRIPTIONS].find(query).sort([("_id", 1)]).limit(STEP)
                page = await cursor.to_list(None)
            if schema["version"] >= OWN_CHOICES:
                return
            for workspace, part in parts(page):
                if kinds is not None:
                    await self._look(workspace, {row["_id"]: row[name] for row in part}, kinds)
                yield workspace, part
            after = page[-1]["_id"] if len(page) == STEP else None

    async def _look(self, workspace: str, names: Mapping[str, str], kinds: _Kinds) -> None:
        ids = {name: name for name in names.values()}
        with self.connection.calling(scan=True) as db:
            for kind, collection, by, of, query in (
                (Kind.USER, USERS, "_id", names, {"createdAt": {"$exists": True}}),
                (Kind.USER, LINKS, "user", names, {}),
                (Kind.VISITOR, VISITORS, "_id", names, {}),
                (Kind.VISITOR, LINKS, "anonymousId", ids, {"workspaceId": workspace}),
            ):
                # One by one: an anonymous id may have very many users.
                async for document in db[collection].find({**query, by: {"$in": [*of]}}, {by: 1}):
                    kinds[workspace, of[document[by]]].add(kind)

    async def _look_in_events(self, unsure: set[tuple[str, str]], kinds: _Kinds) -> None:
        fields = {"_id": 0, "workspaceId": 1, "userId": 1, "anonymousId": 1}
        with self.connection.calling(seconds=_SCAN_SECONDS) as db:
            cursor = db[EVENTS].find({}, fields).batch_size(BATCH)
            while page := await cursor.to_list(BATCH):
                for event in page:
                    for kind in (Kind.USER, Kind.VISITOR):
                        if (key := (event["workspaceId"], event.get(PLACES[kind].name))) in unsure:
                            kinds[key].add(kind)

    async def _move(self, moved: Sequence[_Document]) -> None:
        """Give choices, with their history, to visitors."""
        if not moved:
            return
        histories, made = [], []
        for document in moved:
            workspace, name = document["workspaceId"], document["userId"]
            # A later change would be that of a process that has completed the upgrade.
            until = {"$lte": document.get("seq", ObjectId("f" * 24))}
            query = {"workspaceId": workspace, "userId": name, "_seq": until}
            update = {"$set": {"anonymousId": name}, "$unset": {"userId": ""}}
            histories.append({"q": query, "u": update, "multi": True})
            key = subject_id(workspace, Subject(Kind.VISITOR, name))
            rest = {field: value for field, value in document.items() if field != "userId"}
            made.append(bson.encode({**rest, "_id": key, "anonymousId": name}))
        ids = {"$in": [document["_id"] for document in moved]}
        same = [{"_id": document["_id"], "seq": document.get("seq")} for document in moved]
        with self.connection.calling(scan=True) as db:
            await self.connection.update(HISTORY, histories)
            # Some may be there, from a run that was cut off.
            await self.connection.insert(SUBSCRIPTIONS, made)
            await db[USERS].delete_many({"_id": ids, "createdAt": {"$exists": False}})
            await db[SUBSCRIPTIONS].delete_many({"$or": same})

    async def _unsubscribe(self, copied: Iterable[tuple[Subject, _Document]]) -> None:
        """Apply the unsubscriptions of documents to others, with their times."""
        changes = []
        for subject, document in copied:
            fields: Any = {"workspace_id": document["workspaceId"], "dated": True, "how": "upgrade"}
            for group, at in _unsubscribed(document).items():
                # The same whoever makes it, and how often.
                name = uuid.uuid5(uuid.NAMESPACE_OID, repr((subject, document["_id"], group, at)))
                fields |= {"id": f"{_PREFIX}{name}", "at": at, "choices": {group: False}}
                changes.append(SubscriptionChange(subject=subject, **fields))
        await apply_all(self.subscriptions.apply, changes)
        with self.connection.calling():
            await self.subscriptions.remove_copied()


def _unsubscribed(document: _Document) -> dict[str, int]:
    """Return the times of the choices that are unsubscriptions, by group; without those that the
    upgrade has applied to a user, because these were never choices of the id."""
    return {
        choice["groupId"]: int(choice["updatedAt"])
        for choice in _rows(document)
        if not choice["subscribed"]
        and not ("userId" in document and choice["changeId"].startswith(_PREFIX))
    }
