# SPDX-License-Identifier: Apache-2.0
"""Reading the bodies of deliveries: JSON, and elements that cannot be stored."""

from __future__ import annotations

import json
from urllib.parse import urlencode

import pytest

from engage.api import PayloadInvalid
from engage.webhooks import parse_json, parse_object
from support.providers import make, request, signature_vectors

#: Values that are JSON and cannot be stored.
UNKEEPABLE = ['"\\ud800"', "1" * 20, "-" + "9" * 5000, "1e999", '{"x":[{"\\udfff":1}]}']


@pytest.mark.parametrize("value", UNKEEPABLE, ids=len)
def test_an_element_that_cannot_be_stored_is_rejected_alone(value: str) -> None:
    whole = f'[{{"a":1.5,"b":"é"}},{{"a":{value}}},9223372036854775807,{value}]'
    assert parse_json(whole) == [{"a": 1.5, "b": "é"}, None, 9223372036854775807, None]
    assert parse_json(whole.encode()) == parse_json(b"\xef\xbb\xbf" + whole.encode())
    within = f'{{"x":{{"y":[1,{value}]}},"z":[2]}}'
    assert parse_json(within, elements="x.y") == {"x": {"y": [1, None]}, "z": [2]}
    assert parse_object(within, elements="x.y")["x"] == {"y": [1, None]}


@pytest.mark.parametrize("value", UNKEEPABLE, ids=len)
@pytest.mark.parametrize(
    ("body", "elements"),
    [
        ("{}", None),
        ('{{"x":{}}}', None),
        ('{{"x":[{}]}}', None),
        ('{{"x":[1],"y":{}}}', "x"),
        ('{{"x":[1],"y":[{}]}}', "x"),
        ('{{"x":{}}}', "x"),
        ('{{"x":{{"y":{}}}}}', "x.y.z"),
    ],
)
def test_such_a_value_elsewhere_makes_the_body_invalid(
    value: str, body: str, elements: str | None
) -> None:
    with pytest.raises(PayloadInvalid):
        parse_json(body.format(value), elements=elements)


@pytest.mark.parametrize(
    "body",
    [
        b'[{"a":1},{"b":"\\ud800"}',
        b'[{"a":1},{b:"\\ud800"}]',
        b'[{"a":1},{"b":"\xff"}]',
        b'[{"a":1},NaN]',
        b'[{"a":1},-Infinity]',
        b'[{"a":1},"\\ud800"] x',
        b"[" * 100_000 + b"]" * 100_000,
        b'["\\ud800",' + b"[" * 100_000 + b"]" * 100_000 + b"]",
        b"",
    ],
    ids=range(9),
)
def test_a_body_that_is_not_json_is_invalid(body: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        parse_json(body)


EVENT = '{"type":"track","event":"open","userId":"u","email":"a@b.c","msg":{"email":"a@b.c"}}'
BAD = EVENT.replace('"open"', '"open","note":"\\ud83d"')
MEMBER = '{"mixpanel_distinct_id":"u"}'
COHORT = '{{"action":"members","parameters":{{"members":[{},{}]}}}}'
BATCHES = {
    "sendgrid": f"[{BAD},{EVENT}]",
    "segment": f"[{BAD},{EVENT}]",
    "rudderstack": f"[{BAD},{EVENT}]",
    "mixpanel": f"[{BAD},{EVENT}]",
    "mailchimp": urlencode({"mandrill_events": f"[{BAD},{EVENT}]"}),
    "mixpanel cohort": COHORT.format(MEMBER.replace("u", "\\ud83d"), MEMBER),
    "rudderstack batch": f'{{"batch":[{BAD},{EVENT}]}}',
    "mparticle": '{"mpid":"1","events":['
    '{"event_type":"custom_event","data":{"event_name":"\\ud83d"}},'
    '{"event_type":"custom_event","data":{"event_name":"x"}}]}',
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_broken_character_rejects_one_event_of_a_batch(case: str) -> None:
    name = case.partition(" ")[0]
    provider = make(name, signature_vectors(name)[0]["config"])
    delivery = request(BATCHES[case])
    translation = provider.translate(delivery)
    assert [event.index for event in translation.events] == [1]
    assert [rejected.index for rejected in translation.rejected] == [0]
    json.dumps(translation.events[0].document).encode()
