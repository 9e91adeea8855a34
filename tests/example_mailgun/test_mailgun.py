# SPDX-License-Identifier: Apache-2.0
import hmac

from engage.testing import ProviderConformance


class TestMailgun(ProviderConformance):
    plugin = "engage_mailgun"
    secret_option = "signing_key"
    options = {"signing_key": "one"}
    other_options = {"signing_key": "another"}
    body = (
        b'{"event-data": {"event": "opened", "id": "e1", "recipient": "a@b.c", "timestamp": 1.5}}'
    )

    def sign(self, body, options, timestamp):
        token = "e0b5477167110d68991efc6b9f89f0a11066af27834600e123"
        signed = (timestamp + token).encode()
        signature = hmac.new(options["signing_key"].encode(), signed, "sha256").hexdigest()
        return {"signature": {"timestamp": timestamp, "token": token, "signature": signature}}
