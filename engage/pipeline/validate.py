# SPDX-License-Identifier: Apache-2.0
"""Validates payloads against the JSON Schema files in ``schemas/``.

Two libraries read the same files: ``jsonschema-rs`` decides whether a payload is valid (a fraction
of a microsecond), and ``jsonschema`` describes the problems of an invalid one. A property-based
test checks that they agree on our files.

A schema can have its own error messages for clients: ``x-messages`` maps a keyword to the message.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from typing import Any, Final

import jsonschema
import jsonschema_rs
import orjson
import referencing
from jsonschema.exceptions import ValidationError
from referencing.jsonschema import DRAFT202012

from engage.api.times import EVENT_TIMES
from engage.config.schema_check import nearest
from engage.errors import MAX_ERRORS, Problem, from_problems, pointer, quote
from engage.times import rfc3339

__all__ = ["Schemas"]

#: Maximum number of errors that are collected and sorted, so that a hostile payload stays cheap.
_EXAMINED: Final = 5 * MAX_ERRORS

_IDS: Final = frozenset({"/userId", "/anonymousId"})

#: Members of events that are objects. PHP writes an empty one as ``[]``.
_OBJECTS: Final = ("context", "integrations", "traits", "properties")
#: The members of other kinds that are objects, and those that are times.
_OTHERS: Final = {"choice": ((), ("updatedAt",)), "subscriptions": (("changes",), ())}


def _pattern(
    validator: Any, pattern: str, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    # A string that is too long is refused for its length; searching a megabyte of blanks as well
    # would only cost time.
    if isinstance(instance, str) and len(instance) > schema.get("maxLength", len(instance)):
        return iter(())
    return _search(validator, pattern, instance, schema) or iter(())


def _additional_properties(
    validator: Any, rule: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    # An object with too many members is refused for their number; looking at each would take 0.2 s.
    if isinstance(instance, dict) and len(instance) > schema.get("maxProperties", len(instance)):
        return iter(())
    return _additional(validator, rule, instance, schema) or iter(())


_additional: Final = jsonschema.Draft202012Validator.VALIDATORS["additionalProperties"]
_search: Final = jsonschema.Draft202012Validator.VALIDATORS["pattern"]
_Reporter: Final[type[jsonschema.protocols.Validator]] = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator,
    {"pattern": _pattern, "additionalProperties": _additional_properties},
)


class Schemas:
    """The payload schemas, compiled once.

    A kind is the name of a file in ``schemas/payloads``: an event type, ``item`` (checks only the
    ``type`` of a batch item), ``batch`` (the envelope), ``subscriptions``, ``choice`` (a row of an
    import of subscription choices), or ``common`` (the fields that all events share).
    """

    def __init__(self, documents: Mapping[str, Mapping[str, Any]]) -> None:
        pairs = [(str(schema["$id"]), schema) for schema in documents.values()]
        fast = jsonschema_rs.Registry([(uri, dict(schema)) for uri, schema in pairs])
        # Without ``$schema``: otherwise jsonschema would validate a referenced document with the
        # standard validator class instead of ``_Reporter``.
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
        """Read and compile the packaged schema files."""
        documents: dict[str, Mapping[str, Any]] = {}
        for file in resources.files("engage_schemas").joinpath("payloads").iterdir():
            if file.name.endswith(".json"):
                documents[file.name.removesuffix(".json")] = json.loads(file.read_bytes())
        return cls(documents)

    @property
    def documents(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas by kind."""
        return self._documents

    def validator(self, kind: str) -> Callable[[Any], bool]:
        """Return the function that decides whether a value is valid; for the hot path."""
        return self._validators[kind]

    def is_valid(self, kind: str, value: Any) -> bool:
        """Return whether ``value`` is valid; fast."""
        return self._validators[kind](value)

    def read(self, kind: str, value: Any) -> Any:
        """Return a value that is valid, or valid with another form of its objects and times.

        An empty list where an object is meant is ``{}``. A time in a form that the schemas do not
        have becomes RFC 3339, and an empty one is absent (docs/events.md, "Times").

        :raises ApiError: 400 ``invalid_payload``, if it is not.
        """
        valid = self._validators[kind]
        if valid(value):
            return value
        if type(value) is dict:
            objects, times = _OTHERS.get(kind, (_OBJECTS, EVENT_TIMES))
            value = dict(value)
            for name in objects:
                if value.get(name) == []:
                    value[name] = {}
            for name in times:
                time = value.get(name)
                if time == "":
                    del value[name]
                elif not self._validators["common"]({"userId": "-", "timestamp": time}):
                    value[name] = rfc3339(time) or time
            if valid(value):
                return value
        raise from_problems(self.problems(kind, value))

    def problems(self, kind: str, value: Any) -> list[Problem]:
        """Describe the error in a value, for the client.

        :return: at most :data:`~engage.errors.MAX_ERRORS` problems, sorted by pointer; none if the
            value is valid.
        """
        by_pointer: dict[str, Problem] = {}
        for _, error in zip(
            range(_EXAMINED), self._reporters[kind].iter_errors(value), strict=False
        ):
            for problem in _describe(error):
                # One problem per value is enough: the first rule that it breaks.
                by_pointer.setdefault(problem.pointer, problem)
        if "" in by_pointer and len(by_pointer) > 1 and not _IDS.isdisjoint(by_pointer):
            # The invalid id is reported already; "an id is required" would only confuse.
            del by_pointer[""]
        return sorted(by_pointer.values(), key=lambda problem: problem.pointer)[:MAX_ERRORS]


def _describe(error: ValidationError) -> Iterator[Problem]:
    place = "".join(pointer(str(part)) for part in error.absolute_path)
    keyword = str(error.validator)
    instance: Any = error.instance
    rule: Any = error.validator_value
    if keyword == "required":
        # jsonschema reports each missing member separately, but names it only in its message.
        for name in rule:
            if name not in instance:
                yield Problem(place + pointer(name), "is required" + _meant(error, [name]))
        return
    schema: Any = error.schema
    words = _message(keyword, instance, rule, schema.get("x-messages", {}))
    if keyword == "anyOf":
        words += _meant(error, [name for part in rule for name in part.get("required", ())])
    yield Problem(place, words)


def _meant(error: ValidationError, absent: Iterable[str]) -> str:
    """Return a hint if the name of an absent member was probably misspelt."""
    instance: Any = error.instance
    schema: Any = error.schema
    # A bound, because a client can send an object with many members in each of many events.
    sent = itertools.islice(
        (name for name in instance if name not in schema.get("properties", ())), MAX_ERRORS
    )
    unknown = list(sent)
    for name in absent:
        if (similar := nearest(name, unknown)) is not None:
            return f"; did you mean `{name}` (you sent `{similar}`)?"
    return ""


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


#: Messages for keywords without ``x-messages``; a test checks that every keyword in use has one.
_DEFAULTS: Final[Mapping[str, str]] = {
    "type": "must be of type {rule}",
    "enum": "must be one of {rule}",
    "minLength": "must have at least {rule} characters",
    "pattern": "has the wrong format",
    "additionalProperties": "has an unknown member",
}


def _text(value: object) -> str:
    """Return a scalar as JSON; a long string is cut."""
    if isinstance(value, str):
        value = value[:100]
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return repr(value)  # an integer beyond 64 bits, which a transform can return
