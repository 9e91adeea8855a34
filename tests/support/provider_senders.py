# SPDX-License-Identifier: Apache-2.0
"""Genuine deliveries of each provider to a server, in parts that a forger may change.

They are made by the conformance cases of ``provider_cases``.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from engage.testing import ProviderConformance
from support.provider_cases import CASES, Mailchimp, MixpanelStream
from support.provider_sns import certificate

PUBLIC_URL = "https://events.example.com"
#: The options that have a secret.
_SECRETS = {
    *("secret", "signing_key", "client_secret", "webhook_key", "auth_token"),
    *("value", "basic_password"),
}

#: A header's name, and its value as bytes.
Header = tuple[str, bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sender:
    """How a provider sends deliveries."""

    case: type[ProviderConformance]
    #: The options of the workspace, and of another one.
    options: Mapping[str, Any]
    other: Mapping[str, Any]
    #: A payload of one event or more.
    payload: bytes
    #: The header with the signature or the credential; ``None``: it is in the body.
    proof: str | None
    #: Whether a proof fits one body only.
    signs: bool

    @functools.cached_property
    def _suite(self) -> Any:
        return self.case()

    def deliver(
        self,
        target: str,
        now: float,
        *,
        payload: bytes | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[list[Header], bytes]:
        """Return the headers and the body of a delivery to a path and query."""
        suite = self._suite
        suite.url = PUBLIC_URL + target
        body = self.payload if payload is None else payload
        if self.case is Mailchimp:
            body = urlencode({"mandrill_events": body}).encode()
        sent = suite.delivery(body, self.options if options is None else options, str(int(now)))
        # Stripe signs tests with v0, which a forger may change.
        headers = [(name, value.partition(",v0=")[0]) for name, value in sent.headers]
        return [(name, value.encode("latin-1")) for name, value in headers], sent.body


def _own(provider: str, options: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return options with a secret that no other provider and no other workspace has."""
    secret = f"{provider}-secret-of-workspace-{number}"
    if provider == "amazon-ses":  # so that nothing is fetched
        options = {**options, "signing_cert_pem": certificate().decode()}
    return {
        name: value
        if name not in _SECRETS
        else "whsec_" + base64.b64encode(secret.encode()).decode()
        if value.startswith("whsec_")
        else secret
        for name, value in options.items()
    }


#: The payloads that are not the bodies of the first cases.
_PAYLOADS = {
    "mailchimp": json.dumps(Mailchimp.items).encode(),
    "mixpanel": MixpanelStream.body,
}


def _sender(provider: str, case: type[ProviderConformance]) -> Sender:
    signing = case().make().signing
    return Sender(
        case=case,
        options=_own(provider, case.options, 1),
        other=_own(provider, case.other_options, 2),
        payload=_PAYLOADS.get(provider, case.body),
        proof=signing.signature or signing.credential,
        signs=signing.credential is None,
    )


#: Provider → how it sends, in its first case.
SENDERS: dict[str, Sender] = {}
for _name, _case in CASES.items():
    _provider = _name.partition("-")[0].replace("_", "-")
    if _provider not in SENDERS:
        SENDERS[_provider] = _sender(_provider, _case)


def webhooks_table(which: str = "options", providers: Mapping[str, Sender] = SENDERS) -> str:
    """Return the tables ``[workspaces.webhooks.…]`` of a config, with ``options`` or ``other``."""
    lines = []
    for provider, sender in providers.items():
        lines.append(f"[workspaces.webhooks.{provider}]")
        options = getattr(sender, which)
        # Strings, lists and booleans of JSON are valid TOML.
        lines += [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    return "\n".join(lines) + "\n"
