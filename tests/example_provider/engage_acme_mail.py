# SPDX-License-Identifier: Apache-2.0
"""An example of a webhook provider: Acme Mail, which signs with HMAC-SHA256 and sends batches."""

from engage import api, webhooks

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["secret"],
    "properties": {
        "secret": {
            "description": "The signing secret of the webhook, or a list during a rotation.",
            "writeOnly": True,
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        }
    },
}
EVENTS = {
    "delivered": "Email Delivered",
    "opened": "Email Opened",
    "clicked": "Email Link Clicked",
    "bounced": "Email Bounced",
    "unsubscribed": "Email Unsubscribed",
}


class AcmeMail(webhooks.SecretProvider):
    # The conformance suite breaks each of these, bit by bit.
    signing = api.Signing(
        signature="acme-signature",
        body=True,
        timestamp="acme-timestamp",
        past=300,
        future=300,
    )
    setup = (
        "Acme Mail > Settings > Webhooks: paste the URL, copy the secret into the option secret."
    )
    opt_out_channels = ("email",)

    def verify(self, request, fetched):
        timestamp = webhooks.one_header(request, "acme-timestamp")
        signature = webhooks.decode_hex(webhooks.one_header(request, "acme-signature"))
        webhooks.check_timestamp(timestamp, request.now)
        webhooks.check_hmac(self.keys, timestamp.encode() + b"." + request.body, [signature])

    def translate(self, request):
        events, rejected, ignored = [], [], 0
        items = webhooks.parse_object(request.body).get("events")
        if not isinstance(items, list):
            raise api.PayloadInvalid("events: must be a list")
        for index, item in enumerate(items):
            if not isinstance(item, dict) or webhooks.message_id(item.get("id")) is None:
                rejected.append(api.Rejected(index, "is not an object with an id"))
            elif str(item.get("kind")) not in EVENTS:
                ignored += 1
            else:
                events.append(event_of(item, index))
        return api.Translation(events=events, ignored=ignored, rejected=rejected)


def event_of(item, index):
    custom = item.get("custom")
    name = EVENTS[item["kind"]]
    properties = webhooks.merged(item, without=("id", "kind", "at", "custom"))
    if name == "Email Bounced":
        properties["bounceType"] = "hard" if item.get("permanent") is True else "soft"
    document = webhooks.track(
        name,
        message_id=webhooks.message_id(item["id"]),
        timestamp=webhooks.unix_time(item.get("at")),
        user=webhooks.user_id(webhooks.at(custom, "userId")),
        properties=webhooks.spread(properties, custom, "custom", without=["userId"]),
    )
    recipient = webhooks.email_recipient(item.get("email"))
    opt_outs = webhooks.email_opt_outs(name, properties.get("bounceType"), item.get("list"))
    return api.TranslatedEvent(document, recipient, index, opt_outs=opt_outs)


@api.hookimpl
def engage_register_webhook(register):
    register("acme-mail", AcmeMail, SCHEMA)
