# SPDX-License-Identifier: Apache-2.0
"""What events of each provider report: an unsubscription, a complaint, a hard bounce, an answer.

The payloads are those of the services' documentation, shortened; the comments name the pages.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from engage.api import OptOut
from support.provider_sns import TOPIC
from support.providers import delivery_of, make, recipient_of

OPTIONS: dict[str, dict[str, Any]] = {
    "amazon-ses": {"allowed_topic_arns": [TOPIC]},
    "customerio": {"signing_key": "k"},
    "mailchimp": {"webhook_key": "k"},
    "postmark": {"header": "X-Secret", "value": "a long word"},
    "resend": {"secret": "whsec_MDEyMzQ1Njc4OWFiY2RlZg=="},
    "sendgrid": {
        "verification_key": "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE+evkZBR8wQLZIyTQmdknwaUOQtV6CKEW"
        "/+wKKYGdjGVwuvfRKIiQKmoMHWet0QMSPIWatpv46UMck4STDUt+7g=="
    },
    "twilio": {"auth_token": "k"},
}

BOUNCE, COMPLAINT = OptOut("bounce", "email"), OptOut("complaint", "email")


def opt_outs(provider: str, payload: Any) -> list[OptOut]:
    """Return the opt-outs of the only event of a delivery."""
    [event] = make(provider, OPTIONS[provider]).translate(delivery_of(provider, payload)).events
    return list(event.opt_outs)


def unsubscribe(*groups: str, channel: str = "email") -> OptOut:
    return OptOut("unsubscribe", channel, groups)


# https://www.twilio.com/docs/sendgrid/for-developers/tracking-events/event
SENDGRID = {
    "email": "example@test.com",
    "timestamp": 1513299569,
    "smtp-id": "<14c5d75ce93.dfd.64b469@ismtpd-555>",
    "category": "cat facts",
    "sg_event_id": "sg_event_id",
    "sg_message_id": "sg_message_id",
    "asm_group_id": 10,
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"event": "group_unsubscribe"}, [unsubscribe("10")]),
        ({"event": "group_unsubscribe", "asm_group_id": None}, [unsubscribe()]),
        ({"event": "unsubscribe"}, [unsubscribe()]),
        ({"event": "spamreport"}, [COMPLAINT]),
        (
            {"event": "bounce", "status": "5.0.0", "reason": "500 unknown recipient"},
            [BOUNCE],
        ),
        ({"event": "bounce", "type": "blocked", "status": "5.7.1"}, []),
        ({"event": "bounce", "status": "4.2.2"}, []),
        # Only says that the message was not sent to an address that SendGrid has on its list.
        ({"event": "dropped", "reason": "Bounced Address", "status": "5.0.0"}, []),
        ({"event": "group_resubscribe"}, []),
        ({"event": "open"}, []),
    ],
)
def test_sendgrid(fields: dict[str, Any], expected: list[OptOut]) -> None:
    assert opt_outs("sendgrid", [SENDGRID | fields]) == expected


# https://docs.aws.amazon.com/ses/latest/dg/event-publishing-retrieving-sns-examples.html
def ses(kind: str, **details: Any) -> dict[str, Any]:
    mail = {"timestamp": "2022-01-12T01:00:14.340Z", "destination": ["recipient@example.com"]}
    return {"eventType": kind, "mail": mail, kind.lower(): details}


def preferences(everything: bool, **topics: str) -> dict[str, Any]:
    statuses = [{"topicName": name, "subscriptionStatus": topics[name]} for name in topics]
    return {"unsubscribeAll": everything, "topicSubscriptionStatus": statuses}


def subscription(new: dict[str, Any], old: dict[str, Any] | None) -> dict[str, Any]:
    return ses(
        "Subscription",
        contactList="ContactListName",
        timestamp="2022-01-12T01:00:17.910Z",
        source="UnsubscribeHeader",
        newTopicPreferences=new,
        **({} if old is None else {"oldTopicPreferences": old}),
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            subscription(
                preferences(True, ExampleTopicName="OptOut"),
                preferences(False, ExampleTopicName="OptOut"),
            ),
            [unsubscribe()],
        ),
        (
            subscription(
                preferences(False, News="OptOut", Offers="OptOut", Tips="OptIn"),
                preferences(False, News="OptIn", Offers="OptOut", Tips="OptOut"),
            ),
            [unsubscribe("News")],
        ),
        (subscription(preferences(False, B="OptOut", A="OptOut"), None), [unsubscribe("A", "B")]),
        (subscription(preferences(False, A="OptOut"), preferences(True, A="OptOut")), []),
        (subscription(preferences(False, A="OptIn"), preferences(False, A="OptOut")), []),
        (
            ses("Bounce", bounceType="Permanent", bounceSubType="General"),
            [BOUNCE],
        ),
        (ses("Bounce", bounceType="Transient", bounceSubType="MailboxFull"), []),
        (ses("Bounce", bounceType="Undetermined"), []),
        (ses("Complaint", complaintFeedbackType="abuse"), [COMPLAINT]),
        (ses("Complaint"), [COMPLAINT]),
        # https://www.iana.org/assignments/marf-parameters
        (ses("Complaint", complaintFeedbackType="not-spam"), []),
        (ses("Complaint", complaintFeedbackType="auth-failure"), []),
        (ses("Reject", reason="Bad content"), []),
    ],
)
def test_amazon_ses(message: dict[str, Any], expected: list[OptOut]) -> None:
    assert opt_outs("amazon-ses", message) == expected


def test_amazon_ses_reports_each_recipient() -> None:
    bounced = [{"emailAddress": "a@example.com"}, {"emailAddress": "b@example.com"}]
    message = ses("Bounce", bounceType="Permanent", bouncedRecipients=bounced)
    delivery = delivery_of("amazon-ses", message)
    events = make("amazon-ses", OPTIONS["amazon-ses"]).translate(delivery).events
    assert [recipient_of(event)[1] for event in events] == ["a@example.com", "b@example.com"]
    assert all(event.opt_outs == (BOUNCE,) for event in events)


# https://mailchimp.com/developer/transactional/docs/webhooks/
@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("unsub", {}, [unsubscribe()]),
        ("unsub", {"subaccount": "acme-news"}, [unsubscribe("acme-news")]),
        ("spam", {"subaccount": None}, [COMPLAINT]),
        ("hard_bounce", {"subaccount": "x"}, [OptOut("bounce", "email", ("x",))]),
        ("soft_bounce", {}, []),
        ("reject", {"reject": {"reason": "unsub"}}, []),
        ("open", {}, []),
    ],
)
def test_mailchimp(kind: str, message: dict[str, Any], expected: list[OptOut]) -> None:
    about = {"_id": "abc", "email": "ann@example.com", **message}
    payload = [{"event": kind, "_id": "abc", "ts": 1384954004, "msg": about}]
    assert opt_outs("mailchimp", payload) == expected


def of_stream(opt_out: OptOut) -> OptOut:
    return dataclasses.replace(opt_out, groups=("broadcast",))


# https://postmarkapp.com/developer/webhooks/subscription-change-webhook and bounce-webhook
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"SuppressionReason": "ManualSuppression"}, [unsubscribe("broadcast")]),
        ({"SuppressionReason": "HardBounce"}, [of_stream(BOUNCE)]),
        ({"SuppressionReason": "SpamComplaint"}, [of_stream(COMPLAINT)]),
        ({"SuppressionReason": None, "SuppressSending": False}, []),
        (
            {"RecordType": "Bounce", "Type": "HardBounce"},
            [of_stream(BOUNCE)],
        ),
        ({"RecordType": "Bounce", "Type": "Unsubscribe"}, [unsubscribe("broadcast")]),
        ({"RecordType": "Bounce", "Type": "Transient"}, []),
        # "Spam Notification bounces do not cause the address to become deactivated":
        # https://postmarkapp.com/support/article/1065
        ({"RecordType": "Bounce", "Type": "SpamNotification"}, []),
        (
            {"RecordType": "SpamComplaint", "Type": "SpamComplaint"},
            [of_stream(COMPLAINT)],
        ),
        ({"RecordType": "Delivery"}, []),
    ],
)
def test_postmark(fields: dict[str, Any], expected: list[OptOut]) -> None:
    record = {
        "RecordType": "SubscriptionChange",
        "MessageID": "883953f4-6105-42a2-a16a-77a8eac79483",
        "MessageStream": "broadcast",
        "ChangedAt": "2020-02-01T10:53:34.416071Z",
        "Recipient": "bounced-address@wildbit.com",
        "Origin": "Recipient",
        "SuppressSending": True,
        **fields,
    }
    assert opt_outs("postmark", record) == expected


# https://resend.com/docs/webhooks/contacts/updated, /emails/bounced and /emails/complained
CONTACT = {
    "id": "e169aa45-1ecf-4183-9955-b1499d5701d3",
    "audience_id": "78261eea-8f8b-4381-83c6-79fa7120f1cf",
    "segment_ids": ["78261eea-8f8b-4381-83c6-79fa7120f1cf"],
    "created_at": "2024-10-10T15:11:94.110Z",
    "updated_at": "2024-10-11T23:47:56.678Z",
    "email": "steve.wozniak@gmail.com",
    "unsubscribed": True,
}


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("contact.updated", CONTACT, [unsubscribe()]),
        (
            "contact.updated",
            {key: value for key, value in CONTACT.items() if key != "segment_ids"},
            [unsubscribe("78261eea-8f8b-4381-83c6-79fa7120f1cf")],
        ),
        ("email.complained", {"to": ["a@b.c"]}, [COMPLAINT]),
        (
            "email.bounced",
            {"to": ["a@b.c"], "bounce": {"type": "Permanent", "subType": "Suppressed"}},
            [BOUNCE],
        ),
        ("email.bounced", {"to": ["a@b.c"], "bounce": {"type": "Transient"}}, []),
        ("email.suppressed", {"to": ["a@b.c"]}, []),
    ],
)
def test_resend(kind: str, data: dict[str, Any], expected: list[OptOut]) -> None:
    payload = {"type": kind, "created_at": "2024-10-11T23:47:56.678Z", "data": data}
    assert opt_outs("resend", payload) == expected


def test_resend_reports_a_contact_who_unsubscribed() -> None:
    payload = {"type": "contact.updated", "created_at": "2024-10-11T23:47:56.678Z", "data": CONTACT}
    provider = make("resend", OPTIONS["resend"])
    [event] = provider.translate(delivery_of("resend", payload)).events
    assert event.document["event"] == "Email Unsubscribed"
    assert event.document["timestamp"] == "2024-10-11T23:47:56.678Z"
    assert recipient_of(event) == ("email", "steve.wozniak@gmail.com")
    for changed in ({"unsubscribed": False}, {"unsubscribed": "true"}, {"unsubscribed": None}):
        payload["data"] = CONTACT | changed
        assert provider.translate(delivery_of("resend", payload)).ignored == 1


# https://docs.customer.io/integrations/api/webhooks/
ALL = ["email", "sms", "push", "whatsapp"]


@pytest.mark.parametrize(
    ("kind", "metric", "content", "expected"),
    [
        ("email", "unsubscribed", None, [unsubscribe()]),
        ("sms", "unsubscribed", None, [unsubscribe(channel="sms")]),
        ("slack", "unsubscribed", None, []),
        ("customer", "unsubscribed", None, [unsubscribe(channel=channel) for channel in ALL]),
        ("customer", "subscribed", None, []),
        ("email", "spammed", None, [COMPLAINT]),
        ("email", "bounced", None, [BOUNCE]),
        ("email", "deferred", None, []),
        ("sms", "bounced", None, []),
        (
            "customer",
            "cio_subscription_preferences_changed",
            '{"topics": {"topic_7": false, "topic_8": true, "topic_9": false}}',
            [unsubscribe("topic_7", "topic_9")],
        ),
        (
            "customer",
            "cio_subscription_preferences_changed",
            '{"topics": {"topic_8": true}, "channels": {"sms": false, "fax": false}}',
            [unsubscribe(channel="sms")],
        ),
        ("customer", "cio_subscription_preferences_changed", "not JSON", []),
        ("customer", "cio_subscription_preferences_changed", '{"topics": [false]}', []),
        ("customer", "cio_subscription_preferences_changed", None, []),
    ],
)
def test_customerio(kind: str, metric: str, content: str | None, expected: list[OptOut]) -> None:
    data = {"customer_id": "42", "email_address": "test@example.com", "content": content}
    payload = {
        "object_type": kind,
        "metric": metric,
        "event_id": "01E4C4CT6YDC7Y5M7FE1GWWPQJ",
        "timestamp": 1613063089,
        "data": data,
    }
    assert opt_outs("customerio", json.loads(json.dumps(payload))) == expected


# https://www.twilio.com/docs/messaging/tutorials/advanced-opt-out
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"OptOutType": "STOP"}, [OptOut("stop", "sms", ("MG1",))]),
        ({"OptOutType": "START"}, [OptOut("start", "sms", ("MG1",))]),
        ({"OptOutType": "STOP", "MessagingServiceSid": ""}, [OptOut("stop", "sms")]),
        (
            {"OptOutType": "STOP", "From": "whatsapp:+15558675310"},
            [OptOut("stop", "whatsapp", ("MG1",))],
        ),
        ({"OptOutType": "STOP", "From": "messenger:123"}, []),
        ({"MessageStatus": "failed", "ErrorCode": "21610"}, []),
    ],
)
def test_twilio(fields: dict[str, str], expected: list[OptOut]) -> None:
    form = {
        "MessageSid": "SM1",
        "SmsStatus": "received",
        "Body": "stop",
        "From": "+15558675310",
        "To": "+15550001111",
        "MessagingServiceSid": "MG1",
        **fields,
    }
    assert opt_outs("twilio", {"form": form, "query": {"userId": "u1"}}) == expected


def test_an_answer_is_never_of_a_user() -> None:
    """The URL is the same for all who answer, also if it names a user."""
    form = {"MessageSid": "SM1", "OptOutType": "STOP", "From": "+15558675310"}
    delivery = delivery_of("twilio", {"form": form, "query": {"userId": "u1"}})
    [event] = make("twilio", OPTIONS["twilio"]).translate(delivery).events
    assert "userId" not in event.document
    assert recipient_of(event) == ("phone", "+15558675310")
