# SPDX-License-Identifier: Apache-2.0
"""What the reports of providers change: choices of users, and suppressed addresses."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.api import (
    Kind,
    OptOut,
    PayloadInvalid,
    Recipient,
    StorageUnavailable,
    Subject,
    SubscriptionChange,
    Suppression,
    TranslatedEvent,
    WebhookRequest,
)
from engage.config import SubscriptionGroup, Unsubscribes, Workspace
from engage.monitoring.metrics import Metrics
from engage.subscriptions.opt_outs import Effects, effects
from support.memory_log import MemoryBroker
from support.provider_http import PUBLIC_URL, deliver, public
from support.providers import mandrill_delivery, request, twilio_delivery
from support.server_inprocess import Serving, Valve, serving

KEY, TOKEN = "mandrill-key", "twilio-token"
GROUPS = "".join(
    f'[[workspaces.subscription_groups]]\nid = "{group}"\nchannel = "{channel}"\ntype = "opt_out"\n'
    for group, channel in (("news", "email"), ("offers", "email"), ("alerts", "sms"))
)
WEBHOOKS = f"""
[workspaces.webhooks.mailchimp]
webhook_key = "{KEY}"
[workspaces.webhooks.twilio]
auth_token = "{TOKEN}"
"""
CHANNEL = """
[workspaces.unsubscribes.mailchimp]
action = "channel"
[workspaces.unsubscribes.twilio]
action = "channel"
"""
BY_GROUP = """
[workspaces.unsubscribes.mailchimp]
action = "groups"
groups = { "acme-news" = "news", "acme-offers" = "offers" }
[workspaces.unsubscribes.twilio]
action = "groups"
groups = { "MG1" = "alerts" }
"""
#: Of the events of Mandrill, in milliseconds.
AT = 1_461_095_246_000


def configured(rules: str) -> dict[str, Any]:
    return {"workspace": GROUPS + WEBHOOKS + rules, "server": public()}


# ------------------------------------------------------------------------------- what is changed
WORKSPACE = Workspace(
    id="acme",
    name="acme",
    subscription_groups=tuple(
        SubscriptionGroup(id=group, name=group, channel=channel, type="opt_out")
        for group, channel in (("news", "email"), ("offers", "email"), ("alerts", "sms"))
    ),
    unsubscribes={
        "whole": Unsubscribes(action="channel"),
        "some": Unsubscribes(action="groups", groups={"7": "news", "8": "offers", "9": "news"}),
        "none": Unsubscribes(),
    },
)


def changed(
    provider: str,
    *opt_outs: OptOut,
    user: str | None = None,
    recipient: Recipient | None = Recipient("email", " Ann@Example.COM "),  # noqa: B008
) -> tuple[set[str], set[tuple[str, str, str, str, bool]]]:
    """Return the groups that a user leaves, and the suppressions."""
    document = {"messageId": "m1", **({} if user is None else {"userId": user})}
    found = Effects()
    event = TranslatedEvent(document, recipient, opt_outs=opt_outs)
    effects(WORKSPACE, provider, event, AT, found, {})
    left: set[str] = set()
    for change in found.changes:
        assert (change.subject, change.at, change.dated) == ((Kind.USER, user), AT, True)
        assert change.how == f"webhook:{provider}"
        assert not any(change.choices.values())
        left |= change.choices.keys()
    for one in found.suppressions:
        assert (one.workspace_id, one.at, one.source_id) == ("acme", AT, "m1")
        assert one.how == f"webhook:{provider}"
    keys = {(s.channel, s.address, s.group_id, s.reason, s.lifted) for s in found.suppressions}
    return left, keys


def ann(reason: str, *groups: str) -> set[tuple[str, str, str, str, bool]]:
    return {("email", "ann@example.com", group, reason, False) for group in groups}


def unsubscribe(*groups: str) -> OptOut:
    return OptOut("unsubscribe", "email", groups)


@pytest.mark.parametrize(
    ("provider", "opt_out", "left", "groups"),
    [
        ("whole", unsubscribe(), {"news", "offers"}, [""]),
        ("whole", unsubscribe("7"), {"news", "offers"}, [""]),
        ("some", unsubscribe("7"), {"news"}, ["news"]),
        ("some", unsubscribe("7", "9"), {"news"}, ["news"]),
        ("some", unsubscribe(), {"news", "offers"}, ["news", "offers"]),
        ("some", unsubscribe("other"), set(), []),
        ("none", unsubscribe(), set(), []),
        ("not configured", unsubscribe(), set(), []),
    ],
)
def test_an_unsubscribe_is_of_the_user_or_else_of_the_address(
    provider: str, opt_out: OptOut, left: set[str], groups: list[str]
) -> None:
    assert changed(provider, opt_out, user="u1") == (left, set())
    assert changed(provider, opt_out) == (set(), ann("unsubscribe", *groups))
    assert changed(provider, opt_out, recipient=None) == (set(), set())


@pytest.mark.parametrize("kind", ["complaint", "bounce"])
def test_a_complaint_and_a_bounce_are_of_the_user_and_of_the_address(kind: Any) -> None:
    opt_out = OptOut(kind, "email")
    assert changed("whole", opt_out, user="u1") == ({"news", "offers"}, ann(kind, ""))
    assert changed("whole", opt_out) == (set(), ann(kind, ""))
    named = OptOut(kind, "email", ("7",))
    assert changed("some", named, user="u1") == ({"news"}, ann(kind, "news"))
    assert changed("whole", opt_out, user="u1", recipient=None) == ({"news", "offers"}, set())
    assert changed("none", opt_out, user="u1") == (set(), set())


def test_an_answer_is_of_the_address_alone() -> None:
    """START must be able to undo all that STOP did."""
    phone = Recipient("phone", "+1 (555) 867-5310")
    for kind, lifted in (("stop", False), ("start", True)):
        for user in (None, "u1"):
            answer = OptOut(kind, "sms", ("MG1",))  # type: ignore[arg-type]
            left, suppressed = changed("whole", answer, user=user, recipient=phone)
            assert left == set()
            assert suppressed == {("sms", "+15558675310", "", "stop", lifted)}


def test_an_address_is_one_of_the_channel() -> None:
    phone = Recipient("phone", "+15558675310")
    both = unsubscribe(), OptOut("unsubscribe", "sms")
    assert changed("whole", *both) == (set(), ann("unsubscribe", ""))
    number = {("sms", "+15558675310", "", "unsubscribe", False)}
    assert changed("whole", *both, recipient=phone) == (set(), number)
    assert changed("whole", *both, user="u1") == ({"news", "offers", "alerts"}, set())


def test_the_id_of_a_change_is_that_of_its_event() -> None:
    def ids(provider: str, message_id: str, *groups: str) -> list[str]:
        found = Effects()
        document = {"messageId": message_id, "userId": "u1"}
        event = TranslatedEvent(document, opt_outs=[unsubscribe(*groups)])
        effects(WORKSPACE, provider, event, AT, found, {})
        return [change.id for change in found.changes]

    assert ids("some", "m1", "7") == ids("some", "m1", "8")
    assert len({*ids("some", "m1"), *ids("some", "m2"), *ids("whole", "m1")}) == 3


# ------------------------------------------------------------------------------------- deliveries
def mandrill(*items: Any) -> WebhookRequest:
    """Return a delivery of Mandrill events."""
    return mandrill_delivery(f"{PUBLIC_URL}/api/public/webhooks/mailchimp", KEY, items)


def item(
    kind: str,
    user: str | None = None,
    *,
    n: int = 0,
    email: str = "ann@example.com",
    **message: Any,
) -> dict[str, Any]:
    metadata = {} if user is None else {"userId": user}
    about = {"email": email, "metadata": metadata, **message}
    return {"event": kind, "_id": f"m{n}", "ts": AT // 1000 + n, "msg": about}


def answer(kind: str, sid: str, service: str = "MG1") -> WebhookRequest:
    """Return the delivery of a message in which a person answers STOP or START."""
    fields = {
        "MessageSid": sid,
        "SmsStatus": "received",
        "OptOutType": kind,
        "From": "+15558675310",
        "MessagingServiceSid": service,
    }
    return twilio_delivery(f"{PUBLIC_URL}/api/public/webhooks/twilio", TOKEN, fields)


async def choices(server: Serving, user: str) -> Mapping[str, bool]:
    return await server.app.store.state("acme", Subject(Kind.USER, user))


async def ledger(server: Serving) -> list[tuple[str | None, str, bool | None, bool, int, str]]:
    page = await server.app.store.history("acme", None, after=None, limit=100)
    return [(r.user_id, r.group_id, r.before, r.after, r.at, r.how) for r in page.items]


async def suppressed(server: Serving, address: str = "ann@example.com") -> set[tuple[str, str]]:
    """Return (group, reason) of what suppresses an address."""
    channel = "email" if "@" in address else "sms"
    suppressions: list[Suppression] = list(
        await server.app.store.suppressions("acme", [(channel, address)])
    )
    return {(suppression.group_id, suppression.reason) for suppression in suppressions}


async def test_a_report_changes_the_choices_of_the_user_it_names(tmp_path: Path) -> None:
    metrics = Metrics()
    async with serving(tmp_path, **configured(CHANNEL), metrics=metrics) as server:
        for _ in range(3):  # The second and third one are duplicates.
            assert (await deliver(server, mandrill(item("unsub", "u1")))).status == 200
        assert await choices(server, "u1") == {"news": False, "offers": False}
        assert await ledger(server) == [
            ("u1", group, None, False, AT, "webhook:mailchimp") for group in ("news", "offers")
        ]
        assert await suppressed(server) == set()
    counted = {labels: value for family, labels, value in metrics.rows() if family.name == "events"}
    assert counted["subscription", "stored"] == 3


async def test_no_user_is_looked_up_for_a_report(tmp_path: Path) -> None:
    """Anyone can claim an address with the public key; its owner would lose the subscriptions."""
    async with serving(tmp_path, **configured(BY_GROUP)) as server:
        identity = {"userId": "u1", "traits": {"email": "ann@example.com"}}
        await server.send("/v1/identify", identity)
        await deliver(server, mandrill(item("unsub", subaccount="acme-news")))
        [event] = [e for e in await server.events() if e.origin == "mailchimp"]
        assert event.user_id == "u1"
        assert await choices(server, "u1") == {}
        assert await suppressed(server) == {("news", "unsubscribe")}


async def test_a_complaint_and_a_hard_bounce_suppress_the_address(tmp_path: Path) -> None:
    async with serving(tmp_path, **configured(CHANNEL)) as server:
        delivery = mandrill(
            item("spam", "u1"),
            item("hard_bounce", n=1, email="B@example.com"),
            item("soft_bounce", "u3", n=2, email="c@example.com"),
            item("open", "u4", n=3),
        )
        await deliver(server, delivery)
        assert await choices(server, "u1") == {"news": False, "offers": False}
        assert await suppressed(server) == {("", "complaint")}
        assert await suppressed(server, "b@example.com") == {("", "bounce")}
        assert await suppressed(server, "c@example.com") == set()
        assert len(await ledger(server)) == 2


@pytest.mark.parametrize("rules", ["", '[workspaces.unsubscribes.mailchimp]\naction = "none"\n'])
async def test_nothing_changes_by_default(tmp_path: Path, rules: str) -> None:
    async with serving(tmp_path, **configured(rules)) as server:
        delivery = mandrill(item("unsub", "u1"), item("spam", "u1", n=1), item("unsub", n=2))
        assert (await deliver(server, delivery)).json["accepted"] == 3
        assert await ledger(server) == []
        assert await suppressed(server) == set()


async def choose(server: Serving, at: int, **choices: bool) -> None:
    """Make a choice as a person does on the preferences page."""
    change = SubscriptionChange(
        id=f"{at}{choices}",
        workspace_id="acme",
        subject=Subject(Kind.USER, "u1"),
        choices=choices,
        at=at,
        how="page",
    )
    await server.app.store.apply(change)


async def test_a_report_older_than_the_choice_of_the_person_changes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, **configured(CHANNEL)) as server:
        await choose(server, AT - 1000, offers=True)
        await choose(server, AT + 1000, news=True)
        await deliver(server, mandrill(item("unsub", "u1")))
        assert await choices(server, "u1") == {"news": True, "offers": False}
        # The person subscribes again, and the delivery comes again.
        await choose(server, AT + 2000, offers=True)
        for _ in range(2):
            await deliver(server, mandrill(item("unsub", "u1")))
        assert await choices(server, "u1") == {"news": True, "offers": True}
        await deliver(server, mandrill(item("unsub", "u1", n=3)))
        assert await choices(server, "u1") == {"news": False, "offers": False}


async def test_a_report_from_the_future_happens_now(tmp_path: Path) -> None:
    async with serving(tmp_path, **configured(CHANNEL)) as server:
        await deliver(server, mandrill({**item("unsub", "u1"), "ts": 4_000_000_000}))
        now = time.time() * 1000
        assert all(now - 60_000 < at <= now + 1000 for _, _, _, _, at, _ in await ledger(server))
        await choose(server, int(now) + 60_000, news=True)
        assert (await choices(server, "u1"))["news"] is True


async def test_start_lifts_only_what_stop_set(tmp_path: Path) -> None:
    number = "+15558675310"
    async with serving(tmp_path, **configured(CHANNEL)) as server:
        unsubscribed = Suppression(
            workspace_id="acme", channel="sms", address=number, reason="unsubscribe", at=AT
        )
        await server.app.store.suppress([unsubscribed])
        stop, start = answer("STOP", "SM1"), answer("START", "SM2")
        assert (await deliver(server, stop)).body == b"<Response/>"
        assert await suppressed(server, number) == {("", "stop"), ("", "unsubscribe")}
        await deliver(server, start)
        assert await suppressed(server, number) == {("", "unsubscribe")}
        # Neither has a time. Repeated, it counts from when it arrived first.
        await deliver(server, stop)
        assert await suppressed(server, number) == {("", "unsubscribe")}
        await deliver(server, answer("STOP", "SM3"))
        await deliver(server, start)
        assert await suppressed(server, number) == {("", "stop"), ("", "unsubscribe")}
        assert await ledger(server) == []


async def test_start_is_of_its_messaging_service(tmp_path: Path) -> None:
    number = "+15558675310"
    async with serving(tmp_path, **configured(BY_GROUP)) as server:
        await deliver(server, answer("STOP", "SM1"))
        await deliver(server, answer("START", "SM2", service="MG2"))
        assert await suppressed(server, number) == {("alerts", "stop")}
        await deliver(server, answer("START", "SM3"))
        assert await suppressed(server, number) == set()


async def test_only_start_subscribes_again(tmp_path: Path) -> None:
    rules = '[workspaces.webhooks.postmark]\nheader = "X-Secret"\nvalue = "a long word"\n'
    rules += '[workspaces.unsubscribes.postmark]\naction = "channel"\n'
    url = f"{PUBLIC_URL}/api/public/webhooks/postmark"
    async with serving(tmp_path, **configured(CHANNEL + rules)) as server:
        seconds = 0
        for user in ({}, {"userId": "u1"}):
            for sends in (True, False):
                seconds += 1
                record = {
                    "RecordType": "SubscriptionChange",
                    "ChangedAt": f"2020-02-01T10:53:3{seconds}Z",
                    "Recipient": "ann@example.com",
                    "SuppressSending": sends,
                    "SuppressionReason": "ManualSuppression" if sends else None,
                    "Metadata": user,
                }
                sent = request(json.dumps(record), {"X-Secret": "a long word"}, url=url)
                assert (await deliver(server, sent)).json["accepted"] == 1
        assert await choices(server, "u1") == {"news": False, "offers": False}
        assert await suppressed(server) == {("", "unsubscribe")}


@pytest.mark.parametrize("method", ["apply_all", "suppress"])
async def test_what_could_not_be_applied_is_applied_by_the_next_delivery(
    tmp_path: Path, method: str
) -> None:
    """The events are durable then, and duplicates when they come again."""
    valve = Valve(method)
    async with serving(tmp_path, **configured(CHANNEL), meddle=valve) as server:
        valve.error = StorageUnavailable("no")
        delivery = mandrill(item("spam", "u1"))
        refused = await deliver(server, delivery)
        assert (refused.status, refused.json["code"]) == (503, "storage_unavailable")
        assert len(await server.events()) == 1
        valve.error = None
        assert (await deliver(server, delivery)).json["accepted"] == 0
        assert await choices(server, "u1") == {"news": False, "offers": False}
        assert await suppressed(server) == {("", "complaint")}
        assert len(await ledger(server)) == 2


async def test_a_replay_of_the_dead_letter_applies_it_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, **configured(CHANNEL)) as server:
        provider = server.app.deliveries.destination("twilio", "/?workspaceId=acme", []).provider

        def fail(_: object) -> None:
            raise PayloadInvalid("new")

        monkeypatch.setattr(provider, "translate", fail)
        await deliver(server, answer("STOP", "SM1"))
        monkeypatch.undo()
        [letter] = await server.dead_letters()
        assert await suppressed(server, "+15558675310") == set()
        for _ in range(2):
            assert (await server.app.deliveries.retry(letter)).rejected == 0
            page = await server.app.store.scan_suppressions("acme", after=None, limit=10)
            assert [item.at for item in page.items] == [letter.received_at]
        # START arrived after the letter, so a further replay does not suppress the number again.
        await deliver(server, answer("START", "SM2"))
        await server.app.deliveries.retry(letter)
        assert await suppressed(server, "+15558675310") == set()


async def test_a_report_of_a_refused_event_waits_in_its_dead_letter(tmp_path: Path) -> None:
    """The others are applied at once."""
    limits = "[limits]\nwebhook_event_bytes = 2000\n"
    async with serving(tmp_path, **configured(CHANNEL), config_extra=limits) as server:
        delivery = mandrill(item("unsub", "u1", subject="x" * 2000), item("unsub", "u2", n=1))
        assert (await deliver(server, delivery)).status == 200
        assert await choices(server, "u1") == {}
        assert await choices(server, "u2") == {"news": False, "offers": False}
        assert len(await server.dead_letters()) == 1


async def test_with_a_log_a_report_is_applied_before_the_answer(tmp_path: Path) -> None:
    """Choices and suppressions are not in the log."""
    broker = MemoryBroker()
    async with serving(tmp_path, **configured(CHANNEL), broker=broker) as server:
        assert (await deliver(server, mandrill(item("spam", "u1")))).status == 200
        assert (await deliver(server, answer("STOP", "SM1"))).status == 200
        assert await server.events() == []  # Nothing has loaded them.
        assert await choices(server, "u1") == {"news": False, "offers": False}
        assert await suppressed(server) == {("", "complaint")}
        assert await suppressed(server, "+15558675310") == {("", "stop")}
