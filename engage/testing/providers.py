# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of webhook providers.

A provider says in :attr:`~engage.api.Provider.signing` what its scheme signs; the suite breaks each
part of that, bit by bit, and expects the delivery to be refused. Deliveries are made by ``sign``,
written from the provider's documentation rather than with the provider's own code::

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
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlencode

import hypothesis
import jsonschema
import orjson
import pytest
from hypothesis import strategies as st

from engage.api import (
    PayloadInvalid,
    Provider,
    ProviderContext,
    ProviderFactory,
    SignatureMismatch,
    Translation,
    WebhookRequest,
)

__all__ = ["ProviderConformance"]

#: Bytes of one signed part, and how a delivery is made in which they stand instead.
Part = tuple[bytes, Callable[[bytes], WebhookRequest]]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)

# The same examples in every run; each subclass runs them anew, to which hypothesis would object.
_EXAMPLES = hypothesis.settings(
    deadline=None,
    max_examples=200,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.differing_executors],
)

#: Bodies that no provider sends, whoever signed them.
JUNK = {
    "empty": b"",
    "not JSON": b"{not json",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "null": b"null",
    "a number": b"12345678901234567890123",
    "a string": b'"text"',
    "an empty object": b"{}",
    "an empty array": b"[]",
    "an array of nothing": b'[null, 1, [], {}, "x"]',
    "10 000 elements": b"[" + b",".join([b"{}"] * 10_000) + b"]",
    "nested 100 000 deep": b"[" * 100_000 + b"]" * 100_000,
    "objects nested 100 000 deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
}

#: Numbers to some parsers, and no timestamp.
ODD_TIMESTAMPS = ("", " 1", "1e9", "1_000", "+1", "-1", "0x1", "1.0", "1" * 20, "١٢٣", "nan")


class ProviderConformance:
    """Subclass it, fill in, and let pytest collect it."""

    #: The module that implements ``engage_register_webhook`` …
    plugin: ClassVar[str]
    #: … and the name that it registers; ``None``: the only one.
    provider: ClassVar[str | None] = None
    #: Options of a workspace, and of another one.
    options: ClassVar[Mapping[str, Any]]
    other_options: ClassVar[Mapping[str, Any]]
    #: The option that holds the secret, given as a list to test a rotation; ``None``: not tested.
    secret_option: ClassVar[str | None] = "secret"
    #: The body of a genuine delivery of at least one event.
    body: ClassVar[bytes]
    #: Headers that are not part of the authentication.
    headers: ClassVar[Mapping[str, str]] = {}
    url: ClassVar[str] = "https://events.example.com/api/public/webhooks/x"
    now: ClassVar[int] = 1_700_000_000
    #: What ``needs`` would have had fetched.
    fetched: ClassVar[bytes | None] = None

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        """:return: the headers that the provider adds to a delivery of ``body``."""
        raise NotImplementedError

    def delivery(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> WebhookRequest:
        """:return: a genuine delivery; to be overridden where the signature is in the body."""
        signed = {**self.headers, **self.sign(body, options, timestamp)}
        # Headers travel as bytes, and are read as Latin-1.
        headers = [(name, value.encode().decode("latin-1")) for name, value in signed.items()]
        return WebhookRequest(method="POST", headers=headers, body=body, url=self.url, now=self.now)

    def signed_parts(self, request: WebhookRequest) -> Iterator[Part]:
        """Yield what the scheme signs; to be overridden where that is a part of the body."""
        signing = self.make().signing
        if signing.form:
            yield from _form_parts(request)
        elif signing.body and request.body:
            yield request.body, lambda body: _with(request, body=body)
        if signing.url:
            # Scheme and host are the config's: no sender has a say in them.
            head, slash, target = request.url.partition("/api")
            yield (
                (slash + target).encode(),
                lambda changed: _with(request, url=head + changed.decode("latin-1")),
            )
        for name in signing.headers:
            yield _header_part(request, name, r"^(?P<value>.*)$", "value")
        if signing.timestamp is not None:
            yield _header_part(request, signing.timestamp, signing.timestamp_pattern, "timestamp")

    def with_signature(self, request: WebhookRequest, signature: str) -> WebhookRequest:
        """:return: the delivery with another text as its signature; see :meth:`signature`."""
        _, change = self._signature(request)
        return change(signature.encode("latin-1"))

    def signature(self, request: WebhookRequest) -> str:
        """:return: the text of the delivery's signature, as the header has it; to be overridden,
        like :meth:`with_signature`, where the signature is in the body.
        """
        return self._signature(request)[0].decode("latin-1")

    def make(self, options: Mapping[str, Any] | None = None) -> Provider:
        """:return: a provider, its options checked against its schema."""
        chosen = self.options if options is None else options
        # One for each test and options: to check a schema takes longer than most tests.
        made: dict[str, Provider] = self.__dict__.setdefault("_made", {})
        key = repr(chosen)
        if key not in made:
            made[key] = self._make(chosen)
        return made[key]

    def _make(self, options: Mapping[str, Any]) -> Provider:
        found: dict[str, tuple[ProviderFactory, Mapping[str, Any]]] = {}
        module = importlib.import_module(self.plugin)
        module.engage_register_webhook(
            lambda name, factory, schema: found.update({name: (factory, schema)})
        )
        name = self.provider if self.provider is not None else next(iter(found))
        factory, schema = found[name]
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(options, schema)
        public_url = self.url.partition("/api")[0]
        return factory(options, ProviderContext(workspace_id="acme", public_url=public_url))

    def genuine(self, timestamp: str | None = None) -> WebhookRequest:
        """:return: a delivery that verifies."""
        return self.delivery(self.body, self.options, timestamp or str(self.now))

    def verify(self, request: WebhookRequest, options: Mapping[str, Any] | None = None) -> None:
        """Verify as the core would.

        :raises SignatureMismatch: it does not.
        """
        provider = self.make(options)
        try:
            provider.needs(request)
            provider.verify(request, self.fetched)
        except PayloadInvalid as error:
            # Of a scheme whose signature stands in the body; to the core any error is a mismatch.
            raise SignatureMismatch(str(error)) from error

    def refused(self, request: WebhookRequest) -> None:
        """Check that a delivery is neither taken for a probe nor verified."""
        assert self.make().probe(request) is None
        with pytest.raises(SignatureMismatch):
            self.verify(request)

    def _signature(self, request: WebhookRequest) -> Part:
        signing = self.make().signing
        header = signing.signature
        if header is None:
            pytest.skip(
                "the scheme has no signature in a header (is it in the body? then override"
                " signature and with_signature)"
            )
        return _header_part(request, header, signing.signature_pattern, "signature")

    def _decoded(self, request: WebhookRequest) -> bytes:
        text = self.signature(request)
        if self.make().signing.encoding == "hex":
            return bytes.fromhex(text)
        return base64.b64decode(text)

    def _encoded(self, signature: bytes) -> str:
        if self.make().signing.encoding == "hex":
            return signature.hex()
        return base64.b64encode(signature).decode()

    def _authentication(self) -> list[str]:
        """Every header that takes part in it."""
        signing = self.make().signing
        found = [signing.signature, signing.credential, signing.timestamp, *signing.headers]
        return sorted({name for name in found if name is not None})

    def test_a_genuine_delivery_becomes_events(self) -> None:
        request = self.genuine()
        assert self.make().probe(request) is None
        self.verify(request)
        translation = self.make().translate(request)
        assert translation.events
        assert not translation.rejected
        for event in translation.events:
            _check_document(event.document)
            known = event.document.get("userId") or event.document.get("anonymousId")
            assert known or event.recipient is not None

    def test_header_names_have_no_case(self) -> None:
        request = self.genuine()
        self.verify(_with(request, headers=[(n.upper(), v) for n, v in request.headers]))
        self.verify(_with(request, headers=[(n.lower(), v) for n, v in request.headers]))

    def test_a_redelivery_has_the_same_message_ids(self) -> None:
        first = self.genuine()
        again = _with(self.genuine(str(self.now + 60)), now=self.now + 61)
        ids = [
            [event.document["messageId"] for event in self.make().translate(request).events]
            for request in (first, again)
        ]
        assert ids[0] == ids[1]

    def test_during_a_rotation_both_secrets_are_good(self) -> None:
        if self.secret_option is None:
            pytest.skip("nothing to rotate")
        assert self.secret_option in self.options, "secret_option: name the option with the secret"
        old, new = (o[self.secret_option] for o in (self.options, self.other_options))
        both = {**self.options, self.secret_option: [new, old]}
        for options in (self.options, {**self.options, self.secret_option: new}):
            self.verify(self.delivery(self.body, options, str(self.now)), both)

    def test_credentials_tell_workspaces_apart(self) -> None:
        mine, others = self.make().credentials(), self.make(self.other_options).credentials()
        assert mine
        assert others
        assert all(mine)
        assert not set(mine) & set(others)

    def test_another_workspaces_secret(self) -> None:
        self.refused(self.delivery(self.body, self.other_options, str(self.now)))

    def test_nothing_of_the_authentication_may_be_missing_empty_or_there_twice(self) -> None:
        request = self.genuine()
        for name in self._authentication():
            others = [pair for pair in request.headers if pair[0].lower() != name.lower()]
            [value] = request.values(name)
            self.refused(_with(request, headers=others))
            self.refused(_with(request, headers=[*others, (name, "")]))
            for twice in ((value, value), ("x", value), (value, "x")):
                self.refused(_with(request, headers=[*others, *((name, v) for v in twice)]))
            self.refused(_with(request, headers=[*others, (name, f"{value}, {value}x")]))

    def test_a_credential_must_be_whole(self) -> None:
        name = self.make().signing.credential
        if name is None:
            pytest.skip("the scheme signs")
        request = self.genuine()
        [value] = request.values(name)
        others = [pair for pair in request.headers if pair[0].lower() != name.lower()]
        for wrong in (value[:-1], value + "x", value.swapcase(), "é" + value, "\xff", " "):
            if wrong != value:
                self.refused(_with(request, headers=[*others, (name, wrong)]))

    def test_every_bit_of_the_signature_counts(self) -> None:
        request = self.genuine()
        signature = self._decoded(request)
        for bit in range(len(signature) * 8):
            self.refused(self.with_signature(request, self._encoded(_flipped(signature, bit))))

    def test_the_signature_is_whole_and_in_one_spelling(self) -> None:
        request = self.genuine()
        text, decoded = self.signature(request), self._decoded(request)
        wrong = [text[:-1], text[1:], text + text, text + " ", "é" + text[1:], "\xff", "=", "!"]
        wrong += [self._encoded(decoded[:-1]), self._encoded(decoded + b"\0")]
        if self.make().signing.encoding == "hex":
            wrong += [text.upper(), text + "0", base64.b64encode(decoded).decode()]
        else:
            wrong += [text.lower(), text + "=", decoded.hex(), f"{text[:4]}\t{text[4:]}"]
            wrong += [text.rstrip("="), text.replace("+", "-").replace("/", "_")]
            wrong += list(_other_spellings(text))
        for spelling in wrong:
            if spelling != text:
                self.refused(self.with_signature(request, spelling))

    @_EXAMPLES
    @hypothesis.given(data=st.data())
    def test_any_flipped_bit_of_what_is_signed(self, data: st.DataObject) -> None:
        parts = list(self.signed_parts(self.genuine()))
        if not parts:
            return
        content, change = data.draw(st.sampled_from(parts))
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        self.refused(change(_flipped(content, bit)))

    def test_a_signature_of_another_body(self) -> None:
        if not any(True for _ in self.signed_parts(self.genuine())):
            pytest.skip("the scheme signs nothing")
        request = self.genuine()
        for content, change in self.signed_parts(request):
            for other in (content + b"0", content[:-1], b"0" + content):
                self.refused(change(other))

    def test_a_timestamp_must_be_recent(self) -> None:
        signing = self.make().signing
        request = self.genuine()
        if signing.past is not None:
            self.verify(_with(request, now=self.now + signing.past))
            self.refused(_with(request, now=self.now + signing.past + 1))
        if signing.future is not None:
            self.verify(_with(request, now=self.now - signing.future))
            self.refused(_with(request, now=self.now - signing.future - 1))

    @pytest.mark.parametrize("odd", ODD_TIMESTAMPS)
    def test_a_timestamp_has_one_spelling(self, odd: str) -> None:
        signing = self.make().signing
        if signing.timestamp is None:
            pytest.skip("the scheme has no timestamp")
        spelled = odd.replace("1", str(self.now), 1) if len(odd) < 3 else odd
        try:
            request = self.delivery(self.body, self.options, spelled)
        except UnicodeError:
            return  # no sender can sign that
        for now in (self.now, 1, 1_000, 1_000_000_000, 0):
            self.refused(_with(request, now=now))

    @pytest.mark.parametrize("kind", JUNK)
    def test_a_signed_body_may_be_anything(self, kind: str) -> None:
        request = self.delivery(JUNK[kind], self.options, str(self.now))
        if self.make().probe(request) is None:
            with contextlib.suppress(SignatureMismatch):  # some schemes cannot sign everything
                self.verify(request)
            self._translate(request)

    @_EXAMPLES
    @hypothesis.given(data=st.data())
    def test_any_value_may_stand_anywhere(self, data: st.DataObject) -> None:
        try:
            payload = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return
        path = data.draw(st.sampled_from(list(_paths(payload))))
        changed = _replaced(payload, path, data.draw(JSON))
        self._translate(self.delivery(orjson.dumps(changed), self.options, str(self.now)))

    def _translate(self, request: WebhookRequest) -> None:
        try:
            translation: Translation = self.make().translate(request)
        except PayloadInvalid:
            return
        for event in translation.events:
            # What the pipeline refuses becomes a dead letter; what is no JSON would be a fault.
            orjson.dumps(event.document)


def _check_document(document: dict[str, Any]) -> None:
    orjson.dumps(document)
    assert isinstance(document["type"], str)
    message_id = document["messageId"]
    assert isinstance(message_id, str | int)
    assert message_id != ""


def _with(request: WebhookRequest, **changes: Any) -> WebhookRequest:
    fields = {"method", "headers", "body", "url", "now"}
    return WebhookRequest(**{**{name: getattr(request, name) for name in fields}, **changes})


def _header_part(request: WebhookRequest, header: str, pattern: str, group: str) -> Part:
    [value] = request.values(header)
    match = re.search(pattern, value)
    assert match is not None, f"{header}: {pattern} is not there"
    start, end = match.span(group)

    def change(content: bytes) -> WebhookRequest:
        changed = value[:start] + content.decode("latin-1") + value[end:]
        others = [pair for pair in request.headers if pair[0].lower() != header.lower()]
        return _with(request, headers=[*others, (header, changed)])

    return value[start:end].encode("latin-1"), change


def _form_parts(request: WebhookRequest) -> Iterator[Part]:
    """The decoded names and values: an escape may be spelled in several ways."""
    fields = parse_qsl(request.body.decode("ascii"), keep_blank_values=True)
    for index, pair in enumerate(fields):
        for place, text in enumerate(pair):

            def change(content: bytes, index: int = index, place: int = place) -> WebhookRequest:
                changed: list[tuple[str | bytes, str | bytes]] = [*fields]
                old = changed[index]
                changed[index] = (content, old[1]) if place == 0 else (old[0], content)
                return _with(request, body=urlencode(changed).encode())

            if text:
                yield text.encode(), change


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _other_spellings(text: str) -> Iterator[str]:
    """Base64 that decodes to the same bytes: the last character has bits that mean nothing."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    stem = text.rstrip("=")
    padding = text[len(stem) :]
    for character in alphabet:
        other = stem[:-1] + character + padding
        if other != text and base64.b64decode(other) == base64.b64decode(text):
            yield other


Path = tuple[str | int, ...]


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    if isinstance(value, dict):
        for key, member in value.items():
            yield from _paths(member, (*path, key))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from _paths(member, (*path, index))


def _replaced(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copy
