# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of webhook providers.

A provider declares in :attr:`~engage.api.Provider.signing` what its scheme signs. The suite changes
each part of that, bit by bit, and expects that the delivery is refused. ``sign`` makes the
deliveries; write it from the documentation of the service, not with the code of the provider::

    from engage.testing import ProviderConformance

    class TestAcme(ProviderConformance):
        plugin = "acme_plugin"
        options = {"secret": "one"}
        other_options = {"secret": "another"}
        body = b'{"id": "e1", "kind": "open", "email": "a@example.com"}'

        def sign(self, body, options, timestamp):
            key = options["secret"].encode()
            return {"x-acme-signature": hmac.new(key, body, "sha256").hexdigest()}
"""

from __future__ import annotations

import base64
import contextlib
import functools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, get_args, get_type_hints

import hypothesis
import orjson
import pytest
from hypothesis import strategies as st

from engage.api import (
    OptOut,
    PayloadInvalid,
    Provider,
    ProviderContext,
    SignatureMismatch,
    TranslatedEvent,
    Translation,
    WebhookRequest,
)

from ..harness import find_factory
from .mutations import (
    JSON,
    JUNK,
    ODD_TIMESTAMPS,
    Part,
    flip_bit,
    form_parts,
    header_part,
    member_part,
    other_spellings,
    paths,
    with_members,
    with_value,
)

__all__ = ["Part", "ProviderConformance"]

# The same examples in every run. Each subclass runs them again, which hypothesis would report.
_EXAMPLES = hypothesis.settings(
    deadline=None,
    max_examples=200,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.differing_executors],
)


class ProviderConformance:
    """The tests of a provider. Subclass it and define what follows."""

    #: The module that implements ``engage_register_webhook``.
    plugin: ClassVar[str]
    #: The name that it registers; ``None``: the only one.
    provider: ClassVar[str | None] = None
    #: The options of two workspaces.
    options: ClassVar[Mapping[str, Any]]
    other_options: ClassVar[Mapping[str, Any]]
    #: The option with the secret, which may be a list during a rotation; ``None``: not tested.
    secret_option: ClassVar[str | None] = "secret"
    #: The body of a genuine delivery of at least one event.
    body: ClassVar[bytes]
    #: The body of a genuine delivery that reports an opt-out; required if the provider has
    #: ``opt_out_channels``.
    opt_out_body: ClassVar[bytes | None] = None
    #: Headers that are not part of the authentication.
    headers: ClassVar[Mapping[str, str]] = {}
    #: The URL of the delivery.
    url: ClassVar[str] = "https://events.example.com/api/public/webhooks/x"
    #: The time of the delivery, in seconds since 1970 UTC.
    now: ClassVar[int] = 1_700_000_000
    #: The document that ``needs`` requests, as the core would have fetched it.
    fetched: ClassVar[bytes | None] = None

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, Any]:
        """Return the headers that authenticate a delivery of ``body``.

        If the signature is in the body, return the members to add to the body instead.

        :param timestamp: seconds since 1970 UTC, for a scheme that signs the time.
        """
        raise NotImplementedError

    def delivery(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> WebhookRequest:
        """Return a genuine delivery."""
        signed = self.sign(body, options, timestamp)
        if self.make().signing.signature_member is not None:
            body, signed = with_members(body, signed), {}
        # The headers of a request are bytes, which the server decodes as Latin-1.
        named = {**self.headers, **signed}
        headers = [(name, value.encode().decode("latin-1")) for name, value in named.items()]
        return WebhookRequest(method="POST", headers=headers, body=body, url=self.url, now=self.now)

    def signed_parts(self, request: WebhookRequest) -> Iterator[Part]:
        """Yield the parts that the scheme signs."""
        signing = self.make().signing
        if signing.form:
            yield from form_parts(request)
        elif signing.body and request.body:
            yield request.body, lambda body: replace(request, body=body)
        if signing.url:
            # Scheme and host come from the config: a sender cannot change them.
            head, slash, target = request.url.partition("/api")
            yield (
                (slash + target).encode(),
                lambda changed: replace(request, url=head + changed.decode("latin-1")),
            )
        for path in signing.members:
            yield member_part(request, path)
        for name in signing.headers:
            yield header_part(request, name, r"^(?P<value>.*)$", "value")
        if signing.timestamp is not None:
            yield header_part(request, signing.timestamp, signing.timestamp_pattern, "timestamp")

    def with_signature(self, request: WebhookRequest, signature: str) -> WebhookRequest:
        """Return the delivery with another text as its signature; see :meth:`signature`."""
        _, change = self._signature(request)
        return change(signature.encode())

    def signature(self, request: WebhookRequest) -> str:
        """Return the signature of a delivery, as the text in the header or body."""
        return self._signature(request)[0].decode()

    def make(self, options: Mapping[str, Any] | None = None) -> Provider:
        """Return a provider, after checking the options with its schema."""
        chosen = self.options if options is None else options
        # One for each test and options, because checking a schema takes longer than most tests.
        made: dict[str, Provider] = self.__dict__.setdefault("_made", {})
        key = repr(chosen)
        if key not in made:
            made[key] = self._make(chosen)
        return made[key]

    def _make(self, options: Mapping[str, Any]) -> Provider:
        factory, _ = find_factory(self.plugin, self.provider, "webhook")
        public_url = self.url.partition("/api")[0]
        made: Provider = factory(
            options, ProviderContext(workspace_id="acme", public_url=public_url)
        )
        return made

    def genuine(self, timestamp: str | None = None) -> WebhookRequest:
        """Return a delivery that can be verified."""
        return self.delivery(self.body, self.options, timestamp or str(self.now))

    def verify(self, request: WebhookRequest, options: Mapping[str, Any] | None = None) -> None:
        """Verify a delivery as the core does.

        :raises SignatureMismatch: if it is not genuine.
        """
        provider = self.make(options)
        try:
            provider.needs(request)
            provider.verify(request, self.fetched)
        except PayloadInvalid as error:
            # The signature is in the body, which cannot be parsed. The core takes any error here
            # for a mismatch.
            raise SignatureMismatch(str(error)) from error

    def refused(self, request: WebhookRequest) -> None:
        """Check that a delivery is refused, and not taken for a probe."""
        assert self.make().probe(request) is None
        with pytest.raises(SignatureMismatch):
            self.verify(request)

    def _signature(self, request: WebhookRequest) -> Part:
        signing = self.make().signing
        if signing.signature_member is not None:
            return member_part(request, signing.signature_member)
        if signing.signature is None:
            pytest.skip("the scheme has no signature")
        return header_part(request, signing.signature, signing.signature_pattern, "signature")

    def _decoded(self, request: WebhookRequest) -> bytes:
        text, encoding = self.signature(request), self.make().signing.encoding
        try:
            if encoding == "hex":
                return bytes.fromhex(text)
            return base64.b64decode(text, validate=True)
        except ValueError:
            pytest.fail(f"signing.encoding, signing.signature_pattern: {text!r} is not {encoding}")

    def _encoded(self, signature: bytes) -> str:
        if self.make().signing.encoding == "hex":
            return signature.hex()
        return base64.b64encode(signature).decode()

    def _authentication(self) -> list[str]:
        """Return the names of all headers that are part of the authentication."""
        signing = self.make().signing
        names = [signing.signature, signing.credential, signing.timestamp, *signing.headers]
        return sorted({name for name in names if name is not None})

    def test_a_genuine_delivery_becomes_events(self) -> None:
        request = self.genuine()
        assert self.make().probe(request) is None
        self.verify(request)
        translation = self.make().translate(request)
        assert translation.events
        assert not translation.rejected
        for event in translation.events:
            _check_document(event.document)
            named = event.document.get("userId") or event.document.get("anonymousId")
            assert named or event.recipient is not None
            self._check_opt_outs(event)

    def test_an_opt_out_is_reported(self) -> None:
        if not self.make().opt_out_channels:
            pytest.skip("the provider reports no opt-outs")
        assert self.opt_out_body is not None, "opt_out_body: a delivery that reports an opt-out"
        request = self.delivery(self.opt_out_body, self.options, str(self.now))
        self.verify(request)
        first, again = (
            [event for event in self.make().translate(sent).events if event.opt_outs]
            for sent in (request, replace(request, now=self.now + 1))
        )
        assert first, "opt_out_body: no event of it has opt_outs"
        # A repeated delivery is applied once: its events have the same ids and times.
        assert [event.document for event in first] == [event.document for event in again]
        for event in first:
            assert event.document.get("userId") or event.recipient is not None
            self._check_opt_outs(event)

    def test_header_names_have_no_case(self) -> None:
        request = self.genuine()
        self.verify(replace(request, headers=[(n.upper(), v) for n, v in request.headers]))
        self.verify(replace(request, headers=[(n.lower(), v) for n, v in request.headers]))

    def test_a_redelivery_has_the_same_message_ids(self) -> None:
        first = self.genuine()
        again = replace(self.genuine(str(self.now + 60)), now=self.now + 61)
        ids = [
            [event.document["messageId"] for event in self.make().translate(request).events]
            for request in (first, again)
        ]
        assert ids[0] == ids[1]

    def test_both_secrets_are_accepted_during_a_rotation(self) -> None:
        if self.secret_option is None:
            pytest.skip("there is no secret to rotate")
        assert self.secret_option in self.options, "secret_option: name the option with the secret"
        old, new = (o[self.secret_option] for o in (self.options, self.other_options))
        both = {**self.options, self.secret_option: [new, old]}
        for options in (self.options, {**self.options, self.secret_option: new}):
            self.verify(self.delivery(self.body, options, str(self.now)), both)

    def test_the_secret_is_never_shown(self) -> None:
        if self.secret_option is not None:
            _, schema = find_factory(self.plugin, self.provider, "webhook")
            option = schema["properties"][self.secret_option]
            assert option.get("writeOnly"), f"mark the option {self.secret_option} as writeOnly"

    def test_credentials_tell_workspaces_apart(self) -> None:
        mine, others = self.make().credentials(), self.make(self.other_options).credentials()
        assert mine
        assert others
        assert all(mine)
        assert not set(mine) & set(others)

    def test_the_secret_of_another_workspace_is_refused(self) -> None:
        self.refused(self.delivery(self.body, self.other_options, str(self.now)))

    def test_a_missing_empty_or_repeated_authentication_header_is_refused(self) -> None:
        request = self.genuine()
        for name in self._authentication():
            others = [pair for pair in request.headers if pair[0].lower() != name.lower()]
            [value] = request.values(name)
            self.refused(replace(request, headers=others))
            self.refused(replace(request, headers=[*others, (name, "")]))
            for twice in ((value, value), ("x", value), (value, "x")):
                self.refused(replace(request, headers=[*others, *((name, v) for v in twice)]))
            self.refused(replace(request, headers=[*others, (name, f"{value}, {value}x")]))

    def test_a_missing_or_mistyped_member_is_refused(self) -> None:
        signing = self.make().signing
        request = self.genuine()
        members = {*signing.members, signing.signature_member, signing.timestamp_member}
        for path in filter(None, members):
            body = orjson.loads(request.body)
            keys = tuple(path.split("."))
            text = functools.reduce(operator.getitem, keys, body)
            for end in range(1, len(keys) + 1):
                for value in (None, "", 0, True, [], {}, [text], {"a": text}):
                    changed = orjson.dumps(with_value(body, keys[:end], value))
                    self.refused(replace(request, body=changed))

    def test_a_credential_must_be_complete(self) -> None:
        name = self.make().signing.credential
        if name is None:
            pytest.skip("the scheme has no credential in a header")
        request = self.genuine()
        [value] = request.values(name)
        others = [pair for pair in request.headers if pair[0].lower() != name.lower()]
        for wrong in (value[:-1], value + "x", value.swapcase(), "é" + value, "\xff", " "):
            if wrong != value:
                self.refused(replace(request, headers=[*others, (name, wrong)]))

    def test_every_bit_of_the_signature_counts(self) -> None:
        request = self.genuine()
        signature = self._decoded(request)
        for bit in range(len(signature) * 8):
            self.refused(self.with_signature(request, self._encoded(flip_bit(signature, bit))))

    def test_a_signature_has_one_spelling_and_is_complete(self) -> None:
        request = self.genuine()
        text, decoded = self.signature(request), self._decoded(request)
        wrong = [text[:-1], text[1:], text + text, text + " ", "é" + text[1:], "\xff", "=", "!"]
        wrong += [self._encoded(decoded[:-1]), self._encoded(decoded + b"\0")]
        if self.make().signing.encoding == "hex":
            wrong += [text.upper(), text + "0", base64.b64encode(decoded).decode()]
        else:
            wrong += [text.lower(), text + "=", decoded.hex(), f"{text[:4]}\t{text[4:]}"]
            wrong += [text.rstrip("="), text.replace("+", "-").replace("/", "_")]
            wrong += list(other_spellings(text))
        for spelling in wrong:
            if spelling != text:
                self.refused(self.with_signature(request, spelling))

    @_EXAMPLES
    @hypothesis.given(data=st.data())
    def test_every_bit_of_what_is_signed_counts(self, data: st.DataObject) -> None:
        parts = list(self.signed_parts(self.genuine()))
        if not parts:
            return
        content, change = data.draw(st.sampled_from(parts))
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        self.refused(change(flip_bit(content, bit)))

    def test_a_signature_of_other_content_is_refused(self) -> None:
        if not any(True for _ in self.signed_parts(self.genuine())):
            pytest.skip("the scheme signs nothing")
        request = self.genuine()
        for content, change in self.signed_parts(request):
            for other in (content + b"0", content[:-1], b"0" + content):
                self.refused(change(other))

    def test_the_time_of_signing_is_declared(self) -> None:
        signing, time = self.make().signing, "1600000001"
        if time in repr(self.genuine(time)):
            declared = signing.timestamp or signing.timestamp_member
            assert declared, "sign adds a time: declare it in signing, with past and future"
            assert signing.past is not None, "signing.past: how old may a delivery be?"

    def test_a_timestamp_must_be_recent(self) -> None:
        signing = self.make().signing
        request = self.genuine()
        if signing.past is not None:
            self.verify(replace(request, now=self.now + signing.past))
            self.refused(replace(request, now=self.now + signing.past + 1))
        if signing.future is not None:
            self.verify(replace(request, now=self.now - signing.future))
            self.refused(replace(request, now=self.now - signing.future - 1))

    @pytest.mark.parametrize("odd", ODD_TIMESTAMPS)
    def test_a_timestamp_has_one_spelling(self, odd: str) -> None:
        signing = self.make().signing
        if signing.timestamp is None and signing.timestamp_member is None:
            pytest.skip("the scheme has no timestamp")
        spelled = odd.replace("1", str(self.now), 1) if len(odd) < 3 else odd
        try:
            request = self.delivery(self.body, self.options, spelled)
        except UnicodeError:
            return  # A sender cannot sign that.
        for now in (self.now, 1, 1_000, 1_000_000_000, 0):
            self.refused(replace(request, now=now))

    @pytest.mark.parametrize("kind", JUNK)
    def test_an_unexpected_body_is_handled(self, kind: str) -> None:
        request = self.delivery(JUNK[kind], self.options, str(self.now))
        if self.make().probe(request) is None:
            with contextlib.suppress(SignatureMismatch):  # Some schemes cannot sign everything.
                self.verify(request)
            self._translate(request)

    @_EXAMPLES
    @hypothesis.given(data=st.data())
    def test_an_unexpected_value_is_handled(self, data: st.DataObject) -> None:
        try:
            payload = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return
        path = data.draw(st.sampled_from(list(paths(payload))))
        changed = with_value(payload, path, data.draw(JSON))
        self._translate(self.delivery(orjson.dumps(changed), self.options, str(self.now)))

    def _translate(self, request: WebhookRequest) -> None:
        try:
            translation: Translation = self.make().translate(request)
        except PayloadInvalid:
            return
        for event in translation.events:
            # The pipeline may refuse a document, but it must be JSON.
            orjson.dumps(event.document)
            self._check_opt_outs(event)

    def _check_opt_outs(self, event: TranslatedEvent) -> None:
        channels = self.make().opt_out_channels
        for opt_out in event.opt_outs:
            assert opt_out.kind in get_args(get_type_hints(OptOut)["kind"])
            assert opt_out.channel in channels, "name the channel in opt_out_channels"
            assert not isinstance(opt_out.groups, str), "groups: must be a sequence of texts"
            assert all(isinstance(group, str) and group for group in opt_out.groups)


def _check_document(document: dict[str, Any]) -> None:
    orjson.dumps(document)
    assert isinstance(document["type"], str)
    message_id = document["messageId"]
    assert isinstance(message_id, str | int)
    assert message_id != ""
