# SPDX-License-Identifier: Apache-2.0
"""The fault of an item is that item's alone: the others of its batch are stored.

What can be kept faithfully is kept: half of a surrogate pair as U+FFFD, an integer beyond 64 bits
as the double that it is.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import orjson
import pytest
from hypothesis import given

from engage.api.json_values import read_json, storable
from engage.config import DEFAULT_LIMITS
from engage.errors import ApiError
from engage.pipeline.admission import LARGE_BODY
from engage.pipeline.decode import SLICE, decode_items, decode_json
from engage.pipeline.replay import obstacle_of, text_of
from support.pipeline import ACME, Core, error_of, make_core
from support.replay import make_bench

#: Numbers and texts of JSON, and what is stored of them.
KEPT = {
    # Doubles that JavaScript and Go write without an exponent.
    "18446744073709552000": 18446744073709552000.0,
    "10000000000000000000": 1e19,
    "-9223372036854776000": -9223372036854776000.0,
    "100000000000000000000000": 1e23,
    "1" + "0" * 308: 1e308,
    # Doubles that are exactly this integer.
    "18446744073709551616": 2.0**64,
    "9223372036854775808": 2.0**63,
    "-18446744073709551616": -(2.0**64),
    # 64 bits.
    "9223372036854775807": 2**63 - 1,
    "-9223372036854775808": -(2**63),
    "9007199254740993": 2**53 + 1,
    "1e308": 1e308,
    "1e-400": 0.0,
    r'"\ud83d"': "\ufffd",
    r'"a\ude00b"': "a\ufffdb",
    r'"\ude00\ud83d"': "\ufffd\ufffd",
    r'"\ud83d\ude00\ud83d"': "😀\ufffd",
    r'["x",{"y\ud83d":["\ud83d"]}]': ["x", {"y\ufffd": ["\ufffd"]}],
}
#: Values that have no faithful form, the member of ``properties`` that is named, and why.
REFUSED = {
    "12345678901234567890": "64-bit",
    "-9223372036854775809": "64-bit",
    "9223372036854775809": "64-bit",
    "18446744073709551615": "64-bit",
    "1" + "0" * 309: "64-bit",
    "9" * 5000: "64-bit",
    "1e400": "64-bit",
    "-1e400": "64-bit",
    r'{"a\ud83d":1,"a\ude00":2}': "half of a surrogate pair",
    '{"a\ufffd":1,"a\\ude00":2}': "half of a surrogate pair",
    "[" * 63 + "]" * 63: "limits.json_depth",
    "[" * 3000 + "]" * 3000: "limits.json_depth",
    '{"a":' * 3000 + "1" + "}" * 3000: "limits.json_depth",
}
#: What is no JSON at all.
BROKEN = [
    "NaN",
    "-Infinity",
    '"\t"',
    '"\x01"',
    "01",
    "1 2",
    "{",
    '{"a"}',
    '"\\x"',
    "'a'",
    "tru",
    "\xff",
]


def track(value: str, name: str = "ok") -> str:
    ids = f'"type":"track","userId":"u","messageId":"{name}"'
    return f'{{{ids},"event":"e","properties":{{"a":{value}}}}}'


def body_of(*items: str, more: str = "") -> bytes:
    return f'{{"batch":[{",".join(items)}]{more}}}'.encode()


async def batch(core: Core, body: bytes, **options: Any) -> tuple[int, list[int]]:
    """Send a batch; return how many items were stored, and the indexes of the others."""
    options.setdefault("principal", core.principal)
    result = await core.pipeline.batch(body, **options)
    assert all(item.error.code == "invalid_json" for item in result.rejected)
    return result.accepted, [item.index for item in result.rejected]


def stored(core: Core) -> dict[str, Any]:
    """Return the value of each stored event by its message id."""
    return {one["messageId"]: one["properties"]["a"] for one in core.documents}


# ------------------------------------------------------------------------------------- the values
@pytest.mark.parametrize("text", KEPT, ids=range(len(KEPT)))
async def test_a_value_with_a_faithful_form_is_stored(text: str) -> None:
    """In a batch and alone; its neighbours too."""
    core = make_core()
    assert await batch(core, body_of(track("1"), track(text, "odd"), track("2", "last"))) == (3, [])
    item = track(text, "alone").encode()
    await core.pipeline.event("track", item, principal=core.principal)
    assert repr(stored(core)) == repr({"ok": 1, "odd": KEPT[text], "last": 2, "alone": KEPT[text]})
    # As every later reader of the store reads it.
    for event in core.store.events.values():
        assert decode_json(event.body, DEFAULT_LIMITS) == event.document()
    assert core.letters == []


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
async def test_only_the_item_without_a_faithful_form_is_refused(text: str) -> None:
    core = make_core()
    body = body_of(track("1"), track(text, "odd"), track("2", "z"))
    result = await core.pipeline.batch(body, principal=core.principal)
    assert (result.accepted, [item.message_id for item in result.rejected]) == (2, ["odd"])
    assert core.metrics.events["track", "invalid_json"] == 1
    assert stored(core) == {"ok": 1, "z": 2}
    (letter,) = core.letters
    assert (letter.reason, letter.message_id, letter.user_id) == ("invalid_json", "odd", "u")
    assert REFUSED[text] in letter.message
    error = await error_of(
        core.pipeline.event("track", track(text, "alone").encode(), principal=core.principal)
    )
    assert (error.status, error.code) == (400, "invalid_json")
    assert [one.message_id for one in core.letters] == ["odd", "alone"]
    assert len(core.documents) == 2


@pytest.mark.parametrize("levels", [60, 61, 62, 63])
async def test_an_item_may_be_as_deep_as_its_body(levels: int) -> None:
    """The limit is 64 levels of a body: 62 of an item of a batch, two of them around this value."""
    core = make_core()
    value = "[" * levels + "]" * levels
    accepted, rejected = await batch(core, body_of(track("1"), track(value, "deep")))
    assert (accepted, rejected) == ((2, []) if levels <= 60 else (1, [1]))
    item = track(value, "alone").encode()
    if levels <= 62:
        await core.pipeline.event("track", item, principal=core.principal)
    else:
        await error_of(core.pipeline.event("track", item, principal=core.principal))


@pytest.mark.parametrize("name", ["messageId", "userId", "anonymousId", "groupId", "previousId"])
@pytest.mark.parametrize("value", [r'"a\ud83d"', r'"\ude00"', "12345678901234567890", "1e400"])
async def test_an_id_is_never_changed(name: str, value: str) -> None:
    core = make_core()
    odd = track("1", "odd")[:-1] + f',"{name}":{value}}}'  # the last of two members counts
    accepted, rejected = await batch(core, body_of(track("1"), odd, track("2", "last")))
    assert (accepted, rejected) == (2, [1])
    (letter,) = core.letters
    assert letter.errors[0]["pointer"] == f"/{name}"
    # As it was sent, and in no field that finds a person.
    assert f'"{name}":{value}'.encode() in letter.item
    given = {"messageId": letter.message_id, "userId": letter.user_id}
    assert (given | {"anonymousId": letter.anonymous_id}).get(name) is None


async def test_an_id_or_a_time_is_no_number_beyond_64_bits() -> None:
    core = make_core()
    for name in ("userId", "groupId", "timestamp", "sentAt"):
        odd = track("1", "odd")[:-1] + f',"{name}":18446744073709552000}}'
        result = await core.pipeline.batch(body_of(track("1"), odd), principal=core.principal)
        assert [item.error.code for item in result.rejected] == ["invalid_payload"], name


async def test_names_and_members_that_look_like_ids_have_a_faithful_form() -> None:
    core = make_core()
    odd = r'{"type":"track","userId":"u","event":"e\ud83d","properties":{"userId":"v\ud83d","a":1}}'
    assert await batch(core, body_of(odd)) == (1, [])
    assert core.documents[0]["event"] == "e\ufffd"
    assert core.documents[0]["properties"]["userId"] == "v\ufffd"


async def test_the_envelope_of_a_batch_has_a_faithful_form_too() -> None:
    core = make_core()
    more = r',"context":{"page":{"title\ud83d":"x\ude00"},"n":10000000000000000000}'
    assert await batch(core, body_of(track("1"), more=more)) == (1, [])
    context = core.documents[0]["context"]
    assert context == {"page": {"title\ufffd": "x\ufffd"}, "n": 1e19}
    for value in ("1e400", "12345678901234567890", r'{"a\ud83d":1,"a\ude00":2}'):
        error = await error_of(batch(core, body_of(track("1"), more=f',"context":{{"n":{value}}}')))
        assert (error.status, error.code) == (400, "invalid_json")
        assert error.errors[0].pointer == "/context/n"
    assert (len(core.documents), core.letters) == (1, [])


# ------------------------------------------------------------------------------------- the batches
@pytest.mark.parametrize("value", ["1e400", r'{"\ud83d":1,"\ude00":2}', "[" * 63 + "]" * 63])
@pytest.mark.parametrize("places", ["first", "last", "every second", "all"])
@pytest.mark.parametrize("padding", [1, 700])
async def test_the_largest_batch_loses_only_its_faulty_items(
    value: str, places: str, padding: int
) -> None:
    """2500 items, small and in slices; compressed, and with strings that look like structure."""
    faulty = {"first": [0], "last": [2499], "every second": range(0, 2500, 2), "all": range(2500)}
    wrong = set(faulty[places])
    text = json.dumps('\\"]},{[' + "x" * padding)
    items = [
        track(f"[{text},{value if index in wrong else 1}]", f"m{index}") for index in range(2500)
    ]
    body = body_of(*items)
    assert (padding == 1) == (len(body) < SLICE)
    core = make_core()
    assert await batch(core, gzip.compress(body), encoding="gzip") == (
        2500 - len(wrong),
        sorted(wrong),
    )
    assert set(stored(core)) == {f"m{index}" for index in range(2500)} - {f"m{n}" for n in wrong}
    assert len(core.letters) == len(wrong)


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("padding", [0, LARGE_BODY])
async def test_a_body_that_is_not_json_names_the_item(text: str, padding: int) -> None:
    core = make_core()
    body = body_of(track("1"), track(r'"\ud83d"'), track("2") + " " * padding, track(text))
    body = body.replace(b"\xc3\xbf", b"\xff")
    error = await error_of(batch(core, body))
    assert (error.status, error.code) == (400, "invalid_json")
    if text != "{":  # which is the fault of everything that follows
        assert error.errors[0].pointer == "/batch/3"
        assert error.message.startswith("batch/3: is not valid")
    assert (core.documents, core.letters) == ([], [])
    alone = track(text).encode().replace(b"\xc3\xbf", b"\xff")
    error = await error_of(core.pipeline.event("track", alone, principal=core.principal))
    assert error.code == "invalid_json"
    assert core.letters == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"batch":[1e400] x}',
        b'{"batch":[1e400]',
        b'{"batch":[1e400,]}',
        b'{"batch":[,1e400]}',
        b'{"batch":[1e400}}',
        b'[{"batch":[1e400]}',
        b'{"batch":[1e400]}}',
        b'{"batch":[1e400],"x":NaN}',
        b'{"batch":["\\ud800]}',
        b"",
        b" ",
        b'"\\ud800',
    ],
)
async def test_a_body_that_is_not_json_elsewhere_is_refused(body: bytes) -> None:
    error = await error_of(batch(make_core(), body))
    assert (error.status, error.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("body", "accepted", "rejected"),
    [
        (b'\xef\xbb\xbf \n{ "batch" : [ %b , 1e400 ] } ', 1, [1]),
        (b'{"batch":[1e400],"batch":[%b,1e400]}', 1, [1]),
        (b'{"b\\u0061tch":[1e400,%b]}', 1, [0]),
        (b'{"other":[1e400,{"batch":[5]}],"batch":[%b,[],1e400]}', 1, [1, 2]),
        (b'{"\\"batch\\":[":"[{\\\\","batch":[%b,"\\\\",1e400]}', 1, [1, 2]),
        (b'{"batch":[1e400,%b,"\\ud83d",[1e400],{"a":1e400},null]}', 1, [0, 2, 3, 4, 5]),
    ],
)
async def test_items_are_found_however_the_body_is_written(
    body: bytes, accepted: int, rejected: list[int]
) -> None:
    core = make_core()
    body = body % track("1").encode()
    result = await core.pipeline.batch(body, principal=core.principal)
    assert result.accepted == accepted
    assert [item.index for item in result.rejected] == rejected
    assert len(core.letters) == len(rejected)


async def test_a_faulty_batch_with_too_many_items_is_refused_as_any_other() -> None:
    core = make_core(batch_events=2)
    assert await batch(core, body_of(track("1"), track("1e400"))) == (1, [1])
    for items in (["1", "2", "1e400"], ["1", "2", "NaN"]):
        error = await error_of(batch(core, body_of(*map(track, items))))
        assert (error.status, error.code) == (413, "batch_too_large")


async def test_a_strict_batch_with_a_faulty_item_is_refused() -> None:
    core = make_core()
    error = await error_of(batch(core, body_of(track("1"), track("1e400")), strict=True))
    assert error.errors[0].pointer == "/batch/1/properties/a"
    assert (core.documents, core.letters) == ([], [])


async def test_the_write_key_may_be_in_a_faulty_body() -> None:
    core = make_core()
    body = body_of(track("1"), track("1e400"), more=',"writeKey":"key-1"')
    assert await batch(core, body, principal=None) == (1, [1])
    item = track("1e400")[:-1] + ',"writeKey":"key-1"}'
    error = await error_of(core.pipeline.event("track", item.encode()))
    assert error.code == "invalid_json"
    assert len(core.letters) == 1  # the same item
    item = track("1e400", "other")[:-1] + r',"writeKey":"key-1\ud83d"}'
    error = await error_of(core.pipeline.event("track", item.encode()))
    assert error.code == "invalid_write_key"


@pytest.mark.parametrize(
    "value",
    [
        "1e400",
        r'{"\ud83d":1,"\ude00":{"writeKey":"secret"},"writeKey":"secret","userHash":"secret"}',
        "[" * 999 + "]" * 999,
    ],
)
async def test_a_faulty_item_tells_no_secret(value: str) -> None:
    core = make_core()
    secrets = '"writeKey":"secret","context":{"userHash":"secret","x":{"writeKey":"secret"}}'
    item = track(value, "odd")[:-1] + f",{secrets}}}"
    await batch(core, body_of(item, track(f'[{value},{{"writeKey":"secret"}}]')))
    assert len(core.letters) == 2
    assert all(b"secret" not in letter.item for letter in core.letters)


async def test_a_faulty_item_of_an_unverified_user_leaves_no_letter() -> None:
    """Otherwise the replay of its letter would be that of a verified user."""
    core = make_core(
        workspace=dataclasses.replace(
            ACME, verify_identity="required", identity_secrets=("a secret of users",)
        )
    )
    for value in ("1e400", "[" * 3000 + "]" * 3000):
        result = await core.pipeline.batch(body_of(track(value)), principal=core.principal)
        assert [item.error.code for item in result.rejected] == ["identity_not_verified"]
    odd = track("1", "odd")[:-1] + r',"userId":"v\ud83d"}'
    result = await core.pipeline.batch(body_of(odd), principal=core.principal)
    assert [item.error.code for item in result.rejected] == ["identity_not_verified"]
    assert core.letters == []


async def test_a_key_may_not_send_a_faulty_item_of_a_type_that_is_not_its_own() -> None:
    core = make_core()
    key = dataclasses.replace(core.principal.write_key, operations=("identify",))
    principal = type(core.principal)(core.principal.workspace, key)
    result = await core.pipeline.batch(body_of(track("1e400"), track("1")), principal=principal)
    assert [one.error.code for one in result.rejected] == ["operation_not_allowed"] * 2
    assert core.letters == []


# ------------------------------------------------------------------------------------- the letters
@pytest.mark.parametrize("backend", ["sqlite", pytest.param("mongo", marks=pytest.mark.mongo)])
async def test_the_letter_of_a_faulty_item_can_be_corrected(tmp_path: Path, backend: str) -> None:
    async with make_bench(tmp_path, backend=backend) as bench:
        for value in ("123456789012345678901", "1e400", r'{"a\ud83d":1,"a\ude00":2}', "9" * 5000):
            core = bench.core
            item = track(value, "odd")
            result = await core.pipeline.batch(body_of(item), principal=core.principal)
            assert len(result.rejected) == 1
            (letter,) = await bench.letters()
            text = text_of(letter)
            assert value in text
            assert obstacle_of(letter) is None
            # As it is, it is refused again.
            for same in (None, text.encode()):
                explained = await bench.replays.check(letter, same)
                assert (explained.outcome, explained.code) == ("refused", "invalid_json")
                assert explained.errors[0].pointer == "/properties/a"
                replayed = await bench.replays.replay(letter, same)
                assert (replayed.outcome, replayed.code) == ("failed", "invalid_json")
            corrected = item.replace(value, '"x"').encode()
            replayed = await bench.replays.replay(letter, corrected, new_id=True)
            assert replayed.outcome == "stored"
        assert [one["properties"] for one in await bench.documents()] == [{"a": "x"}] * 4


async def test_a_faulty_item_of_one_batch_is_one_letter() -> None:
    """Also if it is sent again, with another sentAt."""
    core = make_core()
    for sent in ("2026-11-21T09:29:50Z", "2026-11-21T09:29:55Z"):
        item = track("1e400")[:-1] + f',"sentAt":"{sent}"}}'
        await batch(core, body_of(item))
    assert len(core.letters) == 1


@pytest.mark.parametrize(
    ("levels", "whole"), [(65, True), (250, True), (252, False), (5000, False)]
)
async def test_an_item_that_is_too_deep_is_kept_whole_if_it_can_be_written(
    levels: int, whole: bool
) -> None:
    core = make_core()
    value = "[" * levels + "]" * levels
    await batch(core, body_of(track(value, "deep")))
    (letter,) = core.letters
    assert letter.truncated is not whole
    assert (value.encode() in letter.item) is whole
    obstacle = obstacle_of(letter)
    assert obstacle is None if whole else "nested too deeply" in str(obstacle)
    text_of(letter)


# ------------------------------------------------------------------------------------- the parsers
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8") | st.sampled_from('"\\[]{},:'), max_size=8),
    lambda child: (
        st.lists(child, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('"\\[]{},:aé'), max_size=4), child, max_size=4)
    ),
    max_leaves=25,
)


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_json_without_a_fault_is_read_as_orjson_reads_it(
    value: Any, ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "replace")
    problems: list[Any] = []
    read = storable(read_json(text), lambda path: True, problems)
    assert problems == []
    assert repr(read) == repr(orjson.loads(text))


@given(st.lists(VALUES, max_size=6), VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_the_items_of_any_batch_are_found(
    items: list[Any], other: Any, ascii_only: bool, indent: int | None
) -> None:
    """Beside an item with a fault, and whatever else the body has."""
    body = {"a": other, "batch": [*items, "FAULT"], "z": [other, other]}
    text = json.dumps(body, ensure_ascii=ascii_only, indent=indent)
    text = text.replace('"FAULT"', r'"\ud83d"')
    data = text.encode("utf-8", "replace")
    with pytest.raises(ApiError) as caught:
        decode_json(data, DEFAULT_LIMITS)
    decoded = decode_items(data, DEFAULT_LIMITS, caught.value, batch=True)
    assert decoded["batch"] == [*items, "\ufffd"]
    assert decoded["a"] == other or isinstance(other, list | dict)


@given(VALUES)
def test_half_of_a_pair_anywhere_is_replaced(value: Any) -> None:
    text = json.dumps([value, "\ud83d", {"\udc00": value}])
    problems: list[Any] = []
    read = storable(read_json(text.encode()), lambda path: False, problems)
    assert read == [value, "\ufffd", {"\ufffd": value}]
    assert problems == []
