# SPDX-License-Identifier: Apache-2.0
"""Check settings against a JSON Schema and explain each error in one line.

The lines are for the person who wrote the TOML file. Keys are dotted (``server.port``), an unknown
key comes with the nearest valid one, and a value that the schema marks ``writeOnly`` is never
quoted. A schema may word the message of a rule itself: ``x-messages`` maps a keyword to a message.
"""

from __future__ import annotations

import collections
import difflib
import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final

import jsonschema

from engage.api import ConfigError
from engage.config.secrets import doubt, stain
from engage.errors import QUOTED, quote

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

__all__ = [
    "SettingsError",
    "dotted",
    "doubts",
    "nearest",
    "problems",
    "secret_values",
    "strings",
]

#: Keys and indexes from the top of the document.
Path = tuple[str | int, ...]
#: A dotted key and the error in its value.
Problem = tuple[str, str]

_TYPES: Final = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}


class SettingsError(ConfigError):
    """Settings are wrong in one or several places.

    :param problems: one line for each problem, at least one. ``str()`` returns the first line and
        the number of others.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        more = len(self.problems) - 1
        super().__init__(self.problems[0] + (f" (and {more} more)" if more else ""))


def dotted(path: Iterable[str | int]) -> str:
    """Return a path as text: ``workspaces[0].write_keys[1].key``.

    A key that is not a bare TOML key is quoted.
    """
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            bare = part.replace("-", "").replace("_", "")
            key = part if bare.isascii() and bare.isalnum() else json.dumps(part[:QUOTED])
            text += f".{key}" if text else key
    return text


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that was probably meant, or ``None`` if none is close."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return close[0] if close else None


def problems(
    schema: Mapping[str, Any],
    value: object,
    *,
    written: object = None,
    at: Path = (),
    in_use: Container[str] = (),
) -> list[str]:
    """Validate settings.

    :param schema: a valid schema, draft 2020-12; references only within itself.
    :param value: the settings, with references to the environment resolved.
    :param written: the settings as written, before references were resolved. Messages quote these.
    :param at: the path of ``value`` in the file.
    :param in_use: secrets that are accepted even if they are not clean; see :func:`doubts`.
    :return: one line for each key that is wrong; empty if the settings are valid.
    """
    marked = list(_secrets(schema, schema, value, ()))
    # TOML has ``nan`` and ``inf``, and ``nan`` passes every limit.
    mistakes = [
        (dotted(at + path), "must be a finite number")
        for path, leaf in _leaves(value, ())
        if isinstance(leaf, float) and not math.isfinite(leaf)
    ]
    validator = jsonschema.Draft202012Validator(schema)
    secret = {path for path, _, _ in marked}
    explainer = _Explainer(schema, value if written is None else written, secret, at)
    for error in validator.iter_errors(value):
        mistakes.extend(explainer.explain(error))
    for path, empty, _ in marked:
        if empty in ([], {}) or (isinstance(empty, str) and not empty.strip()):
            mistakes.append((dotted(at + path), "must not be empty"))
    for path, text in _texts(schema, value):
        # Of a list, only the first secret is refused: so a clean one can be added in front.
        spare = isinstance(path[-1], int) and path[-1] > 0
        if not (spare or text in in_use) and (reason := stain(text)):
            mistakes.append((dotted(at + path), reason))
    lines: dict[str, str] = {}
    for key, text in mistakes:
        # One line for each key: the first rule that its value breaks.
        lines.setdefault(key, f"{key}: {text}")
    return list(lines.values())


def doubts(schema: Mapping[str, Any], value: object, *, at: Path = ()) -> list[str]:
    """Return one line for each secret that is accepted and probably wrong, without its value.

    A secret that a form (``pattern``) describes is not measured.

    :param value: settings without a problem. A secret in them that is not clean was in use before.
    :param at: the path of ``value`` in the file.
    """
    formed = {path for path, _, rule in _secrets(schema, schema, value, ()) if "pattern" in rule}
    return [
        f"{dotted(at + path)}: {reason}"
        for path, text in _texts(schema, value)
        if (reason := stain(text) or doubt(text, measured=path not in formed))
    ]


def secret_values(schema: Mapping[str, Any], value: object) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value) for each string that the schema marks ``writeOnly``."""
    for path, text in _texts(schema, value):
        yield dotted(path), text


def strings(value: object, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield (path, text) for each string within a setting."""
    return ((at, leaf) for at, leaf in _leaves(value, path) if isinstance(leaf, str))


# ------------------------------------------------------------------------------------- internals
def _leaves(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    """Yield (path, value) for each value within a setting that is no table and no list."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _resolve(root: Mapping[str, Any], reference: str) -> Any:
    target: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key, {}) if isinstance(target, Mapping) else {}
    return target


def _texts(schema: Mapping[str, Any], value: object) -> Iterator[tuple[Path, str]]:
    """Yield (path, value) once for each string that the schema marks ``writeOnly``."""
    seen: set[Path] = set()
    for path, secret, _ in _secrets(schema, schema, value, ()):
        for inner, text in strings(secret, path):
            if inner not in seen:
                seen.add(inner)
                yield inner, text


def _secrets(
    root: Any, schema: Any, value: object, path: Path
) -> Iterator[tuple[Path, object, Mapping[str, Any]]]:
    """Walk a value along its schema and yield (path, value, schema) for each part marked
    ``writeOnly``."""
    if not isinstance(schema, Mapping) or len(path) > 64:
        return
    if schema.get("writeOnly") is True:
        yield path, value, schema
    if isinstance(reference := schema.get("$ref"), str):
        yield from _secrets(root, _resolve(root, reference), value, path)
    for several in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(several, ()):
            yield from _secrets(root, inner, value, path)
    if isinstance(value, Mapping):
        properties = schema.get("properties", {})
        for key, item in value.items():
            if key in properties:
                yield from _secrets(root, properties[key], item, (*path, key))
            else:
                yield from _secrets(root, schema.get("additionalProperties"), item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _secrets(root, schema.get("items"), item, (*path, index))


class _Explainer:
    """Turns the errors of jsonschema into lines for the person who wrote the file.

    :param root: the whole schema.
    :param written: the settings as written, references unresolved; values are quoted from here.
    :param secret: paths of the values that must not be quoted.
    :param at: the path of the settings in the file.
    """

    def __init__(
        self, root: Mapping[str, Any], written: object, secret: Set[Path], at: Path
    ) -> None:
        self._root = root
        self._written = written
        self._secret = secret
        self._at = at

    def explain(self, error: ValidationError) -> Iterator[Problem]:
        """Yield the message for each key that the error concerns."""
        if "propertyNames" in error.absolute_schema_path:
            yield self._wrong_name(error)
        elif error.validator in ("anyOf", "oneOf") and error.context:
            yield from self._no_alternative(error, error.context)
        elif error.validator == "additionalProperties" and error.validator_value is False:
            yield from self._unknown_keys(error)
        elif error.validator == "required":
            yield from self._missing_keys(error)
        else:
            yield self._wrong_value(error)

    def _no_alternative(
        self, error: ValidationError, reasons: Sequence[ValidationError]
    ) -> Iterator[Problem]:
        """Explain a value that fits no alternative of ``anyOf``, by the one that was meant."""
        inside = [inner for inner in reasons if inner.validator != "type" or inner.path]
        if not inside:
            expected = dict.fromkeys(_types(inner.validator_value) for inner in reasons)
            text = f"must be {' or '.join(expected)}, not {_type_of(error.instance)}"
            yield self._key(error), text
            return
        # The author meant the alternative whose type fits and which has the fewest errors.
        count = collections.Counter(inner.schema_path[0] for inner in inside)
        meant: Any = min(count, key=count.__getitem__)
        for inner in inside:
            # The schema False forbids a key, but its error does not name that key: see below.
            if inner.schema_path[0] == meant and inner.schema is not False:
                yield from self.explain(inner)
        alternatives: Any = error.validator_value
        yield from self._forbidden_keys(error, alternatives[meant])

    def _forbidden_keys(self, error: ValidationError, alternative: Any) -> Iterator[Problem]:
        """Name the keys that an alternative forbids, and those that it requires instead."""
        if not isinstance(alternative, Mapping):
            return
        others = " and ".join(alternative.get("required", ())) or "the others"
        instance: Any = error.instance
        for name, rule in alternative.get("properties", {}).items():
            if rule is False and name in instance:
                yield self._key(error, name), f"must not be set together with {others}"

    def _wrong_name(self, error: ValidationError) -> Problem:
        name, schema = str(error.instance), error.schema
        messages = schema.get("x-messages", {}) if isinstance(schema, Mapping) else {}
        text = messages.get("propertyNames", "is not the name of a plugin")
        return self._key(error, name), f"{text}{self._hint(error, name)}"

    def _unknown_keys(self, error: ValidationError) -> Iterator[Problem]:
        schema: Any = error.schema
        instance: Any = error.instance
        properties = schema.get("properties", {})
        for name in instance:
            if name in properties:
                continue
            meant = nearest(name, properties)
            if meant is not None:
                hint = f"; did you mean {self._key(error, meant)}?"
            else:
                valid = (
                    f"the valid keys here: {', '.join(properties)}"
                    if properties
                    else "no key is valid"
                )
                hint = self._hint(error, name) or f"; {valid}"
            yield self._key(error, name), f"unknown key{hint}"

    def _missing_keys(self, error: ValidationError) -> Iterator[Problem]:
        schema: Any = error.schema
        instance: Any = error.instance
        required: Any = error.validator_value
        properties = schema.get("properties", {})
        closed = schema.get("additionalProperties") is False
        # A key that is only misspelt is reported as an unknown key, with the right name.
        misspelt = {
            nearest(name, properties) for name in instance if closed and name not in properties
        }
        for name in required:
            if name not in instance and name not in misspelt:
                hint = _list_of_tables(properties.get(name), (*self._path(error), name))
                yield self._key(error, name), f"is missing{hint}"

    def _wrong_value(self, error: ValidationError) -> Problem:
        hint = ""
        if error.validator == "type" and isinstance(error.instance, Mapping):
            hint = _list_of_tables(error.schema, self._path(error))
        return self._key(error), f"{_rule(error)}{self._quote(error)}{hint}"

    def _path(self, error: ValidationError) -> Path:
        return (*self._at, *error.absolute_path)

    def _key(self, error: ValidationError, *more: str) -> str:
        return dotted((*self._path(error), *more)) or "the file"

    def _hint(self, error: ValidationError, name: str) -> str:
        """Look for a key in the whole schema: it may be in the wrong table."""
        everywhere = list(_all_keys(self._root, self._root, ""))
        for meant in (name, nearest(name, (key.rpartition(".")[2] for key in everywhere))):
            matches = [key for key in everywhere if meant and key.rpartition(".")[2] == meant]
            # A key that several tables have does not tell which of them was meant.
            if len(matches) == 1 or (matches and not self._path(error)):
                return f"; did you mean {'.'.join(filter(None, (dotted(self._at), matches[0])))}?"
        return ""

    def _quote(self, error: ValidationError) -> str:
        """Return the value as written in the file, if it is plain and not secret."""
        path = tuple(error.absolute_path)
        if error.validator not in ("enum", "const", "pattern", "minimum", "maximum"):
            return ""
        if any(path[: len(hidden)] == hidden for hidden in self._secret):
            return ""
        value: Any = self._written
        try:
            for part in path:
                value = value[part]
            text = json.dumps(value)
        except (KeyError, IndexError, TypeError, ValueError):
            return ""
        if isinstance(value, (Mapping, list)):
            return ""
        return f" (it is {quote(text)})"


def _list_of_tables(schema: Any, path: Path) -> str:
    """Return a hint on how TOML writes a list of tables, if ``schema`` is such a list."""
    items = schema.get("items") if isinstance(schema, Mapping) else None
    if not isinstance(items, Mapping) or "properties" not in items:
        return ""
    return f"; write [[{dotted(part for part in path if not isinstance(part, int))}]]"


def _all_keys(root: Any, schema: Any, prefix: str) -> Iterator[str]:
    if not isinstance(schema, Mapping) or prefix.count(".") > 8:
        return
    for key, inner in schema.get("properties", {}).items():
        path = f"{prefix}.{key}" if prefix else key
        yield path
        yield from _all_keys(root, inner, path)
    yield from _all_keys(root, schema.get("items"), prefix)


def _types(value: object) -> str:
    names = value if isinstance(value, list) else [value]
    return " or ".join(_TYPES.get(str(name), str(name)) for name in names)


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    for python, name in ((str, "string"), (int, "integer"), (list, "array"), (Mapping, "object")):
        if isinstance(value, python):
            return _TYPES[name]
    return "a number" if isinstance(value, float) else "a date or time"


def _rule(error: ValidationError) -> str:
    limit: Any = error.validator_value
    schema: Any = error.schema
    keyword = str(error.validator)
    if (message := schema.get("x-messages", {}).get(keyword)) is not None:
        return str(message)
    match keyword:
        case "type":
            return f"must be {_types(limit)}, not {_type_of(error.instance)}"
        case "enum":
            choices = ", ".join(json.dumps(choice) for choice in limit)
            meant = nearest(str(error.instance), [str(choice) for choice in limit])
            return f"must be one of {choices}" + (f"; did you mean {meant}?" if meant else "")
        case "const":
            return f"must be {json.dumps(limit)}"
        case "minimum":
            return f"must be at least {limit}"
        case "exclusiveMinimum":
            return f"must be more than {limit}"
        case "maximum":
            return f"must be at most {limit}"
        case "exclusiveMaximum":
            return f"must be less than {limit}"
        case "minLength" | "minItems" | "minProperties":
            return "must not be empty" if limit == 1 else f"is too short (at least {limit})"
        case "maxLength" | "maxItems" | "maxProperties":
            return f"is too long (at most {limit})"
        case "pattern":
            return f"must match {limit}"
        case "uniqueItems":
            return "contains the same item twice"
        case _:
            return f"does not match {keyword!r} of the schema"
