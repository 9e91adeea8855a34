# SPDX-License-Identifier: Apache-2.0
"""The schema files are valid, have examples, and each of their rules refuses something."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

import jsonschema
import referencing
from hypothesis import given, settings
from hypothesis import strategies as st

from support.each import each, variants
from support.pipeline import SCHEMAS

ASSERTIONS = set(
    "additionalProperties anyOf const enum maxItems maxLength maxProperties maximum minItems"
    " minLength minimum not pattern required type".split()
)
ANNOTATIONS = set(
    "$defs $id $ref $schema description examples items properties title x-messages".split()
)
#: In addition, in schemas of config files; answers use none of these.
OF_SETTINGS = set(
    "default exclusiveMinimum minProperties propertyNames oneOf uniqueItems writeOnly"
    " x-removed".split()
)


def files(folder: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return every schema file by its path."""
    folder = resources.files("engage_schemas") if folder is None else folder
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            yield from files(entry, f"{path}{entry.name}/")
        elif entry.name.endswith(".json"):
            yield path + entry.name, json.loads(entry.read_bytes())


ALL = dict(files())
#: The schemas of what clients send and get, by kind.
OURS = {
    path.removeprefix("payloads/").removesuffix(".json"): schema
    for path, schema in ALL.items()
    if path.startswith("payloads/") or path == "error.json"
}
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


@each("path, schema", ALL.items())
def test_every_schema_is_valid_and_described(path: str, schema: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    for field in ("$id", "title", "description"):
        assert schema[field].strip(), field
    assert schema["$id"].endswith("/" + path)
    # A file of definitions describes no document.
    assert schema.get("examples") or not {"type", "$ref", "properties"} & schema.keys()
    for example in schema.get("examples", ()):
        validator(schema).validate(example)


@each("path, document", ALL.items())
def test_no_schema_uses_what_the_two_libraries_read_differently(path: str, document: Any) -> None:
    for schema in subschemas(document):
        assert not {"format", "multipleOf"} & schema.keys()
        for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", {})):
            rest = pattern.replace("[\\s\\S]", "")
            assert not re.findall(r"\\[dDwWsSb]", rest)
            # As an anchor, it would accept a final newline.
            assert "$" not in re.sub(r"\[[^]]*\]", "", rest)


@each("kind, document", [*OURS.items(), ("config", ALL["config.json"])])
def test_every_string_has_a_greatest_length(kind: str, document: Any) -> None:
    for schema in subschemas(document):
        types = schema.get("type", ())
        if "string" in ([types] if isinstance(types, str) else types):
            assert "maxLength" in schema, schema


@each("path, document", ALL.items())
def test_every_keyword_is_known(path: str, document: Any) -> None:
    """A misspelt keyword would be ignored."""
    more = set() if document in OURS.values() else OF_SETTINGS
    for schema in subschemas(document):
        assert not schema.keys() - ASSERTIONS - ANNOTATIONS - more


def with_field(kinds: str, base: dict[str, Any], **fields: Any) -> Iterator[tuple[str, Any]]:
    """Yield a payload for each value of each field, for each kind of event."""
    for kind in kinds.split():
        yield from all_of(kind, *variants(base, **fields))


def without_field(kind: str, base: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the payload without each of its fields."""
    for missing in base:
        yield kind, {field: value for field, value in base.items() if field != missing}


def all_of(kind: str, *values: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value with the kind of payload that it is not."""
    for value in values:
        yield kind, value


ID = "u-1"
USER = {"userId": ID}
TRACK = {**USER, "event": "e"}
SUBSCRIPTION: dict[str, Any] = {"workspaceId": "w", "identifier": "i", "identifierKey": "k"}
SUBSCRIPTION |= {"hash": "h", "changes": {}}
CHOICE = {**USER, "groupId": "g", "subscribed": True}
ERROR: dict[str, Any] = {"success": False, "status": 400, "code": "c", "message": "m"}
PROBLEM = {"pointer": "", "message": "m"}

#: Values that are not ids.
ODD_IDS: tuple[Any, ...] = (1.5, True, [], {}, " ", "\t\n")

#: Values that are not times; the texts are separated by bars.
ODD_TIMES: tuple[Any, ...] = (
    *(-1, 10**14, 2**63 - 1, 1.5, True, [1700000000], {"seconds": 1700000000}),
    *(
        "|1700000000|1e9|yesterday|2026-11|20261121|2026-11-21Z|2026-11-21+01:00|2026-11-21T"
        "|2026-11-21T09:30|2026-11-21T09:30:00 |2026-11-21  09:30:00|2026-11-21 24:00:00"
        "|2026-11-21T24:00:00|2026-11-21\0|2026-11-21\n|2026-11-21T09:30:00\0|10000-01-01"
        "|-2026-01-01|２０２６-11-21|2026-11-21T09:30Z|2026-11-21 09:30:00Z|2026-11-21T25:00:00Z"
        "|2026-11-21T24:00:00Z|2026-13-01T00:00:00Z|2026-00-01T00:00:00Z|2026-11-32T00:00:00Z"
        "|2026-11-21T09:60:00Z|2026-11-21T09:30:61Z|2026-11-21T09:30:00.Z"
        "|2026-11-21T09:30:00.1234567890Z|2026-11-21T09:30:00+24:00|2026-11-21T09:30:00+0100"
        "|2026-11-21T09:30:00Z\n|٢٠٢٦-11-21T09:30:00Z"
    ).split("|"),
    "2026-11-21T09:30:00Z" + " " * 64,
)

#: Payloads that must be refused: the kind, and what breaks a rule of it.
COUNTER_EXAMPLES: list[tuple[str, Any]] = [
    *all_of("common", [], "x", None, 5, {}, {"userId": None}, {"userId": "", "anonymousId": ""}),
    *all_of("common", {"anonymousId": "\u00a0"}, {"anonymousId": "\ufeff\u2003"}),
    *with_field("common", USER, messageId=(5, "m" * 257), context=([],), integrations=("x",)),
    *with_field("common", {}, userId=(*ODD_IDS, "u" * 513)),
    # On every type of event, even if the type does not use them.
    *with_field(
        "common identify track page screen",
        TRACK,
        traits=(1, "x", [], True),
        properties=(1, "x", [], False),
        groupId=(1.5, True, [], {}, " ", "g" * 513),
        previousId=(1.5, True, [], {}, " ", "p" * 513),
    ),
    *with_field("group", {**USER, "groupId": ID}, properties=[1], traits=[1], previousId=[[]]),
    *with_field("alias", {**USER, "previousId": ID}, properties=[1], traits=[1], groupId=[[]]),
    *with_field("common", USER, timestamp=ODD_TIMES, originalTimestamp=ODD_TIMES, sentAt=ODD_TIMES),
    *with_field("identify group", USER, traits=[[]]),
    *with_field(
        "page screen", USER, properties=[5], name=(5, "n" * 1025), category=([], "c" * 1025)
    ),
    *with_field("identify track page screen group alias", USER, type=("other", 5, "TRACK")),
    ("track", USER),
    *with_field("track", TRACK, event=("", 5, None, "e" * 1025), properties=[[]]),
    *all_of("group", USER, {"groupId": ID}, {**USER, "groupId": ID, "assigned": "false"}),
    *with_field("group", USER, groupId=(None, "", " ", 1.5, True, "g" * 513)),
    *all_of("alias", USER, {"previousId": ID, "anonymousId": ID}, {**USER, "previousId": None}),
    ("alias", {"userId": "", "previousId": ID, "anonymousId": ID}),
    *all_of("item", 5, [], {}, {"type": "Track"}, {"type": None}),
    *all_of("batch", [], {}, {"batch": None}, {"batch": {}}),
    *with_field("batch", {"batch": []}, context=[[]], integrations=[True]),
    ("subscriptions", []),
    *without_field("subscriptions", SUBSCRIPTION),
    *with_field(
        "subscriptions",
        SUBSCRIPTION,
        workspaceId=(5, "", "w" * 257),
        identifier=(5, "", "i" * 513),
        identifierKey=(5, "", "k" * 257),
        hash=(None, "", "h" * 257),
        changes=([], {"g": "true"}, {"g": 1}, {str(i): True for i in range(1001)}),
        userId=(1.5, " ", "u" * 513),
        anonymousId=(1.5, " ", "u" * 513),
        v=("1", 1),
        expires=("1", 1.5, 0, 10**16),
        messageId=(5, "m" * 257),
    ),
    ("choice", []),
    *without_field("choice", CHOICE),
    *with_field("choice", CHOICE, subscribed=("true", 1), how=(5, "", "h" * 257)),
    ("error", []),
    *without_field("error", ERROR),
    *with_field(
        "error",
        ERROR,
        success=[True],
        status=(399, 600, "400"),
        code=(5, "c" * 65, "Not Found"),
        message=(5, "", "m" * 4097),
        errors=({}, [], [PROBLEM] * 21, [5], [{"pointer": ""}], [{"message": "m"}]),
        requestId=(5, "", "r" * 65),
        more=[1],
    ),
    *(
        ("error", {**ERROR, "errors": [problem]})
        for problem in variants(
            PROBLEM, pointer=(5, "p" * 4097), message=(5, "", "m" * 4097), more=[1]
        )
    ),
]


def broken(errors: Any) -> Iterator[tuple[str, str]]:
    """Return the rules that were broken, each as schema and keyword."""
    for error in errors:
        yield json.dumps(error.schema, sort_keys=True), error.validator
        yield from broken(error.context)


def test_every_rule_refuses_something() -> None:
    refused: set[tuple[str, str]] = set()
    accepted = []
    for kind, value in COUNTER_EXAMPLES:
        rules = set(broken(validator(OURS[kind]).iter_errors(value)))
        refused |= rules
        accepted += [] if rules else [(kind, value)]
    assert not accepted
    rules = {
        (json.dumps(schema, sort_keys=True), keyword)
        for document in OURS.values()
        for schema in subschemas(document)
        for keyword in ASSERTIONS & schema.keys()
        # a schema under additionalProperties is a separate rule
        if not (keyword == "additionalProperties" and schema[keyword] is not False)
    }
    assert not {(schema[:200], keyword) for schema, keyword in rules - refused}


@each("kind, value", [example for example in COUNTER_EXAMPLES if example[0] != "error"])
def test_the_fast_library_refuses_the_same_with_a_reason(kind: str, value: Any) -> None:
    assert not SCHEMAS.is_valid(kind, value)
    problems = SCHEMAS.problems(kind, value)
    assert problems
    assert all(0 < len(problem.message) < 250 for problem in problems)


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
    (
        "2026-11-21T09:30:00Z|2026-11-21t09:30:60.123456789z|2026-11-21T09:30:00+14:00"
        "|2026-11-21T09:30:00Z\n|2026-11-21T09:30:00Z\u2028|0000-01-01T00:00:00-23:59"
        "|2026-02-30T00:00:00Z|2026-11-21|2026-11-21\n|2026-11-21 09:30:00.5|2026-11-21T09:30:60"
        "|２026-11-21T09:30:00Z"
    ).split("|")
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
EXACT = {kind: validator(schema) for kind, schema in SCHEMAS.documents.items()}
likely = st.builds(
    lambda more: {"userId": "u", "event": "e", "groupId": 1, "previousId": "p", **more},
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=3),
)


@settings(max_examples=100 * len(SCHEMAS.documents))
@given(kind=st.sampled_from(sorted(SCHEMAS.documents)), value=payloads | likely)
def test_both_libraries_agree(kind: str, value: Any) -> None:
    exact = EXACT[kind].is_valid(value)
    assert SCHEMAS.is_valid(kind, value) == exact
    assert bool(SCHEMAS.problems(kind, value)) != exact


@each("path, document", SETTINGS.items())
def test_every_pattern_of_a_setting_has_a_message(path: str, document: Any) -> None:
    for schema in subschemas(document):
        assert {name for name in schema if name.startswith("x-")} <= {"x-messages", "x-removed"}
        assert "pattern" not in schema or "pattern" in schema.get("x-messages", {}), schema
        if path == "config.json":
            assert schema.get("pattern", END).endswith(END)
