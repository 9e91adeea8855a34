# SPDX-License-Identifier: Apache-2.0
import hmac

from engage.testing import ProviderConformance


class TestAcmeMail(ProviderConformance):
    plugin = "engage_acme_mail"
    options = {"secret": "one"}
    other_options = {"secret": "another"}
    body = b'{"events": [{"id": "e1", "kind": "opened", "at": 1700000000, "email": "a@b.c"}]}'
    opt_out_body = body.replace(b"opened", b"unsubscribed")

    def sign(self, body, options, timestamp):
        key, signed = options["secret"].encode(), timestamp.encode() + b"." + body
        signature = hmac.new(key, signed, "sha256").hexdigest()
        return {"Acme-Timestamp": timestamp, "Acme-Signature": signature}
