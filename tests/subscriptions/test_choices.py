# SPDX-License-Identifier: Apache-2.0
"""Subscription changes: the credentials that they need, and what they change."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import hashlib
import hmac
from typing import Any
from urllib.parse import urlencode

import orjson
import pytest

from engage.api import MAX_USERS, Kind, Page, StorageUnavailable, Subject
from engage.config import SubscriptionGroup
from engage.errors import ApiError
from engage.store.facade import Storage
from engage.store.suppressions import hashed_address
from engage.subscriptions.choices import Source
from engage.subscriptions.links import STEP, subscription_hash
from engage.testing.factories import suppression
from support.each import each
from support.memory_store import MemoryStore, suppressions_of
from support.pipeline import ACME, NOW, SECRET, error_of, make_core, turns

pytestmark = pytest.mark.virtual_time

W = "11111111-1111-4111-8111-111111111111"
#: More users than several steps of a search compare.
MANY = 3_000


def test_the_hash_is_that_of_dittofeed() -> None:
    key = "00112233aabbccdd"
    assert (
        subscription_hash(
            key,
            subject=Subject(Kind.USER, "user-1"),
            workspace_id=W,
            identifier="a@b.co",
            identifier_key="email",
        )
        == "a5ec1e5a924357ab9960d4e33c609245b6fde83483702d528a3a6e53c66b3a06"
    )
    assert (
        subscription_hash(
            key,
            subject=Subject(Kind.USER, 'ü"1'),
            workspace_id=W,
            identifier="é\n@b.co",
            identifier_key="email",
        )
        == "7f6e636e41113fe81fb4b2f32649226d7f90432d8b5a15339b377cedd8b05714"
    )


def body(
    changes: dict[str, bool] | None = None,
    *,
    user: str = "u-1",
    visitor: str | None = None,
    secret: str = SECRET,
    **fields: Any,
) -> dict[str, Any]:
    """Return a change with a valid hash: of a user, or of a visitor."""
    values: dict[str, Any] = {
        "workspaceId": "acme",
        "identifier": "Ada@Example.com",
        "identifierKey": "email",
        "changes": {"news": False} if changes is None else changes,
        **fields,
    }
    values.setdefault(
        "hash",
        subscription_hash(
            secret,
            subject=Subject(Kind.USER, user) if visitor is None else Subject(Kind.VISITOR, visitor),
            workspace_id=values["workspaceId"],
            identifier=values["identifier"],
            identifier_key=values["identifierKey"],
        ),
    )
    return values


def store_with_users(*users: str) -> MemoryStore:
    store = MemoryStore()
    store.users["acme", "email", "ada@example.com"] = list(users or ["u-1"])
    return store


async def put(store: MemoryStore, value: Any, **options: Any) -> Any:
    core = make_core(store, **options)
    return await core.pipeline.subscriptions(orjson.dumps(value))


def users_of(store: MemoryStore) -> list[str]:
    """Return the ids of the users who were changed; each unsubscription is also a visitor's."""
    return [change.subject.id for change in store.changes if change.subject.kind is Kind.USER]


async def refused(store: MemoryStore, value: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await put(store, value)
    assert store.changes == []
    return caught.value


async def test_a_change_answers_with_all_groups() -> None:
    store = store_with_users()
    assert await put(store, body({})) == {"news": True, "offers": False}
    assert store.changes == []
    assert await put(store, body({"news": False})) == {"news": False, "offers": False}
    assert await put(store, body({"offers": True})) == {"news": False, "offers": True}
    change = store.changes[0]
    assert (change.workspace_id, *change.subject) == ("acme", Kind.USER, "u-1")
    assert change.choices == {"news": False}
    assert (change.at, change.how) == (NOW, "api")
    assert store.searches[0] == ("acme", "email", ["ada@example.com"])


async def test_the_hash_chooses_among_several_users() -> None:
    store = store_with_users("u-0", "u-1", "u-2")
    await put(store, body(user="u-1"))
    assert users_of(store) == ["u-1"]


@each("count", [1, 101, 600, 5_101])
async def test_every_user_with_the_address_is_tried(count: int) -> None:
    """Anyone with a public write key can make users with the address of another person. The link of
    that person must work all the same, wherever it is among them."""
    users = [f"u-{number}" for number in range(count)]
    store = store_with_users(*users)
    for number in {0, count // 2, count - 1}:
        await put(store, body(user=f"u-{number}"))
        assert users_of(store)[-1] == f"u-{number}"
    del store.changes[:]
    assert (await refused(store, body(user=f"u-{count}"))).code == "invalid_user_hash"


async def test_a_user_may_have_the_address_by_a_visitor() -> None:
    class Merged(MemoryStore):
        async def holders(self, *_: Any, **options: Any) -> Page[Subject]:
            return Page([Subject(Kind.VISITOR, "visitor")], None)

    store = Merged()
    store.users["acme", "email", "ada@example.com"] = ["u-1"]
    await put(store, body(user="u-1"))
    assert users_of(store) == ["u-1"]
    del store.changes[:]
    assert (await refused(store, body(user="u-2"))).code == "invalid_user_hash"


class Held(MemoryStore):
    """A store in which a user and a visitor have one address."""

    async def holders(self, *_: Any, **options: Any) -> Page[Subject]:
        subjects = [Subject(Kind.USER, "both"), Subject(Kind.VISITOR, "both")]
        return Page([*subjects, Subject(Kind.VISITOR, "anon")], None)


async def test_a_link_names_a_visitor() -> None:
    """By its anonymous id, by an address and ``v``, or by an address and the id."""
    by_id = {"identifierKey": "anonymousId", "identifier": "both"}
    for fields in (by_id, {"v": True}, {"anonymousId": "both"}, {"v": True, "anonymousId": "both"}):
        store = Held()
        given = body({"news": False, "offers": True}, visitor="both", **fields)
        assert await put(store, given) == {"news": False, "offers": True}
        (change,) = store.changes
        assert change.subject == Subject(Kind.VISITOR, "both")
        # Nothing of the user with this id, which the other link shows.
        by_user = body({}, user="both", identifierKey="id", identifier="both")
        assert await put(store, by_user) == {"news": True, "offers": False}
    for fields in (
        {"identifierKey": "anonymousId", "identifier": "both", "hash": body()["hash"]},
        {"identifierKey": "id", "identifier": "both", "anonymousId": "both"},
        {"v": True, "user": "both"},
        {"v": False, "visitor": "both"},
        {"visitor": "both"},
        {"anonymousId": "both", "user": "both"},
        {"userId": "both", "visitor": "both"},
    ):
        assert (await refused(Held(), body(**fields))).code == "invalid_user_hash"


async def test_a_visitor_may_have_an_integer_as_its_id() -> None:
    store = MemoryStore()
    await put(store, body(visitor="7", anonymousId=7))
    assert store.changes[0].subject == Subject(Kind.VISITOR, "7")
    error = await refused(MemoryStore(), body(anonymousId=7.0))
    assert error.errors[0].pointer == "/anonymousId"


async def test_a_user_unsubscribes_the_visitor_with_the_same_id_too() -> None:
    """Earlier versions signed anonymous ids as user ids: the link may be a visitor's."""
    store = MemoryStore()
    link = {"identifierKey": "id", "identifier": "both"}
    assert await put(store, body({"news": False, "offers": True}, user="both", **link)) == {
        "news": False,
        "offers": True,
    }
    assert [(change.subject, change.choices) for change in store.changes] == [
        (Subject(Kind.USER, "both"), {"news": False, "offers": True}),
        (Subject(Kind.VISITOR, "both"), {"news": False}),
    ]
    await put(store, body({"news": True}, user="both", **link))
    assert await store.state("acme", Subject(Kind.VISITOR, "both")) == {"news": False}


async def test_a_link_from_before_that_only_a_visitor_fits_unsubscribes() -> None:
    store = Held()
    assert await put(store, body({"news": False}, user="anon")) == {"news": False}
    assert [change.subject for change in store.changes] == [Subject(Kind.VISITOR, "anon")]
    for changes in ({}, {"offers": True}):
        assert (await refused(Held(), body(changes, user="anon"))).code == "link_expired"
    # One that fits a user is the user's.
    await put(store, body({"news": False}, user="both"))
    assert [change.subject for change in store.changes[1:]] == [
        Subject(Kind.USER, "both"),
        Subject(Kind.VISITOR, "both"),
    ]


async def test_a_storage_without_holders_tries_the_users_that_it_finds() -> None:
    class Default(MemoryStore):
        holders = Storage.holders

    store = Default()
    store.users["acme", "email", "ada@example.com"] = [f"u-{number}" for number in range(100)]
    await put(store, body(user="u-99"))
    assert users_of(store) == ["u-99"]
    del store.changes[:]
    assert (await refused(store, body(user="u-100"))).code == "invalid_user_hash"


class Digests:
    """Counts the hashes that are computed, also in each turn of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total = self._turn = self.most = 0
        new = hmac.new

        def counting(*arguments: Any) -> Any:
            self.total += 1
            self._turn += 1
            self.most = max(self.most, self._turn)
            return new(*arguments)

        monkeypatch.setattr("engage.subscriptions.links.hmac.new", counting)
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._turn = 0
        self._loop.call_soon(self._next)


async def test_the_event_loop_is_not_held_by_many_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by several requests with a wrong hash at once: they take turns."""
    core = make_core(store_with_users(*(f"u-{number}" for number in range(MANY))))
    forms = ["ada@example.com", "Ada@Example.com", " ada@example.com"]
    wrong = [orjson.dumps(body(hash="0" * 64, identifier=form)) for form in forms for _ in range(8)]
    digests = Digests(monkeypatch)
    calls = [core.pipeline.subscriptions(one) for one in wrong]
    await asyncio.gather(*calls, return_exceptions=True)
    # A page of each kind of form, and what each request computes at once.
    assert digests.most <= len(ACME.subscription_secrets) * (2 * STEP + len(wrong))


async def test_a_search_that_takes_too_long_is_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not a 401: the link may be right."""
    monkeypatch.setattr("engage.subscriptions.links.SEARCH_SECONDS", -1.0)
    store = store_with_users(*(f"u-{number}" for number in range(6_000)))
    with pytest.raises(ApiError, match="in time") as caught:
        await put(store, body(user="u-5999"))
    assert (caught.value.status, caught.value.code) == (503, "overloaded")


async def test_wrong_hashes_do_not_delay_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their requests share the search, so its cost does not depend on their number."""
    core = make_core(store_with_users(*(f"u-{number}" for number in range(MANY))))
    wrong = [orjson.dumps(body(hash=f"{number:064x}")) for number in range(200)]
    link = orjson.dumps(body(user=f"u-{MANY - 1}"))
    digests = Digests(monkeypatch)
    requests = [asyncio.create_task(core.pipeline.subscriptions(one)) for one in wrong]
    await turns()
    assert await core.pipeline.subscriptions(link) == {"news": False, "offers": False}
    # At most the search that had begun, its own, and one hash of each request.
    assert digests.total <= len(ACME.subscription_secrets) * (2 * (MANY + MAX_USERS) + 201)
    for answer in await asyncio.gather(*requests, return_exceptions=True):
        assert isinstance(answer, ApiError)
        assert answer.code == "invalid_user_hash"


async def test_identifiers_take_turns() -> None:
    """The form as sent counts, because it is what the hash contains."""
    store = store_with_users(*(f"u-{number}" for number in range(2 * MANY)))
    store.users["acme", "email", "bob@example.com"] = [f"b-{number}" for number in range(1_000)]
    core = make_core(store)
    others = [body(identifier=f"{' ' * number}ada@example.com", user="-") for number in range(5)]
    requests = [
        asyncio.create_task(core.pipeline.subscriptions(orjson.dumps(other))) for other in others
    ]
    await turns()
    bob = body(identifier="bob@example.com", user="b-999")
    await core.pipeline.subscriptions(orjson.dumps(bob))
    assert not any(task.done() for task in requests)
    ada = body(identifier="Ada@Example.com", user=f"u-{2 * MANY - 1}")
    await core.pipeline.subscriptions(orjson.dumps(ada))
    assert users_of(store) == ["b-999", f"u-{2 * MANY - 1}"]
    answers = await asyncio.gather(*requests, return_exceptions=True)
    assert {type(answer) for answer in answers} == {ApiError}


async def test_many_forms_of_an_identifier_do_not_delay_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each form needs a separate search, because its hashes differ. So does each expiry."""
    core = make_core(store_with_users(*(f"u-{number}" for number in range(MANY))))
    odd = [body(identifier=f"{' ' * number}ada@example.com", user="-") for number in range(1, 51)]
    odd += [body(identifier="ada@example.com", user="-", expires=one) for one in range(1, 51)]
    requests = [asyncio.create_task(core.pipeline.subscriptions(orjson.dumps(one))) for one in odd]
    await turns()
    plain = body(identifier="ada@example.com", user=f"u-{MANY - 1}")
    digests = Digests(monkeypatch)
    await core.pipeline.subscriptions(orjson.dumps(plain))
    # The odd forms together have as many turns as the plain one.
    assert digests.total <= len(ACME.subscription_secrets) * (2 * MANY + 4 * STEP)
    for task in requests:
        task.cancel()
    await asyncio.wait(requests)


async def test_a_search_ends_with_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(store_with_users(*(f"u-{number}" for number in range(MANY))))
    wrong = orjson.dumps(body(hash="0" * 64))
    right = orjson.dumps(body(user=f"u-{MANY - 1}"))
    digests = Digests(monkeypatch)
    requests = [asyncio.create_task(core.pipeline.subscriptions(wrong)) for _ in range(3)]
    while digests.total < 1_000:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for task in requests:
        task.cancel()
    await asyncio.wait(requests)
    begun = digests.total
    for _ in range(100):
        await asyncio.sleep(0)
    assert digests.total == begun
    assert begun < MANY
    await core.pipeline.subscriptions(right)


async def test_a_user_named_by_id_is_not_looked_up() -> None:
    store = MemoryStore()
    await put(store, body(user="u-1", identifierKey="id", identifier="u-1"))
    await put(store, body(user="u-2", userId="u-2"))
    await put(store, body(user="7", userId=7))
    assert users_of(store) == ["u-1", "u-2", "7"]
    assert store.searches == []
    assert (await refused(MemoryStore(), body(user="u-1", userId="u-2"))).status == 401


@pytest.mark.parametrize(
    "wrong",
    [
        *({"hash": "0" * 64}, {"hash": "é"}, {"hash": body()["hash"].upper()}),
        {"workspaceId": "nope"},
        {"workspaceId": "other"},  # that workspace has no secret
        *({"identifierKey": "name"}, {"identifier": "bob@example.com"}, {"identifier": "   "}),
        *({"identifierKey": "phone"}, {"hash": "0" * 64, "changes": {"nope": True}}),
    ],
)
async def test_every_wrong_credential_has_the_same_answer(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = body(**wrong)
    digests = Digests(monkeypatch)
    error = await refused(store_with_users(), value)
    assert (error.status, error.code) == (401, "invalid_user_hash")
    assert error.message == "the hash belongs to no known user"
    assert "WWW-Authenticate" not in error.headers
    assert digests.total >= 1


async def test_a_link_by_an_id_names_nobody_of_the_other_kind() -> None:
    """A user and a visitor with the same id sign the same members."""
    store = store_with_users()
    for key, other, visitor in (("id", "anonymousId", None), ("anonymousId", "userId", "x")):
        signed = body(identifier="x", identifierKey=key, user="x", visitor=visitor)
        error = await refused(store, {**signed, other: "x"})
        assert (error.status, error.code) == (401, "invalid_user_hash")


async def test_an_empty_id_is_none() -> None:
    store = store_with_users()
    await put(store, body(userId="", anonymousId=""))
    assert users_of(store) == ["u-1"]


async def test_an_undeclared_identifier_is_not_looked_up() -> None:
    store = MemoryStore()
    store.users["acme", "name", "Ada"] = ["u-1"]
    with_user: list[dict[str, Any]] = [{}, {"userId": "u-1"}]
    for more in with_user:
        error = await refused(store, body(identifierKey="name", identifier="Ada", **more))
        assert error.status == 401
    assert store.searches == []


@each("user_id", [1.0, 1.5, True, " ", [], {}])
async def test_a_value_that_is_not_an_id_is_invalid(user_id: Any) -> None:
    error = await refused(store_with_users(), body(userId=user_id))
    assert (error.status, error.code) == (400, "invalid_payload")
    assert [problem.pointer for problem in error.errors] == ["/userId"]


async def test_the_hash_of_an_unknown_user_is_refused() -> None:
    """The hash that is computed without a user or a secret must not verify."""
    for secret, workspace in ((SECRET, "acme"), ("-", "other"), ("-", "nope")):
        value = body(user="", secret=secret, workspaceId=workspace, identifier="nobody@b.c")
        assert (await refused(store_with_users(), value)).status == 401


async def test_unknown_groups_are_named_and_nothing_changes() -> None:
    error = await refused(store_with_users(), body({"news": False, "no/pe": True, "x": True}))
    assert (error.status, error.code) == (400, "unknown_subscription_group")
    assert [problem.pointer for problem in error.errors] == ["/changes/no~1pe", "/changes/x"]


@pytest.mark.parametrize("changed", [{"changes": {"news": "true"}}, {"hash": None}])
async def test_a_change_against_the_schema_is_refused(changed: dict[str, Any]) -> None:
    error = await refused(store_with_users(), {**body(), **changed})
    assert (error.status, error.code) == (400, "invalid_payload")


async def test_a_body_that_is_not_json_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        await make_core().pipeline.subscriptions(b"a=b")
    assert caught.value.code == "invalid_json"


def form_of(value: dict[str, Any], **more: str) -> dict[str, str]:
    """Return the fields of a form for a body."""
    fields = {name: text for name, text in value.items() if name != "changes"}
    changes = {f"changes[{group}]": str(on).lower() for group, on in value["changes"].items()}
    return {**fields, **changes, **more}


@pytest.mark.parametrize("words", [("true", "false"), ("1", "0")])
async def test_a_form_is_the_same_as_json(words: tuple[str, str]) -> None:
    for gzipped in (False, True):
        store = store_with_users()
        value = form_of(body({}), messageId="m", more="é", empty="")
        choices = {"changes[news]": words[0], "changes[offers]": words[1]}
        raw = f"{urlencode({**value, **choices})}&&novalue".encode()
        core = make_core(store)
        if gzipped:
            state = await core.pipeline.subscriptions(gzip.compress(raw), "gzip", form=True)
        else:
            state = await core.pipeline.subscriptions(raw, form=True)
        assert state == {"news": True, "offers": False}
        # The same request in JSON has the same message id, and is a repeat.
        await put(store, body({"news": True, "offers": False}, messageId="m"))
        assert len(users_of(store)) == 1


@each("before", ["", " \r\n", "\ufeff"])
async def test_json_may_have_the_content_type_of_a_form(before: str) -> None:
    """As from ``curl -d``."""
    store = store_with_users()
    raw = before.encode() + orjson.dumps(body({"news": True}))
    state = await make_core(store).pipeline.subscriptions(raw, form=True)
    assert state["news"] is True


@each(
    "more, message",
    [
        ("changes[news]=true", "changes[news]: is in the form more than once"),
        ("changes%5Bnews%5D=false", "changes[news]: is in the form more than once"),
        ("identifier=eve%40example.com", "identifier: is in the form more than once"),
        *(("=x", "a field of the form has no name"), ("=", "a field of the form has no name")),
        ("changes[offers]=on", 'changes[offers]: must be true, false, 1 or 0, not "on"'),
        ("changes[offers]=TRUE", 'changes[offers]: must be true, false, 1 or 0, not "TRUE"'),
        ("changes[offers]=true%00", "changes[offers]: must be true, false"),
        ("changes[offers]", 'changes[offers]: must be true, false, 1 or 0, not ""'),
        ("changes[offers=true", "changes[offers: must be changes[<group>]"),
        ("changes[]=true", "changes[]: must be changes[<group>]"),
        ("changes[a][b]=true", "changes[a][b]: must be changes[<group>]"),
        ("changes[a]b=true", "changes[a]b: must be changes[<group>]"),
        ("changes=true", "changes: must be changes[<group>]"),
        ("changes.offers=true", "changes.offers: must be changes[<group>]"),
        ("x=%zz", "a % is not followed by two hex digits"),
        *(("x=%", "a % is not followed by two hex digits"), ("%E9=x", "the body is not UTF-8")),
        ("&".join(f"x{n}=" for n in range(1000)), "too many fields"),
        ("userId=" + "u" * 513, "userId: is too long"),
    ],
)
async def test_a_wrong_form_is_refused_and_nothing_changes(more: str, message: str) -> None:
    store = store_with_users()
    raw = f"{urlencode(form_of(body({'news': True})))}&{more}".encode()
    with pytest.raises(ApiError) as caught:
        await make_core(store).pipeline.subscriptions(raw, form=True)
    assert (caught.value.status, caught.value.code) == (400, "invalid_payload")
    assert message in caught.value.message
    assert len(caught.value.message) < 200
    assert store.changes == []


async def test_a_form_without_a_change_is_refused() -> None:
    """A browser sends nothing for a box that is not ticked: no choice may be made of that."""
    for raw in (b"", b"a", urlencode(form_of(body({}))).encode()):
        with pytest.raises(ApiError) as caught:
            await make_core(store_with_users()).pipeline.subscriptions(raw, form=True)
        assert "/changes" in [problem.pointer for problem in caught.value.errors]


async def test_a_repeat_changes_nothing() -> None:
    store = store_with_users("u-1", "u-2")
    await put(store, body({"news": False}, messageId="m"))
    await put(store, body({"news": True}, messageId="n"))
    assert (await put(store, body({"news": False}, messageId="m")))["news"] is True
    assert len(users_of(store)) == 2
    # Changes of another user or to other groups under the same id are applied.
    await put(store, body({"news": False}, messageId="m", user="u-2"))
    await put(store, body({"offers": True}, messageId="m"))
    assert len(users_of(store)) == 4


# ------------------------------------------------------------------------------- the history
@pytest.mark.parametrize("keep", [False, True])
async def test_the_history_has_the_source_of_a_change(keep: bool) -> None:
    store = store_with_users()
    core = make_core(store, workspace=dataclasses.replace(ACME, keep_addresses=keep))
    for length, secret in ((256, SECRET), (257, "an older one")):
        source = Source(how="page", user_agent="x" * length, address="192.0.2.1")
        value = body({"news": length > 256}, secret=secret)
        await core.pipeline.subscriptions(orjson.dumps(value), source=source)
    first, _, second = store.changes
    assert first.how == second.how == "page"
    assert first.user_agent == second.user_agent == "x" * 256
    assert first.address == second.address == ("192.0.2.1" if keep else "")
    assert first.secret == hashlib.sha256(SECRET.encode()).hexdigest()[:8]
    assert second.secret == hashlib.sha256(b"an older one").hexdigest()[:8]


async def test_a_day_has_so_many_new_subscriptions() -> None:
    store, now = store_with_users("u-1", "u-2"), [NOW]
    core = make_core(store, clock=lambda: now[0], resubscriptions_per_day=3)

    async def choose(changes: dict[str, bool], **fields: Any) -> Any:
        now[0] += 1000
        return await core.pipeline.subscriptions(orjson.dumps(body(changes, **fields)))

    # The first choice is no new subscription, and one change of two groups is one.
    await choose({"news": True, "offers": True})
    for number in range(3):
        await choose({"news": False, "offers": False})
        await choose({"news": True, "offers": True}, messageId=f"m{number}")
    # A choice that holds, and the same request again.
    assert (await choose({"news": True}))["news"] is True
    assert (await choose({"news": True, "offers": True}, messageId="m2"))["offers"] is True
    assert (await choose({"news": False}))["news"] is False
    error = await error_of(choose({"news": True}))
    assert (error.status, error.code) == (429, "rate_limited")
    # Unsubscribing is never refused, a mixed change is, and another user is not.
    await choose({"offers": False})
    assert (await error_of(choose({"news": True, "offers": False}))).status == 429
    await choose({"news": False}, user="u-2")
    await choose({"news": True}, user="u-2")
    # The first of the three was 24 hours ago.
    again = (await error_of(choose({"news": True}))).headers["Retry-After"]
    now[0] += int(again) * 1000 - 2000
    assert (await error_of(choose({"news": True}))).status == 429
    assert (await choose({"news": True}))["news"] is True
    assert (await error_of(choose({"offers": True}))).status == 429


@pytest.mark.parametrize("message_id", [None, ""])
async def test_changes_without_a_message_id_are_all_applied(message_id: str | None) -> None:
    store = store_with_users()
    for _ in range(2):
        await put(store, body(messageId=message_id))
    assert len({change.id for change in store.changes}) == 4


async def test_a_storage_that_does_not_answer_is_unavailable() -> None:
    class Slow(MemoryStore):
        async def holders(self, *arguments: Any, **options: Any) -> Any:
            await asyncio.Event().wait()

    class SlowToApply(MemoryStore):
        async def apply_all(self, changes: Any) -> Any:
            await asyncio.Event().wait()

    with pytest.raises(StorageUnavailable):
        await put(Slow(), body(), write_timeout=0.05)
    with pytest.raises(StorageUnavailable):
        await put(SlowToApply(), body(userId="u-1"), write_timeout=0.05)


# ------------------------------------------------------------------------- objections of an address
def objections(store: MemoryStore) -> dict[str, bool]:
    """Return group → whether the objection of ada@example.com is lifted."""
    return {
        one.group_id: one.lifted
        for one in suppressions_of(store)
        if (one.channel, one.address, one.reason) == ("email", "ada@example.com", "objection")
    }


async def test_an_unsubscription_by_an_address_is_an_objection_of_the_address() -> None:
    store = store_with_users()
    await put(store, body({"news": True}, identifier=" ADA@example.com"))
    assert objections(store) == {}
    await put(store, body({"news": False}, messageId="m"))
    await put(store, body({"offers": False}))
    assert objections(store) == {"news": False, "offers": False}
    # What a provider reported stays.
    at = NOW + 5
    reports = [suppression("ada@example.com", reason=r, at=at) for r in ("complaint", "objection")]
    await store.suppress([dataclasses.replace(report, group_id="news") for report in reports])
    await put(store, body({"news": True}))
    assert objections(store) == {"news": True, "offers": False}
    wanted = [("email", "ada@example.com")]
    assert {one.reason for one in await store.suppressions("acme", wanted)} == {
        *("complaint", "objection")
    }
    # The unsubscription is repeated late: it was undone.
    repeated = body({"news": False}, messageId="m")
    assert (await put(store, repeated, clock=lambda: 9 * NOW))["news"] is True
    assert objections(store) == {"news": True, "offers": False}


async def test_an_objection_is_of_the_channels_that_send_to_such_an_address() -> None:
    store = store_with_users()
    store.users["acme", "phone", "+491"] = ["u-1"]
    channels = ("sms", "whatsapp", "email", "push")
    groups = [
        SubscriptionGroup(id=f"by-{channel}", name="", channel=channel, type="opt_out")
        for channel in channels
    ]
    workspace = dataclasses.replace(ACME, subscription_groups=tuple(groups))
    phone: Any = {"identifier": "+49 1", "identifierKey": "phone"}
    core = make_core(store, workspace=workspace)
    for how, on in (("page", False), ("api", True)):
        change = body({group.id: on for group in groups}, **phone)
        await core.pipeline.subscriptions(orjson.dumps(change), source=Source(how=how))
        assert {
            (one.channel, one.address, one.group_id, one.how, one.lifted)
            for one in suppressions_of(store)
        } == {
            ("sms", "+491", "by-sms", how, on),
            ("whatsapp", "+491", "by-whatsapp", how, on),
        }
        times = {one.at for one in suppressions_of(store)}
        assert times == {NOW + on}


@each("fields", [{"identifierKey": "id", "identifier": "u-1"}, {"identifierKey": "phone"}])
async def test_a_link_by_no_address_of_the_channel_is_no_objection(fields: dict[str, str]) -> None:
    store = store_with_users()
    store.users["acme", "phone", "+491"] = ["u-1"]
    given = {"identifier": "+49 1", **fields}
    await put(store, body({"news": False}, **given))
    assert suppressions_of(store) == []


async def test_a_visitor_objects_for_its_address() -> None:
    store = Held()
    await put(store, body({"news": False}, visitor="anon", v=True))
    assert objections(store) == {"news": False}
    # A link from before that only a visitor fits, too.
    store = Held()
    await put(store, body({"news": False}, user="anon"))
    assert objections(store) == {"news": False}


async def test_the_address_of_an_erased_person_is_found_by_its_hash() -> None:
    """A link by the address shows what is suppressed, and lifts the objection."""
    store = store_with_users()
    hashed = hashed_address("k" * 32, "acme", "email", "ada@example.com")
    for reason in ("complaint", "objection"):
        one = suppression(hashed, reason=reason, group_id="news")
        await store.suppress([dataclasses.replace(one, at=NOW - 9)])
    for key, found in (("k" * 32, ["complaint", "objection"]), (None, [])):
        core = make_core(store, erasures_key=key)
        person = await core.pipeline.person(body({}))
        shown = (await core.pipeline.preferences(person)).suppressions
        assert sorted(one.reason for one in shown) == found
    core = make_core(store, erasures_key="k" * 32)
    await core.pipeline.subscriptions(orjson.dumps(body({"news": True})))
    shown = (await core.pipeline.preferences(person)).suppressions
    assert [one.reason for one in shown] == ["complaint"]


async def test_a_repeat_after_an_erasure_changes_nothing() -> None:
    """The storage still knows the change, and has no choice."""
    store = store_with_users()
    await put(store, body({"news": False}, messageId="m"))
    await store.erase_choices("acme", Subject(Kind.USER, "u-1"), "erased-1")
    assert (await put(store, body({"news": False}, messageId="m")))["news"] is True
    assert await store.state("acme", Subject(Kind.USER, "u-1")) == {}
