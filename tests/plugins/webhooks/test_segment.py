# SPDX-License-Identifier: Apache-2.0
"""Segment: the first element of a batch, which is what is signed, and the translation of events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engage.api import NothingSigned, PayloadInvalid, SignatureMismatch, Translation
from engage_plugins.segment import MAX_ELEMENT, first_element
from support.providers import make, request

EVENT = {"type": "track", "event": "E", "userId": "u", "messageId": "m"}


def translate(payload: Any) -> Translation:
    return make("segment", {"secret": "x"}).translate(request(json.dumps(payload)))


@pytest.mark.parametrize(
    "element",
    [
        b"{}",
        b'{"a":1}',
        b'{"a":"}]"}',
        b'{"a":"\\"}"}',
        b'{"a":"\\\\"}',
        b'{"a":[1,{"b":[]}]}',
        '{"a":"\u2028 é 🚀"}'.encode(),
        b'{"n":1e+21,"z":-0.0}',
        b'{"a": 1 , "b" : [ ] }',
    ],
)
def test_the_first_element_is_cut_out_unchanged(element: bytes) -> None:
    assert first_element(b"[" + element + b"]") == element
    assert first_element(b"[" + element + b',{"x":1}]') == element
    assert first_element(b" [" + element + b",") == element  # the rest is not read


@pytest.mark.parametrize("array", [b"[]", b"[ ]", b" [\n]"])
def test_an_empty_array_has_nothing_signed(array: bytes) -> None:
    with pytest.raises(NothingSigned):
        first_element(array)


@pytest.mark.parametrize(
    "array",
    [
        b"[",
        b"[1]",
        b'["{"]',
        b"[[]]",
        b"[null,{}]",
        b'[{"a":1',
        b'[{"a":"',
        b"[ {}]",  # Segment writes no space there
        b"[" + b'{"a":' * 100_000,
        b'[{"a":"' + b"x" * MAX_ELEMENT + b'"}]',
        # Each of these quotes could begin a string; trying each of them would take hours.
        b'[{"a":"' + b'\\"' * (MAX_ELEMENT // 2),
        b'[{"a":"' + b"\\" * (MAX_ELEMENT - 7),
    ],
)
def test_an_array_without_a_first_element_does_not_verify(array: bytes) -> None:
    with pytest.raises(SignatureMismatch):
        first_element(array)


def test_events_are_not_changed() -> None:
    full = {**EVENT, "context": {"ip": "1.2.3.4"}, "extra": [1], "sentAt": "2024-01-01T00:00:00Z"}
    assert translate(full).events[0].document == full


def test_types_may_have_any_case_and_others_are_ignored() -> None:
    translation = translate([{**EVENT, "type": "Track"}, {**EVENT, "type": "other"}, EVENT])
    assert [event.document["type"] for event in translation.events] == ["track", "track"]
    assert [event.index for event in translation.events] == [0, 2]
    assert translation.ignored == 1


def test_a_delete_is_a_request_to_erase_its_user() -> None:
    """It is no event of the user."""
    delete = {"type": "Delete", "userId": "u", "timestamp": "2024-01-01T00:00:00Z", "version": 2}
    translation = translate([delete, {**delete, "userId": "v"}, {"type": "delete"}])
    assert not translation.events
    assert translation.erasures == ["u", "v"]
    assert translation.ignored == 3


def test_an_event_without_an_id_gets_one_from_its_content() -> None:
    bare = {key: value for key, value in EVENT.items() if key != "messageId"}
    ids = [translate(bare).events[0].document["messageId"] for _ in range(2)]
    assert ids[0] == ids[1]
    other = translate({**bare, "userId": "v"}).events[0].document["messageId"]
    assert other != ids[0]


def test_a_bad_element_does_not_affect_others() -> None:
    translation = translate([EVENT, 7, {"event": "no type"}, EVENT])
    assert len(translation.events) == 2
    assert [rejected.index for rejected in translation.rejected] == [1, 2]


def test_a_batch_of_bad_elements_is_invalid() -> None:
    with pytest.raises(PayloadInvalid):
        translate([1, 2])


def test_an_id_that_is_not_valid_is_converted() -> None:
    assert translate({**EVENT, "messageId": 7}).events[0].document["messageId"] == "7"
    long = {**EVENT, "messageId": "x" * 257}
    first, again = (translate(long).events[0].document["messageId"] for _ in range(2))
    assert first == again
    assert len(first) == 36
