# SPDX-License-Identifier: Apache-2.0
"""The schema files are valid, have examples, and each of their rules refuses something."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import jsonschema
import pytest
import referencing
from hypothesis import given, settings
from hypothesis import strategies as st

from support.pipeline import SCHEMAS

ASSERTIONS = {
    "additionalProperties",
    "anyOf",
    "const",
    "enum",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "not",
    "pattern",
    "required",
    "type",
}
ANNOTATIONS = {
    "$defs",
    "$id",
    "$ref",
    "$schema",
    "description",
    "examples",
    "items",
    "properties",
    "title",
    "x-messages",
}
#: In addition, in schemas of config files; answers use none of these.
OF_SETTINGS = {
    "default",
    "exclusiveMinimum",
    "minProperties",
    "propertyNames",
    "oneOf",
    "uniqueItems",
    "writeOnly",
    "x-removed",
}


def files(folder: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return every schema file by its path."""
    folder = resources.files("engage_schemas") if folder is None else folder
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            yield from files(entry, f"{path}{entry.name}/")
        elif entry.name.endswith(".json"):
            yield path + entry.name, json.loads(entry.read_bytes())


ALL = dict(files())
OURS = {path: schema for path, schema in ALL.items() if path.startswith("payloads/")}
OURS["error.json"] = ALL["error.json"]
REGISTRY: Any = referencing.Registry().with_contents(
    [(schema["$id"], schema) for schema in ALL.values()]
)


#: What ends a pattern that no text may follow, not even a line break.
END = r"(?![\s\S])"
SETTINGS = {path: ALL[path] for path in ALL if path.startswith(("config", "plugins/"))}


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name, value in schema.items():
        if name in ("properties", "$defs", "patternProperties"):
            for child in value.values():
                yield from subschemas(child)
        elif name in ("anyOf", "allOf", "oneOf"):
            for child in value:
                yield from subschemas(child)
        elif name in ("items", "additionalProperties", "if", "then", "else"):
            yield from subschemas(value)
        # "not" is one rule: the schema in it never fails by itself


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema, registry=REGISTRY)


@pytest.mark.parametrize("path", sorted(ALL))
def test_every_schema_is_valid_and_described(path: str) -> None:
    schema = ALL[path]
    jsonschema.Draft202012Validator.check_schema(schema)
    for field in ("$id", "title", "description"):
        assert schema[field].strip(), field
    assert schema["$id"].endswith("/" + path)
    # A file of definitions describes no document.
    assert schema.get("examples") or not {"type", "$ref", "properties"} & schema.keys()
    for example in schema.get("examples", ()):
        validator(schema).validate(example)


@pytest.mark.parametrize("path", sorted(ALL))
def test_no_schema_uses_what_the_two_libraries_read_differently(path: str) -> None:
    for schema in subschemas(ALL[path]):
        assert not {"format", "multipleOf"} & schema.keys()
        for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", {})):
            rest = pattern.replace("[\\s\\S]", "")
            for token in ("\\d", "\\D", "\\w", "\\W", "\\s", "\\S", "\\b"):
                assert token not in rest
            # As an anchor, it would accept a final newline.
            assert "$" not in re.sub(r"\[[^]]*\]", "", rest)


@pytest.mark.parametrize("path", [*sorted(OURS), "config.json"])
def test_every_string_has_a_greatest_length(path: str) -> None:
    for schema in subschemas(ALL[path]):
        types = schema.get("type", ())
        if "string" in ([types] if isinstance(types, str) else types):
            assert "maxLength" in schema, schema


@pytest.mark.parametrize("path", sorted(ALL))
def test_every_keyword_is_known(path: str) -> None:
    """A misspelt keyword would be ignored."""
    known = ASSERTIONS | ANNOTATIONS if path in OURS else ASSERTIONS | ANNOTATIONS | OF_SETTINGS
    for schema in subschemas(ALL[path]):
        assert not schema.keys() - known


ID = "u-1"
TRACK = {"userId": ID, "event": "e"}
SUBSCRIPTION = {
    "workspaceId": "w",
    "identifier": "i",
    "identifierKey": "k",
    "hash": "h",
    "changes": {},
}
CHOICE = {"userId": ID, "groupId": "g", "subscribed": True}
ERROR: dict[str, Any] = {"success": False, "status": 400, "code": "c", "message": "m"}
PROBLEM = {"pointer": "", "message": "m"}


def each(values: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, Any]]:
    """Yield each field with each of its values."""
    for field, choices in values.items():
        for choice in choices:
            yield field, choice


def all_of(schema: str, *values: Any) -> list[tuple[str, Any]]:
    """Return each value with the schema that refuses it."""
    return [(schema, value) for value in values]


#: Values that are not ids.
ODD_IDS: tuple[Any, ...] = (1.5, True, [], {}, " ", "\t\n")

#: Payloads that must be refused: the schema, and what breaks a rule of it.
COUNTER_EXAMPLES: list[tuple[str, Any]] = [
    *all_of("payloads/common.json", [], "x", None, 5, {}, {"userId": None}),
    ("payloads/common.json", {"userId": "", "anonymousId": ""}),
    ("payloads/common.json", {"userId": ID, "messageId": 5}),
    ("payloads/common.json", {"userId": ID, "messageId": "m" * 257}),
    ("payloads/common.json", {"userId": ID, "context": []}),
    ("payloads/common.json", {"userId": ID, "integrations": "x"}),
    *all_of("payloads/common.json", *({"userId": value} for value in ODD_IDS)),
    *[("payloads/common.json", {"anonymousId": value}) for value in ("\u00a0", "\ufeff\u2003")],
    ("payloads/common.json", {"userId": "u" * 513}),
    # On every type of event, even if the type does not use them.
    *[
        (f"payloads/{kind}.json", {**TRACK, field: value})
        for kind in ("common", "identify", "track", "page", "screen")
        for field, value in each(
            {
                "traits": (1, "x", [], True),
                "properties": (1, "x", [], False),
                "groupId": (1.5, True, [], {}, " ", "g" * 513),
                "previousId": (1.5, True, [], {}, " ", "p" * 513),
            }
        )
    ],
    *[
        ("payloads/group.json", {"userId": ID, "groupId": ID, field: value})
        for field, value in (("properties", 1), ("traits", 1), ("previousId", []))
    ],
    *[
        ("payloads/alias.json", {"userId": ID, "previousId": ID, field: value})
        for field, value in (("properties", 1), ("traits", 1), ("groupId", []))
    ],
    *[
        ("payloads/common.json", {"userId": ID, field: value})
        for field in ("timestamp", "originalTimestamp", "sentAt")
        for value in (
            -1,
            10**14,
            2**63 - 1,
            1.5,
            True,
            [1700000000],
            {"seconds": 1700000000},
            "",
            "1700000000",
            "1e9",
            "yesterday",
            "2026-11",
            "20261121",
            "2026-11-21Z",
            "2026-11-21+01:00",
            "2026-11-21T",
            "2026-11-21T09:30",
            "2026-11-21T09:30:00 ",
            "2026-11-21  09:30:00",
            "2026-11-21 24:00:00",
            "2026-11-21T24:00:00",
            "2026-11-21\0",
            "2026-11-21\n",
            "2026-11-21T09:30:00\0",
            "10000-01-01",
            "-2026-01-01",
            "２０２６-11-21",
            "2026-11-21T09:30Z",
            "2026-11-21 09:30:00Z",
            "2026-11-21T25:00:00Z",
            "2026-11-21T24:00:00Z",
            "2026-13-01T00:00:00Z",
            "2026-00-01T00:00:00Z",
            "2026-11-32T00:00:00Z",
            "2026-11-21T09:60:00Z",
            "2026-11-21T09:30:61Z",
            "2026-11-21T09:30:00.Z",
            "2026-11-21T09:30:00.1234567890Z",
            "2026-11-21T09:30:00+24:00",
            "2026-11-21T09:30:00+0100",
            "2026-11-21T09:30:00Z\n",
            "٢٠٢٦-11-21T09:30:00Z",
            "2026-11-21T09:30:00Z" + " " * 64,
        )
    ],
    *[(f"payloads/{kind}.json", {"userId": ID, "traits": []}) for kind in ("identify", "group")],
    *[
        (f"payloads/{kind}.json", {"userId": ID, field: value})
        for kind in ("page", "screen")
        for field, value in (
            ("properties", 5),
            ("name", 5),
            ("name", "n" * 1025),
            ("category", []),
            ("category", "c" * 1025),
        )
    ],
    *[
        (f"payloads/{kind}.json", {"userId": ID, "type": value})
        for kind in ("identify", "track", "page", "screen", "group", "alias")
        for value in ("other", 5, "TRACK")
    ],
    ("payloads/track.json", {"userId": ID}),
    *[("payloads/track.json", {**TRACK, "event": value}) for value in ("", 5, None, "e" * 1025)],
    ("payloads/track.json", {**TRACK, "properties": []}),
    *[
        ("payloads/group.json", {"userId": ID, "groupId": value})
        for value in (None, "", " ", 1.5, True, "g" * 513)
    ],
    ("payloads/group.json", {"userId": ID}),
    ("payloads/group.json", {"groupId": ID}),
    ("payloads/group.json", {"userId": ID, "groupId": ID, "assigned": "false"}),
    ("payloads/alias.json", {"userId": ID}),
    ("payloads/alias.json", {"previousId": ID, "anonymousId": ID}),
    ("payloads/alias.json", {"userId": "", "previousId": ID, "anonymousId": ID}),
    ("payloads/alias.json", {"userId": ID, "previousId": None}),
    *all_of("payloads/item.json", 5, [], {}, {"type": "Track"}, {"type": None}),
    *all_of("payloads/batch.json", [], {}, {"batch": None}, {"batch": {}}),
    ("payloads/batch.json", {"batch": [], "context": []}),
    ("payloads/batch.json", {"batch": [], "integrations": True}),
    ("payloads/subscriptions.json", []),
    *[
        (
            "payloads/subscriptions.json",
            {name: value for name, value in SUBSCRIPTION.items() if name != missing},
        )
        for missing in SUBSCRIPTION
    ],
    *[
        ("payloads/subscriptions.json", {**SUBSCRIPTION, field: value})
        for field, value in each(
            {
                "workspaceId": (5, "", "w" * 257),
                "identifier": (5, "", "i" * 513),
                "identifierKey": (5, "", "k" * 257),
                "hash": (None, "", "h" * 257),
                "changes": ([], {"g": "true"}, {"g": 1}, {str(i): True for i in range(1001)}),
                "userId": (1.5, " ", "u" * 513),
                "expires": ("1", 1.5, 0, 10**16),
                "messageId": (5, "m" * 257),
            }
        )
    ],
    *all_of("payloads/choice.json", [], {"groupId": "g", "subscribed": True}),
    *[
        ("payloads/choice.json", {k: v for k, v in CHOICE.items() if k != missing})
        for missing in CHOICE
    ],
    *[
        ("payloads/choice.json", {**CHOICE, field: value})
        for field, value in each({"subscribed": ("true", 1), "how": (5, "", "h" * 257)})
    ],
    ("error.json", []),
    *[("error.json", {k: v for k, v in ERROR.items() if k != missing}) for missing in ERROR],
    *[
        ("error.json", {**ERROR, field: value})
        for field, value in each(
            {
                "success": (True,),
                "status": (399, 600, "400"),
                "code": (5, "c" * 65, "Not Found"),
                "message": (5, "", "m" * 4097),
                "errors": ({}, [], [PROBLEM] * 21, [5], [{"pointer": ""}], [{"message": "m"}]),
                "requestId": (5, "", "r" * 65),
                "more": (1,),
            }
        )
    ],
    *[
        ("error.json", {**ERROR, "errors": [{**PROBLEM, field: value}]})
        for field, value in (
            ("pointer", 5),
            ("pointer", "p" * 4097),
            ("message", 5),
            ("message", ""),
            ("message", "m" * 4097),
            ("more", 1),
        )
    ],
]


def broken(errors: Any) -> Iterator[tuple[str, str]]:
    """Return the rules that were broken, each as schema and keyword."""
    for error in errors:
        yield json.dumps(error.schema, sort_keys=True), error.validator
        yield from broken(error.context)


def test_every_rule_refuses_something() -> None:
    refused: set[tuple[str, str]] = set()
    for path, value in COUNTER_EXAMPLES:
        found = set(broken(validator(OURS[path]).iter_errors(value)))
        assert found, f"{path} takes {value!r}"
        refused |= found
    rules = {
        (json.dumps(schema, sort_keys=True), keyword)
        for document in OURS.values()
        for schema in subschemas(document)
        for keyword in ASSERTIONS & schema.keys()
        # a schema under additionalProperties is a separate rule
        if not (keyword == "additionalProperties" and schema[keyword] is not False)
    }
    assert not {(schema[:200], keyword) for schema, keyword in rules - refused}


@pytest.mark.parametrize(("path", "value"), COUNTER_EXAMPLES)
def test_the_fast_library_refuses_the_same_with_a_reason(path: str, value: Any) -> None:
    kind = path.removeprefix("payloads/").removesuffix(".json")
    if kind == "error":
        return
    assert not SCHEMAS.is_valid(kind, value)
    problems = SCHEMAS.problems(kind, value)
    assert problems
    for problem in problems:
        assert problem.message
        assert len(problem.message) < 250


# --------------------------------------------------------------------------- the libraries agree
texts = st.sampled_from(
    [
        "",
        " ",
        "\n",
        "x",
        "x\n",
        "\ufeff",
        "\u00a0",
        "\u200b",
        "é" * 512,
        "é" * 513,
        "\0",
        "a" * 1025,
    ]
) | st.text(max_size=8)
times = st.sampled_from(
    [
        "2026-11-21T09:30:00Z",
        "2026-11-21t09:30:60.123456789z",
        "2026-11-21T09:30:00+14:00",
        "2026-11-21T09:30:00Z\n",
        "2026-11-21T09:30:00Z\u2028",
        "0000-01-01T00:00:00-23:59",
        "2026-02-30T00:00:00Z",
        "2026-11-21",
        "2026-11-21\n",
        "2026-11-21 09:30:00.5",
        "2026-11-21T09:30:60",
        "２026-11-21T09:30:00Z",
    ]
) | st.from_regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9:.]{5,12}([zZ]|[+-][0-9]{2}:[0-9]{2})\s?")
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.sampled_from([0, 1, 1.0, 0.0, -0.0, 1e300])
anything = st.recursive(
    scalars | texts | times,
    lambda child: st.lists(child, max_size=2) | st.dictionaries(texts, child, max_size=2),
    max_leaves=4,
)
FIELDS = sorted(
    {name for schema in OURS.values() for name in schema.get("properties", {})} | {"batch", "x"}
)
values = anything | st.sampled_from(
    ["identify", "track", "page", "screen", "group", "alias", {"a": True}, {"a": 1}, {"a": 1.0}]
)
payloads = anything | st.dictionaries(st.sampled_from(FIELDS), values, max_size=8)
likely = st.builds(
    lambda more: {"userId": "u", "event": "e", "groupId": 1, "previousId": "p", **more},
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=3),
)


@pytest.mark.parametrize("kind", sorted(SCHEMAS.documents))
@settings(max_examples=300)
@given(value=payloads | likely)
def test_both_libraries_agree(kind: str, value: Any) -> None:
    exact = validator(SCHEMAS.documents[kind]).is_valid(value)
    assert SCHEMAS.is_valid(kind, value) == exact
    assert bool(SCHEMAS.problems(kind, value)) != exact


@pytest.mark.parametrize("path", sorted(SETTINGS))
def test_every_pattern_of_a_setting_has_a_message(path: str) -> None:
    for schema in subschemas(SETTINGS[path]):
        assert {name for name in schema if name.startswith("x-")} <= {"x-messages", "x-removed"}
        assert "pattern" not in schema or "pattern" in schema.get("x-messages", {}), schema
        if path == "config.json":
            assert schema.get("pattern", END).endswith(END)
