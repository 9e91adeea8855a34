# SPDX-License-Identifier: Apache-2.0
"""An example of a webhook provider with the signature in the body: Mailgun."""

from engage import api, webhooks

SECRET = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["signing_key"],
    "properties": {"signing_key": {**SECRET, "writeOnly": True}},
}
EVENTS = {
    "delivered": "Email Delivered",
    "failed": "Email Bounced",
    "opened": "Email Opened",
    "clicked": "Email Link Clicked",
    "unsubscribed": "Email Unsubscribed",
    "complained": "Email Marked as Spam",
}
HOURS = 9  # Mailgun repeats a delivery for eight hours, perhaps with the first signature


class Mailgun(webhooks.SecretProvider):
    secret_option = "signing_key"
    signing = api.Signing(
        members=("signature.timestamp", "signature.token"),
        signature_member="signature.signature",
        timestamp_member="signature.timestamp",
        past=HOURS * 3600,
        future=300,
    )
    setup = "Mailgun > Send > Webhooks: add the URL, copy the HTTP webhook signing key."

    def verify(self, request, fetched):
        members = (*self.signing.members, self.signing.signature_member)
        timestamp, token, signature = webhooks.body_members(request, *members)
        webhooks.check_timestamp(timestamp, request.now, past=HOURS * 3600)
        signed = (timestamp + token).encode()
        webhooks.check_hmac(self.keys, signed, [webhooks.decode_hex(signature)])

    def translate(self, request):
        data = webhooks.parse_object(request.body).get("event-data")
        if not isinstance(data, dict) or webhooks.message_id(data.get("id")) is None:
            raise api.PayloadInvalid("event-data: must be an object with an id")
        if (name := EVENTS.get(str(data.get("event")))) is None:
            return api.Translation(ignored=1)
        properties = webhooks.merged(data, without=("id", "event", "timestamp", "user-variables"))
        if name == "Email Bounced" and data.get("severity") == "temporary":
            name = "Email Delayed"  # Mailgun tries again
        elif name == "Email Bounced":
            properties["bounceType"] = "hard"
        custom = data.get("user-variables")
        user, without = webhooks.own_user_id(custom)
        document = webhooks.track(
            name,
            message_id=webhooks.message_id(data["id"]),
            timestamp=webhooks.unix_time(data.get("timestamp")),
            user=user,
            properties=webhooks.spread(properties, custom, "user-variables", without=without),
        )
        recipient = webhooks.email_recipient(data.get("recipient"))
        return api.Translation(events=[api.TranslatedEvent(document, recipient)])


@api.hookimpl
def engage_register_webhook(register):
    register("mailgun", Mailgun, SCHEMA)
