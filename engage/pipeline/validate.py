# SPDX-License-Identifier: Apache-2.0
"""Is a payload what ``schemas/`` says?

The same files are read by two libraries: ``jsonschema-rs`` decides (a fraction of a microsecond),
``jsonschema`` writes the report when the answer is no. A property-based test proves that they agree
on our files.

A schema may say its rules in words for the client: ``x-messages`` maps a keyword to the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any, Final

import jsonschema
import jsonschema_rs
import orjson
import referencing
from jsonschema.exceptions import ValidationError
from referencing.jsonschema import DRAFT202012

from engage.errors import MAX_ERRORS, Problem, pointer, quote

__all__ = ["Schemas"]

#: What the report is cut to before it is sorted: a hostile payload must not cost much.
_EXAMINED: Final = 5 * MAX_ERRORS

_IDS: Final = frozenset({"/userId", "/anonymousId"})


def _pattern(
    validator: Any, pattern: str, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    # What is too long is refused for that: a megabyte of blanks need not be searched as well.
    if isinstance(instance, str) and len(instance) > schema.get("maxLength", len(instance)):
        return iter(())
    return _search(validator, pattern, instance, schema) or iter(())


_search: Final = jsonschema.Draft202012Validator.VALIDATORS["pattern"]
_Reporter: Final[type[jsonschema.protocols.Validator]] = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator, {"pattern": _pattern}
)


class Schemas:
    """The payload schemas, compiled once.

    Kinds are the names of the files in ``schemas/payloads``: the event types, ``item`` (of a batch:
    says only what its ``type`` may be), ``batch`` (the envelope) and ``subscriptions``.
    """

    def __init__(self, documents: Mapping[str, Mapping[str, Any]]) -> None:
        pairs = [(str(schema["$id"]), schema) for schema in documents.values()]
        fast = jsonschema_rs.Registry([(uri, dict(schema)) for uri, schema in pairs])
        # Without its ``$schema``, or a document that is referred to is read by the plain reporter.
        plain = {uri: {k: v for k, v in schema.items() if k != "$schema"} for uri, schema in pairs}
        exact: referencing.Registry[Any] = referencing.Registry().with_contents(
            plain.items(), default_specification=DRAFT202012
        )
        self._documents: Final = dict(documents)
        self._validators: Final[dict[str, Callable[[Any], bool]]] = {}
        self._reporters: Final[dict[str, jsonschema.protocols.Validator]] = {}
        for kind, schema in documents.items():
            self._validators[kind] = jsonschema_rs.Draft202012Validator(
                dict(schema), registry=fast
            ).is_valid
            self._reporters[kind] = _Reporter(plain[str(schema["$id"])], registry=exact)

    @classmethod
    def load(cls) -> Schemas:
        """Read the packaged files."""
        documents: dict[str, Mapping[str, Any]] = {}
        for file in resources.files("engage_schemas").joinpath("payloads").iterdir():
            if file.name.endswith(".json"):
                documents[file.name.removesuffix(".json")] = json.loads(file.read_bytes())
        return cls(documents)

    @property
    def documents(self) -> Mapping[str, Mapping[str, Any]]:
        """Kind → its schema."""
        return self._documents

    def validator(self, kind: str) -> Callable[[Any], bool]:
        """:return: says whether a value is valid; for the hot path."""
        return self._validators[kind]

    def is_valid(self, kind: str, value: Any) -> bool:
        """:return: whether ``value`` is as the schema says; fast."""
        return self._validators[kind](value)

    def problems(self, kind: str, value: Any) -> list[Problem]:
        """Say what is wrong, for the client.

        :return: at most :data:`~engage.errors.MAX_ERRORS`, by pointer; empty: it is valid.
        """
        found: dict[str, Problem] = {}
        for _, error in zip(
            range(_EXAMINED), self._reporters[kind].iter_errors(value), strict=False
        ):
            for problem in _describe(error):
                # One per place: the first rule that a value breaks says enough.
                found.setdefault(problem.pointer, problem)
        if "" in found and len(found) > 1 and not _IDS.isdisjoint(found):
            # That an id is needed is no news where an id is wrong.
            del found[""]
        return sorted(found.values(), key=lambda problem: problem.pointer)[:MAX_ERRORS]


def _describe(error: ValidationError) -> Iterator[Problem]:
    place = "".join(pointer(str(part)) for part in error.absolute_path)
    keyword = str(error.validator)
    instance: Any = error.instance
    rule: Any = error.validator_value
    if keyword == "required":
        # jsonschema reports each missing member by itself, but names it only in its own message.
        for name in rule:
            if name not in instance:
                yield Problem(place + pointer(name), "is required")
        return
    schema: Any = error.schema
    yield Problem(place, _message(keyword, instance, rule, schema.get("x-messages", {})))


def _message(keyword: str, value: Any, rule: Any, messages: Mapping[str, str]) -> str:
    if keyword == "maxLength":
        return f"is too long ({len(value)} characters; the limit is {rule})"
    if keyword == "maxProperties":
        return f"has too many members ({len(value)}; the limit is {rule})"
    words = messages.get(keyword)
    if words is None:
        words = _DEFAULTS.get(keyword, "is not allowed").format(rule=rule)
    if words.startswith("must be ") and not isinstance(value, dict | list):
        return f"{words}, not {quote(_text(value))}"
    return words


#: For rules that say nothing themselves; a test compares them with the keywords that are used.
_DEFAULTS: Final[Mapping[str, str]] = {
    "type": "must be of type {rule}",
    "enum": "must be one of {rule}",
    "minLength": "must have at least {rule} characters",
    "pattern": "has the wrong format",
    "additionalProperties": "has an unknown member",
}


def _text(value: object) -> str:
    """:return: a scalar as JSON, but a long string not wholly."""
    if isinstance(value, str):
        value = value[:100]
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return repr(value)  # an integer beyond 64 bits: a transform can make one
