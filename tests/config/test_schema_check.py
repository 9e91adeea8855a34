# SPDX-License-Identifier: Apache-2.0
"""Settings are checked against a schema: one line for each problem, and never a secret."""

from __future__ import annotations

import math

from engage.config.schema_check import SettingsError, dotted, nearest, problems, secret_values
from support.each import each

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["url"],
    "properties": {
        "url": {"type": "string", "writeOnly": True, "pattern": "^x:"},
        "pool": {"type": "integer", "minimum": 1, "maximum": 9},
        "mode": {"enum": ["fast", "safe"]},
        "keys": {
            "writeOnly": True,
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/key"}}],
        },
        "tls": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"certificate": {"type": "string", "maxLength": 5}},
        },
    },
    "$defs": {"key": {"type": "string", "minLength": 1}},
}


@each(
    "value, line",
    [
        ({}, "storage.x.url: is missing"),
        ({"url": "x:", "pol": 1}, "storage.x.pol: unknown key; did you mean storage.x.pool?"),
        (
            {"url": "x:", "certificate": "a"},
            "storage.x.certificate: unknown key; did you mean storage.x.tls.certificate?",
        ),
        (
            {"url": "x:", "zzz": 1},
            "storage.x.zzz: unknown key; the valid keys here: url, pool, mode, keys, tls",
        ),
        ({"url": "x:", "pool": "1"}, "storage.x.pool: must be an integer, not a string"),
        ({"url": "x:", "pool": True}, "storage.x.pool: must be an integer, not true or false"),
        ({"url": "x:", "pool": 0}, "storage.x.pool: must be at least 1 (it is 0)"),
        ({"url": "x:", "pool": 10}, "storage.x.pool: must be at most 9 (it is 10)"),
        ({"url": "x:", "pool": math.nan}, "storage.x.pool: must be a finite number"),
        (
            {"url": "x:", "mode": "safer"},
            'storage.x.mode: must be one of "fast", "safe"; did you mean safe? (it is "safer")',
        ),
        ({"url": "x:", "tls": []}, "storage.x.tls: must be a table, not a list"),
        (
            {"url": "x:", "tls": {"certificate": "123456"}},
            "storage.x.tls.certificate: is too long (at most 5)",
        ),
        ({"url": "x:", "keys": 3}, "storage.x.keys: must be a string or a list, not an integer"),
        ({"url": "x:", "keys": [3]}, "storage.x.keys[0]: must be a string, not an integer"),
        ({"url": "x:", "keys": [""]}, "storage.x.keys[0]: must not be empty"),
        ({"url": "x:", "keys": ""}, "storage.x.keys: must not be empty"),
        ({"url": "x:", "keys": []}, "storage.x.keys: must not be empty"),
        ({"url": "x:", "keys": "  "}, "storage.x.keys: must not be empty"),
    ],
)
def test_a_problem_is_described_in_one_line(value: object, line: str) -> None:
    assert line in problems(SCHEMA, value, at=("storage", "x"))


@each(
    "value, line",
    [
        # The required ``url`` is missing because it is misspelt.
        ({"ulr": "x:"}, "ulr: unknown key; did you mean url?"),
        ({"url": ""}, "url: must match ^x:"),
        ({"url": "x:", "pool": math.inf}, "pool: must be a finite number"),
    ],
)
def test_one_mistake_is_one_problem(value: object, line: str) -> None:
    assert problems(SCHEMA, value) == [line]


EITHER = {
    "type": "object",
    "additionalProperties": False,
    "properties": {name: {"type": "string"} for name in ("value", "user", "password")},
    "oneOf": [
        {"required": ["value"], "properties": {"user": False, "password": False}},
        {"required": ["user", "password"], "properties": {"value": False}},
    ],
}


@each(
    "value, line",
    [
        ({}, "value: is missing"),
        ({"user": "u"}, "password: is missing"),
        ({"password": "p"}, "user: is missing"),
        (
            {"value": "v", "user": "u", "password": "p"},
            "value: must not be set together with user and password",
        ),
        ({"value": "v", "user": "u"}, "user: must not be set together with value"),
        ({"value": 1}, "value: must be a string, not an integer"),
    ],
)
def test_a_problem_is_that_of_the_nearer_alternative(value: object, line: str) -> None:
    [said] = problems(EITHER, value)
    assert said == line


def test_valid_settings_have_no_problems() -> None:
    assert problems(SCHEMA, {"url": "x:y", "keys": ["a", "b"], "pool": 9}) == []


@each(
    "value",
    [
        *({"url": "SECRET"}, {"url": ["SECRET"]}, {"url": {"SECRET2": "SECRET"}}),
        {"url": "x:", "keys": {"SECRET2": "SECRET"}},
        *({"url": "x:", "keys": ["SECRET", "SECRET", 1]}, {"url": "x:", "kesy": "SECRET"}),
    ],
)
def test_a_secret_is_never_quoted(value: object) -> None:
    found = problems(SCHEMA, value, written=value)
    assert found
    assert "SECRET" not in "\n".join(found).replace("SECRET2", "")


def test_a_reference_is_quoted_as_it_was_written() -> None:
    assert problems(SCHEMA, {"url": "x:", "mode": "hunter2"}, written={"mode": "${MODE}"}) == [
        'mode: must be one of "fast", "safe" (it is "${MODE}")'
    ]


def test_at_most_80_characters_are_quoted() -> None:
    (line,) = problems(SCHEMA, {"url": "x:", "mode": "m" * 1000})
    assert len(line) < 160


def test_every_secret_is_found_once() -> None:
    found = list(secret_values(SCHEMA, {"url": "x:1", "keys": ["a", "b"], "mode": "fast"}))
    assert found == [("url", "x:1"), ("keys[0]", "a"), ("keys[1]", "b")]


def test_dotted_keys_name_a_place() -> None:
    assert dotted(("a", 0, "b-c", "d e", "")) == 'a[0].b-c."d e".""'


def test_the_nearest_key_is_suggested() -> None:
    assert nearest("prot", ["port", "host"]) == "port"
    assert nearest("qqq", ["port", "host"]) is None


def test_a_settings_error_has_all_problems_in_one_line() -> None:
    error = SettingsError(["a", "b", "c"])
    assert str(error) == "a (and 2 more)"
    assert error.problems == ("a", "b", "c")
