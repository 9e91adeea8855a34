# SPDX-License-Identifier: Apache-2.0
"""Reading the bodies of deliveries: JSON, and elements that cannot be stored."""

from __future__ import annotations

import json
import random
from urllib.parse import parse_qsl, urlencode

import pytest

from engage.api import PayloadInvalid, SignatureMismatch
from engage.webhooks import (
    body_members,
    form_bytes,
    form_fields,
    parse_envelope,
    parse_json,
    parse_object,
)
from support.each import each
from support.providers import make, request, signature_vectors

#: Values that are JSON and cannot be stored.
UNKEEPABLE = [
    "12345678901234567890",
    "-" + "9" * 5000,
    "1e999",
    '{"x":[{"\\udfff":1,"\\ud800":2}]}',
    '{"userId":"u\\ud83d"}',
    '{"x":' + "[" * 1000 + "]" * 1000 + "}",
]


@each("value", UNKEEPABLE)
def test_an_element_that_cannot_be_stored_is_rejected_alone(value: str) -> None:
    whole = f'[{{"a":1.5,"b":"é"}},{{"a":{value}}},9223372036854775807,{value}]'
    assert parse_json(whole) == [{"a": 1.5, "b": "é"}, None, 9223372036854775807, None]
    assert parse_json(whole.encode()) == parse_json(b"\xef\xbb\xbf" + whole.encode())
    within = f'{{"x":{{"y":[1,{value}]}},"z":[2]}}'
    assert parse_json(within, elements="x.y") == {"x": {"y": [1, None]}, "z": [2]}
    assert parse_object(within, elements="x.y")["x"] == {"y": [1, None]}


@each("value", UNKEEPABLE)
@each(
    "body, elements",
    [
        *(("{}", None), ('{{"x":{}}}', None), ('{{"x":[{}]}}', None), ('{{"x":[1],"y":{}}}', "x")),
        *(('{{"x":[1],"y":[{}]}}', "x"), ('{{"x":{}}}', "x"), ('{{"x":{{"y":{}}}}}', "x.y.z")),
    ],
)
def test_such_a_value_elsewhere_makes_the_body_invalid(
    value: str, body: str, elements: str | None
) -> None:
    with pytest.raises(PayloadInvalid):
        parse_json(body.format(value), elements=elements)


@pytest.mark.parametrize("body", ["{}", '[1,{{"userId":"u","x":{}}}]', '{{"x":{}}}'])
def test_what_has_a_faithful_form_is_kept(body: str) -> None:
    """As in the events of clients."""
    for value, kept in (
        (r'"half \ud83d"', "half \ufffd"),
        (r'{"\udc00":["\ud83d\ude00"]}', {"\ufffd": ["😀"]}),
        ("18446744073709552000", 18446744073709552000.0),
        ("10000000000000000000", 1e19),
        (f'["{"1" * 20}",9223372036854775807]', ["1" * 20, 2**63 - 1]),
    ):
        expected = json.loads(body.format('"kept"'), object_hook=lambda found: found)
        text = json.dumps(expected).replace('"kept"', json.dumps(kept))
        assert parse_json(body.format(value)) == json.loads(text)
        assert "e+" not in value


@pytest.mark.parametrize(
    "body",
    [
        b'[{"a":1},{"b":"\\ud800"}',
        b'[{"a":1},{b:"\\ud800"}]',
        b'[{"a":1},{"b":"\xff"}]',
        b'[{"a":1},NaN]',
        b'[{"a":1},-Infinity]',
        b'[{"a":1},"\\ud800"] x',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"",
    ],
    ids=range(8),
)
def test_a_body_that_is_not_json_is_invalid(body: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        parse_json(body)


EVENT = '{"type":"track","event":"open","userId":"u","email":"a@b.c","msg":{"email":"a@b.c"}}'
BAD = EVENT.replace('"open"', '"open","note":1e999')
MEMBER = '{"mixpanel_distinct_id":"u"}'
COHORT = '{{"action":"members","parameters":{{"members":[{},{}]}}}}'
BATCHES = {
    "sendgrid": f"[{BAD},{EVENT}]",
    "segment": f"[{BAD},{EVENT}]",
    "rudderstack": f"[{BAD},{EVENT}]",
    "mixpanel": f"[{BAD},{EVENT}]",
    "mailchimp": urlencode({"mandrill_events": f"[{BAD},{EVENT}]"}),
    "mixpanel cohort": COHORT.format(MEMBER.replace('"u"', "1e999"), MEMBER),
    "rudderstack batch": f'{{"batch":[{BAD},{EVENT}]}}',
    "mparticle": '{"mpid":"1","events":['
    '{"event_type":"custom_event","data":{"event_name":"x","n":1e999}},'
    '{"event_type":"custom_event","data":{"event_name":"x"}}]}',
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_value_that_cannot_be_stored_rejects_one_event_of_a_batch(case: str) -> None:
    name = case.partition(" ")[0]
    provider = make(name, signature_vectors(name)[0]["config"])
    delivery = request(BATCHES[case])
    translation = provider.translate(delivery)
    assert [event.index for event in translation.events] == [1]
    assert [rejected.index for rejected in translation.rejected] == [0]
    json.dumps(translation.events[0].document).encode()
    # Half an emoji is no reason.
    translation = provider.translate(request(BATCHES[case].replace("1e999", r'"\ud83d"')))
    assert [event.index for event in translation.events] == [0, 1]
    assert translation.rejected == []


# ---- forms
def test_a_form_is_decoded_as_urllib_does() -> None:
    """Every form that a serialiser writes is decoded to the bytes that the provider signed."""
    source = random.Random(7)
    parts = [b"%", b"=", b"&", b"+", b"%41", b"%61", b"%3d", b"%3D", b"%0A", b"\n", b"\r\n"]
    parts += [b"%00", b"\x00", b"a", b" ", b"%25", b"%252", b"\xff", b"%FF", b"\t", b"_", b"%7e=\n"]
    decoded = 0
    for _ in range(20_000):
        body = b"".join(source.choices(parts, k=source.randrange(12)))
        try:
            found = form_bytes(body)
        except PayloadInvalid:
            continue
        decoded += 1
        text = body.decode("latin-1")
        expected = parse_qsl(text, keep_blank_values=True, encoding="latin-1")
        assert [(a.decode("latin-1"), b.decode("latin-1")) for a, b in found] == expected, body
    assert decoded > 2000


@each("body", [b"a=%", b"%4", b"a=%4g", b"a=1&b=%z1", b"%%41", b"%25%"])
def test_an_escape_without_two_hex_digits_is_not_a_form(body: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        form_bytes(body)


def test_a_form_has_at_most_1000_fields() -> None:
    assert len(form_bytes(b"&".join([b"a=1"] * 1000))) == 1000
    for body in (b"&".join([b"a=1"] * 1001), b"&" * 1000):
        with pytest.raises(PayloadInvalid):
            form_bytes(body)


def test_the_fields_of_a_form_are_text() -> None:
    assert form_fields(b"a=%C3%A9&b") == [("a", "é"), ("b", "")]
    with pytest.raises(PayloadInvalid):
        form_fields(b"a=%FF")


# ---- bodies that contain their signature
def test_an_envelope_is_an_object_of_at_most_50_000_values() -> None:
    assert parse_envelope(b'\xef\xbb\xbf{"a":[1,"x"]}') == {"a": [1, "x"]}
    most = b'{"a":[' + b"1," * 49_998 + b"1]}"
    assert len(parse_envelope(most)["a"]) == 49_999
    bad = [most.replace(b"[", b"[1,"), b"[]", b"1", b"", b"{", b'{"a":"\xff"}', b'{"a":"\\ud800"}']
    for body in (*bad, b'{"a":' * 2000 + b"1" + b"}" * 2000):
        with pytest.raises(PayloadInvalid):
            parse_envelope(body)


SIGNED = b'{"signature": {"at": "1", "token": "x"}, "id": "m"}'


def test_members_of_a_body_are_texts() -> None:
    found = body_members(request(SIGNED), "signature.token", "id", "signature.at")
    assert found == ["x", "m", "1"]
    assert body_members(request(SIGNED)) == []


@each(
    "body",
    [
        *(b"", b"{not json", b"[]", b'"x"', b"{}", b'{"signature": "x"}', b'{"signature": null}'),
        *(b'{"signature": {"token": 1}}', b'{"signature": {"token": ""}}'),
        *(b'{"signature": {"token": ["x"]}}', b'{"signature": {"token": "\\ud800"}}'),
        b'{"signature": {"token": "x"}, "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_body_without_the_members_is_not_signed(body: bytes) -> None:
    with pytest.raises(SignatureMismatch):
        body_members(request(body), "signature.token")
