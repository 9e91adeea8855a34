# SPDX-License-Identifier: Apache-2.0
"""Providers that sign nothing: the credential, and what they translate beyond the recordings."""

from __future__ import annotations

import base64
import json

import pytest
from jsonschema import ValidationError
from support.inprocess import serving
from support.webhooks import make, request

from engage.api import PayloadInvalid, SignatureMismatch, WebhookResult
from engage.testing.providers import ProviderConformance

PROVIDERS = ["amplitude", "mixpanel", "mparticle", "posthog", "postmark", "rudderstack"]
HEADER = {"header": "X-Secret", "value": "s3cret"}
BASIC = {"basic_user": "hook", "basic_password": "pä:ss"}


def basic(pair):
    return "Basic " + base64.b64encode(pair.encode()).decode()


def translate(provider, payload, options=HEADER):
    body = payload if isinstance(payload, bytes) else json.dumps(payload)
    return make(provider, options).translate(request(body))


# --------------------------------------------------------------------------------------- credential
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("options", "headers"),
    [
        (HEADER, [("x-secret", "s3cret")]),
        ({"header": "X-Secret", "value": ["new", "s3cret"]}, [("X-SECRET", "s3cret")]),
        ({"value": "Bearer ü"}, [("Authorization", "Bearer ü".encode().decode("latin-1"))]),
        (BASIC, [("Authorization", basic("hook:pä:ss"))]),
        (BASIC, [("authorization", basic("hook:pä:ss").replace("Basic", "bAsIc"))]),
        (BASIC | {"basic_password": ["x", "pä:ss"]}, [("Authorization", basic("hook:pä:ss"))]),
    ],
)
def test_the_credential_lets_in(provider, options, headers):
    made = make(provider, options)
    assert made.needs(request(b"", headers)) is None
    made.verify(request(b"", headers), None)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("options", "headers"),
    [
        (HEADER, []),
        (HEADER, [("X-Secret", "")]),
        (HEADER, [("X-Secret", "s3cret"), ("X-Secret", "s3cret")]),
        (HEADER, [("X-Secret", "bad"), ("x-secret", "s3cret")]),
        (HEADER, [("X-Secret", "S3CRET")]),
        (HEADER, [("X-Secret", "s3cret ")]),
        (HEADER, [("X-Secret", "s3cre")]),
        (HEADER, [("X-Secret", "s3cretx")]),
        (HEADER, [("X-Secret", "ÿ\x80")]),
        (HEADER, [("Authorization", "s3cret")]),
        (BASIC, [("Authorization", basic("hook:pä"))]),
        (BASIC, [("Authorization", basic("hook:pä:ss:"))]),
        (BASIC, [("Authorization", basic("hook:pä:ss").rstrip("=")[:-1])]),
        (BASIC, [("Authorization", basic("hook:pä:ss") + "=")]),
        (BASIC, [("Authorization", basic("hook:pä:ss").replace("Basic", "Bearer"))]),
        (BASIC, [("Authorization", "Basic")]),
        (BASIC, [("Authorization", "Basic ")]),
        (BASIC, [("Authorization", "Basic ÿÿÿÿ")]),
        (BASIC, [("Authorization", "hook:pä:ss")]),
    ],
)
def test_anything_else_does_not(provider, options, headers):
    with pytest.raises(SignatureMismatch):
        make(provider, options).verify(request(b"{}", headers), None)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"header": "X-Secret"},
        {"value": ""},
        {"value": []},
        {"value": [""]},
        {"header": "X Secret", "value": "x"},
        {"basic_user": "hook"},
        {"basic_password": "x"},
        {"basic_user": "ho:ok", "basic_password": "x"},
        HEADER | BASIC,
        HEADER | {"typo": 1},
    ],
)
def test_options_must_name_one_credential(provider, options):
    with pytest.raises(ValidationError):
        make(provider, options)


def test_the_same_secret_is_the_same_however_it_is_written():
    [header] = make("mixpanel", {"value": basic("hook:pä:ss")}).credentials()
    [named] = make("postmark", BASIC).credentials()
    assert header == named


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"null", b"7", b'"x"', b"{}", b"[" * 100_000, b"{", b'{"a":NaN}', b"[7]"]
)
def test_what_makes_no_sense_is_a_dead_letter(provider, body):
    with pytest.raises(PayloadInvalid):
        translate(provider, body)


def cohort(action="add_members", **member):
    parameters = {
        "mixpanel_project_id": "1",
        "mixpanel_cohort_id": "2",
        "mixpanel_cohort_name": "Power",
        "mixpanel_session_id": "s",
        "page_info": {"total_pages": 1, "page_count": 1},
        "members": [{"email": "a@b.c", "mixpanel_distinct_id": "u", "first_name": "A"} | member],
    }
    return {"action": action, "parameters": parameters}


class StaticConformance(ProviderConformance):
    """With a header of one's own."""

    options = {"header": "X-Secret", "value": "one Secret"}
    other_options = {"header": "X-Secret", "value": "another"}
    secret_option = "value"

    def sign(self, body, options, timestamp):
        return {"x-secret": options["value"]}


class BasicConformance(ProviderConformance):
    """With HTTP Basic."""

    options = {"basic_user": "hook", "basic_password": "pä:Ss"}
    other_options = {"basic_user": "hook", "basic_password": "another"}
    secret_option = "basic_password"

    def sign(self, body, options, timestamp):
        return {"Authorization": basic(f"hook:{options['basic_password']}")}


class TestPostmark(BasicConformance):
    plugin = "engage_plugins.postmark"
    body = json.dumps(
        {
            "RecordType": "Bounce",
            "ID": 692560173,
            "Type": "HardBounce",
            "MessageID": "883953f4",
            "Email": "a@example.com",
            "BouncedAt": "2019-11-05T16:33:54.9070259Z",
            "Metadata": {"userId": "u1", "plan": "pro"},
        }
    ).encode()


class TestRudderStack(StaticConformance):
    plugin = "engage_plugins.rudderstack"
    body = json.dumps(
        [
            {
                "type": "track",
                "event": "x",
                "userId": "u",
                "messageId": "m",
                "channel": "web",
                "context": {"ip": "1.2.3.4"},
                "timestamp": "2024-01-01T00:00:00.000Z",
            },
            {"type": "identify", "anonymousId": "a", "traits": {"email": "a@example.com"}},
        ]
    ).encode()


class TestPostHog(StaticConformance):
    plugin = "engage_plugins.posthog"
    body = json.dumps(
        {
            "event": {
                "uuid": "e",
                "event": "$identify",
                "distinct_id": "u",
                "properties": {"$set": {"plan": "pro"}, "$anon_distinct_id": "a", "$ip": "1.2.3.4"},
                "timestamp": "2024-01-01T00:00:00.000Z",
            },
            "person": {"properties": {"email": "a@example.com"}},
        }
    ).encode()


class TestPostHogGroup(TestPostHog):
    body = json.dumps(
        {
            "event": {
                "uuid": "e",
                "event": "$groupidentify",
                "distinct_id": "u",
                "properties": {"$group_type": "t", "$group_key": "g", "$group_set": {"n": 1}},
            }
        }
    ).encode()


class TestAmplitude(StaticConformance):
    plugin = "engage_plugins.amplitude"
    body = json.dumps(
        {
            "user_id": "u",
            "device_id": "d",
            "event_type": "[Amplitude] Page Viewed",
            "event_time": "2022-10-24 20:07:32.123000",
            "uuid": "e",
            "event_properties": {"[Amplitude] Page Title": "A"},
            "user_properties": {"email": "a@example.com"},
        }
    ).encode()


class TestMParticle(StaticConformance):
    plugin = "engage_plugins.mparticle"
    body = json.dumps(
        {
            "mpid": "600",
            "message_id": "b",
            "environment": "production",
            "user_identities": {"customer_id": "u", "email": "a@example.com"},
            "user_attributes": {"$FirstName": "Milo"},
            "events": [
                {
                    "event_type": "custom_event",
                    "data": {"event_name": "x", "timestamp_unixtime_ms": "1402521613976"},
                },
                {
                    "event_type": "commerce_event",
                    "data": {"product_action": {"action": "purchase"}, "event_id": 1},
                },
                {"event_type": "screen_view", "data": {"screen_name": "Home"}},
            ],
        }
    ).encode()


class TestMixpanelCohort(BasicConformance):
    plugin = "engage_plugins.mixpanel"
    body = json.dumps(cohort()).encode()


class TestMixpanelStream(StaticConformance):
    plugin = "engage_plugins.mixpanel"
    body = json.dumps(
        [{"event": "x", "properties": {"distinct_id": "u", "time": 1700000000, "$insert_id": "i"}}]
    ).encode()


# ----------------------------------------------------------------------------------------- postmark
@pytest.mark.parametrize(
    ("kind", "name", "bounce"),
    [
        ("HardBounce", "Email Bounced", "hard"),
        ("BadEmailAddress", "Email Bounced", "hard"),
        ("SoftBounce", "Email Bounced", "soft"),
        ("Transient", "Email Bounced", "soft"),
        ("AutoResponder", "Email Bounced", "other"),
        ("SpamNotification", "Email Marked as Spam", None),
        ("Unsubscribe", "Email Unsubscribed", None),
        ("Subscribe", "Email Resubscribed", None),
    ],
)
def test_postmark_tells_bounces_apart(kind, name, bounce):
    record = {"RecordType": "Bounce", "Type": kind, "Email": "a@b.c", "ID": 692560173}
    [event] = translate("postmark", record).events
    assert event.document["event"] == name
    assert event.document["properties"].get("bounceType") == bounce
    assert event.recipient.value == "a@b.c"


@pytest.mark.parametrize(
    ("suppress", "name"), [(True, "Email Unsubscribed"), (False, "Email Resubscribed")]
)
def test_postmark_changes_of_subscription(suppress, name):
    record = {
        "RecordType": "SubscriptionChange",
        "Recipient": "a@b.c",
        "SuppressSending": suppress,
        "ChangedAt": "2020-02-01T10:53:34.416071Z",
    }
    [event] = translate("postmark", record).events
    assert event.document["event"] == name
    assert event.document["timestamp"] == "2020-02-01T10:53:34.416Z"


def test_postmark_tells_two_clicks_apart_and_a_redelivery_not():
    click = {
        "RecordType": "Click",
        "MessageID": "m",
        "Recipient": "a@b.c",
        "ReceivedAt": "2019-11-05T16:33:54.9070259Z",
        "OriginalLink": "https://a",
    }
    others = [click, click | {"OriginalLink": "https://b"}, click | {"ReceivedAt": "2019-11-06"}]
    ids = [translate("postmark", one).events[0].document["messageId"] for one in others]
    assert len(set(ids)) == 3
    assert translate("postmark", click).events[0].document["messageId"] == ids[0]


def test_postmark_ignores_other_records():
    assert translate("postmark", {"RecordType": "Inbound"}).ignored == 1


# -------------------------------------------------------------------------------------- rudderstack
def test_rudderstack_may_send_lists():
    good = {"type": "TRACK", "event": "x", "userId": "u", "messageId": "1", "request_ip": "1.2.3.4"}
    items = [good, {"type": "delete", "userId": "u"}, 7, {"event": "x"}]
    for payload in (items, {"batch": items}):
        translation = translate("rudderstack", payload)
        [event] = translation.events
        assert event.document["type"] == "track"
        assert event.document["context"] == {"request_ip": "1.2.3.4", "ip": "1.2.3.4"}
        assert translation.ignored == 1
        assert [rejected.index for rejected in translation.rejected] == [2, 3]


def test_rudderstack_without_its_own_time_or_id():
    item = {"type": "page", "userId": "u", "originalTimestamp": "2024-01-01T00:00:00.000Z"}
    first, second = (translate("rudderstack", item).events[0].document for _ in range(2))
    assert first["timestamp"] == "2024-01-01T00:00:00.000Z"
    assert first["messageId"] == second["messageId"]


# ------------------------------------------------------------------------------------------ posthog
VISITOR = "0190f5b2-0000-7000-8000-00000000000a"


def posthog(name, properties=None, person=None, distinct="user-1", **rest):
    event = {"event": name, "uuid": "e", "distinct_id": distinct, "properties": properties or {}}
    return translate("posthog", {"event": event | rest, "person": person}).events[0].document


def test_posthog_pages():
    properties = {
        "$current_url": "https://example.com/a",
        "$pathname": "/a",
        "title": "A",
        "$referrer": "https://example.com",
        "$browser": "Firefox",
    }
    for name in ("$pageview", "$pageleave"):
        document = posthog(name, properties)
        assert (document["type"], document["name"]) == ("page", "A")
        assert document["properties"] == properties | {
            "url": "https://example.com/a",
            "path": "/a",
            "referrer": "https://example.com",
            "event": name,
        }


def test_posthog_traits():
    document = posthog("$set", {"$set": {"plan": "pro"}, "$set_once": {"plan": "free", "first": 1}})
    assert document["type"] == "identify"
    assert document["traits"] == {"plan": "pro", "first": 1}


def test_posthog_groups():
    properties = {"$group_type": "company", "$group_key": "acme", "$group_set": {"size": 3}}
    document = posthog("$groupidentify", properties)
    assert (document["type"], document["groupId"]) == ("group", "acme")
    assert document["traits"] == {"size": 3}
    assert document["userId"] == "user-1"
    assert document["properties"] == {"$group_type": "company"}
    nobody = posthog("$groupidentify", properties, distinct="$company_acme")
    assert "userId" not in nobody


@pytest.mark.parametrize("name", ["$create_alias", "$merge_dangerously"])
def test_posthog_aliases(name):
    document = posthog(name, {"alias": "anon-1"})
    assert (document["type"], document["userId"], document["previousId"]) == (
        "alias",
        "user-1",
        "anon-1",
    )
    swapped = posthog(name, {"alias": "user-1"}, distinct=VISITOR)
    assert (swapped["userId"], swapped["previousId"]) == ("user-1", VISITOR)
    assert posthog(name, {})["type"] == "track"


@pytest.mark.parametrize(
    ("distinct", "properties", "person", "field"),
    [
        ("user-1", {}, None, "userId"),
        (VISITOR, {}, None, "anonymousId"),
        (VISITOR, {}, {"properties": {}}, "userId"),
        (VISITOR, {"$process_person_profile": False}, {"properties": {}}, "anonymousId"),
        (VISITOR.replace("-7", "-4", 1), {}, None, "userId"),
    ],
)
def test_posthog_visitors_are_anonymous(distinct, properties, person, field):
    document = posthog("seen", properties, person, distinct)
    assert document[field] == distinct
    assert ("userId" in document) != ("anonymousId" in document)


def test_posthog_identify_is_of_a_user_whatever_the_id_looks_like():
    document = posthog("$identify", {"$anon_distinct_id": VISITOR}, None, VISITOR[:-1] + "b")
    assert document["userId"] == VISITOR[:-1] + "b"
    assert document["anonymousId"] == VISITOR


def test_posthog_keeps_what_has_no_field():
    person = {"id": "p", "properties": {"email": "a@b.c"}}
    document = posthog("x", {"$lib": "web", "n": 1}, person, elements_chain="", url="https://p")
    assert document["properties"] == {
        "$lib": "web",
        "n": 1,
        "posthog": {"url": "https://p", "person": person},
    }


def test_posthog_may_send_the_bare_event():
    payload = {"event": "x", "uuid": "e", "distinct_id": "u", "properties": {"n": 1}}
    [event] = translate("posthog", payload).events
    assert (event.document["userId"], event.document["properties"]) == ("u", {"n": 1})


def test_posthog_without_an_id_goes_by_the_persons_address():
    event = {"event": "x", "properties": {}}
    payload = {"event": event, "person": {"properties": {"email": "a@b.c"}}}
    [event] = translate("posthog", payload).events
    assert event.recipient.value == "a@b.c"


# ---------------------------------------------------------------------------------------- amplitude
def amplitude(**event):
    return translate("amplitude", {"uuid": "u-1", **event}).events[0].document


def test_amplitude_events():
    document = amplitude(
        event_type="click",
        user_id=None,
        device_id="d-1",
        event_time="2022-10-24 20:07:32.123000",
        event_properties={"platform": "mine"},
        user_properties={"plan": "pro"},
        platform="iOS",
        ip_address="1.2.3.4",
    )
    assert document == {
        "type": "track",
        "event": "click",
        "anonymousId": "d-1",
        "messageId": "u-1",
        "timestamp": "2022-10-24T20:07:32.123Z",
        "context": {"ip": "1.2.3.4"},
        "properties": {
            "platform": "mine",
            "amplitude": {"platform": "iOS", "user_properties": {"plan": "pro"}},
        },
    }


def test_amplitude_page_views():
    document = amplitude(
        event_type="[Amplitude] Page Viewed",
        user_id=7,
        event_properties={
            "[Amplitude] Page URL": "https://example.com/a",
            "[Amplitude] Page Path": "/a",
            "[Amplitude] Page Title": "A",
        },
    )
    assert (document["type"], document["name"], document["userId"]) == ("page", "A", "7")
    assert document["properties"]["url"] == "https://example.com/a"
    assert document["properties"]["path"] == "/a"


def test_amplitude_without_an_id_is_somebody_of_amplitudes():
    assert amplitude(event_type="x", amplitude_id=12)["anonymousId"] == "amplitude:12"


def test_amplitude_keeps_a_time_that_is_none():
    document = amplitude(event_type="x", user_id="u", event_time="soon")
    assert "timestamp" not in document
    assert document["properties"]["amplitude"] == {"event_time": "soon"}


# ---------------------------------------------------------------------------------------- mparticle
def test_mparticle_commerce():
    events = [
        {"event_type": "commerce_event", "data": {"product_action": {"action": "purchase"}}},
        {"event_type": "commerce_event", "data": {"promotion_action": {"action": "view"}}},
        {"event_type": "commerce_event", "data": {"product_impressions": [{}]}},
        {"event_type": "commerce_event", "data": {"product_action": {"action": "new"}}},
    ]
    translation = translate("mparticle", {"mpid": 600, "message_id": "b", "events": events})
    assert [event.document["event"] for event in translation.events] == [
        "Order Completed",
        "Promotion Viewed",
        "Product List Viewed",
        "new",
    ]
    first = translation.events[0].document
    assert first["userId"] == "600"
    assert first["properties"] == {"product_action": {"action": "purchase"}}
    assert first["context"] == {"mparticle": {"mpid": 600}}


def test_mparticle_ignores_what_nobody_did_and_rejects_what_is_no_event():
    events = [
        {"event_type": "session_start", "data": {}},
        {"event_type": "application_state_transition", "data": {}},
        {"event_type": "custom_event", "data": {"event_name": "x"}},
        {"event_type": "custom_event"},
        7,
    ]
    translation = translate("mparticle", {"mpid": "600", "events": events})
    assert translation.ignored == 2
    assert [event.index for event in translation.events] == [2]
    assert [rejected.index for rejected in translation.rejected] == [3, 4]


def test_mparticle_development_is_left_out_unless_wanted():
    batch = {
        "environment": "development",
        "mpid": "0",
        "user_identities": {"email": "a@b.c", "mobile_number": "+1"},
        "user_attributes": {"$Mobile": "+2", "$City": "Bonn", "plan": "pro"},
        "events": [],
        "timestamp_unixtime_ms": 1_402_521_613_976,
    }
    assert translate("mparticle", batch).ignored == 1
    [event] = translate("mparticle", batch, HEADER | {"development": True}).events
    assert event.document["type"] == "identify"
    assert event.document["timestamp"] == "2014-06-11T21:20:13.976Z"
    assert event.document["traits"] == {
        "email": "a@b.c",
        "phone": "+1",
        "city": "Bonn",
        "plan": "pro",
    }
    assert "userId" not in event.document
    assert event.recipient.value == "a@b.c"


# ----------------------------------------------------------------------------------------- mixpanel
@pytest.mark.parametrize(
    ("action", "name"),
    [
        ("members", "Cohort Entered"),
        ("add_members", "Cohort Entered"),
        ("remove_members", "Cohort Exited"),
    ],
)
def test_mixpanel_cohorts(action, name):
    [event] = translate("mixpanel", cohort(action)).events
    assert event.document["event"] == name
    assert event.document["userId"] == "u"
    assert "timestamp" not in event.document
    assert event.document["properties"] == {
        "email": "a@b.c",
        "first_name": "A",
        "mixpanel_project_id": "1",
        "mixpanel_cohort_id": "2",
        "mixpanel_cohort_name": "Power",
        "mixpanel_session_id": "s",
    }


def test_mixpanel_members_without_a_user():
    [event] = translate("mixpanel", cohort(mixpanel_distinct_id="$device:d1")).events
    assert event.document["anonymousId"] == "d1"
    [event] = translate("mixpanel", cohort(mixpanel_distinct_id=None)).events
    assert event.recipient.value == "a@b.c"
    translation = translate("mixpanel", cohort(mixpanel_distinct_id=None, email=None))
    assert [rejected.index for rejected in translation.rejected] == [0]


def test_mixpanel_page_again_is_the_same_and_another_session_is_not():
    first, again = cohort(), cohort()
    other = cohort()
    other["parameters"]["mixpanel_session_id"] = "t"
    ids = [
        translate("mixpanel", payload).events[0].document["messageId"]
        for payload in (first, again, other, cohort("remove_members"))
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


def test_mixpanel_wants_an_answer_of_its_own():
    made = make("mixpanel", HEADER)
    result = WebhookResult(accepted=1, ignored=0)
    reply = made.reply(request(json.dumps(cohort("members"))), result)
    assert json.loads(reply.body) == {"action": "members", "status": "success"}
    for body in ("[]", "{}", '{"action":"new"}', '{"action":7}', "{"):
        assert made.reply(request(body), result) is None


@pytest.mark.parametrize("payload", [{"action": "new"}, {"action": "members"}, {"action": ["x"]}])
def test_mixpanel_action_without_members_is_a_dead_letter(payload):
    with pytest.raises(PayloadInvalid):
        translate("mixpanel", payload)


def test_mixpanel_streams():
    items = [
        {
            "event": "Signed Up",
            "properties": {
                "distinct_id": "u",
                "$device_id": "d",
                "time": 1_700_000_000,
                "$insert_id": "i-1",
                "plan": "pro",
            },
        },
        7,
        {"event_name": "Viewed", "distinct_id": "$device:d", "time": "1700000000123", "n": 1},
        {"event": "Dated", "properties": {"$user_id": "u", "time": "2023-11-14T22:13:20"}},
    ]
    translation = translate("mixpanel", items)
    one, two, three = (event.document for event in translation.events)
    assert one == {
        "type": "track",
        "event": "Signed Up",
        "userId": "u",
        "anonymousId": "d",
        "messageId": "i-1",
        "timestamp": "2023-11-14T22:13:20.000Z",
        "properties": {"plan": "pro"},
    }
    assert (two["anonymousId"], two["timestamp"]) == ("d", "2023-11-14T22:13:20.123Z")
    assert two["properties"] == {"n": 1}
    assert three["timestamp"] == "2023-11-14T22:13:20.000Z"
    assert [rejected.index for rejected in translation.rejected] == [1]


async def test_mixpanel_hears_its_own_answer_from_the_server(tmp_path):
    extra = '[workspaces.webhooks.mixpanel]\nheader = "X-Secret"\nvalue = "s3cret"\n'
    async with serving(tmp_path, config_extra=extra) as server:
        url, headers = "/api/public/webhooks/mixpanel", {"X-Secret": "s3cret"}
        for _ in range(2):
            answer = await server.send(url, cohort("members"), key=None, headers=headers)
            assert (answer.status, answer.json) == (200, {"action": "members", "status": "success"})
        [event] = await server.events()
        assert event.user_id == "u"
