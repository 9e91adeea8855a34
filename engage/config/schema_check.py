# SPDX-License-Identifier: Apache-2.0
"""Check settings against a JSON Schema and say in one line each what is wrong.

For what a person wrote in a TOML file: keys are dotted (``server.port``), an unknown key comes with
the nearest valid one, and nothing that the schema marks ``writeOnly`` is ever quoted. A schema may
say a rule in words: ``x-messages`` maps a keyword to the message.
"""

from __future__ import annotations

import collections
import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jsonschema

from engage.api import ConfigError

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

__all__ = ["SettingsError", "dotted", "nearest", "problems", "secret_values", "strings"]

#: Keys and indexes from the top of the document.
Path = tuple[str | int, ...]

_QUOTED: Final = 80
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
    """Settings that are wrong in one or several places.

    :param problems: one line each, at least one. ``str()`` is the first, and how many more.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        more = len(self.problems) - 1
        super().__init__(self.problems[0] + (f" (and {more} more)" if more else ""))


def dotted(path: Iterable[str | int]) -> str:
    """:return: ``workspaces[0].write_keys[1].key``; a key that is not a bare TOML key is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            bare = part.replace("-", "").replace("_", "")
            key = part if bare.isascii() and bare.isalnum() else json.dumps(part[:_QUOTED])
            text += f".{key}" if text else key
    return text


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """:return: the candidate that was probably meant, or ``None``."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return close[0] if close else None


def problems(
    schema: Mapping[str, Any], value: object, *, written: object = None, at: Path = ()
) -> list[str]:
    """Validate settings.

    :param schema: a valid schema, draft 2020-12; references only within itself.
    :param value: what to check, references to the environment resolved.
    :param written: the same before they were resolved; values are quoted from here.
    :param at: where ``value`` stands in the file.
    :return: one line for each key that is wrong; nothing: it is valid.
    """
    secret = {path for path, _ in _secrets(schema, schema, value, ())}
    found = [(dotted(at + path), "must be a finite number") for path in _not_finite(value, ())]
    validator = jsonschema.Draft202012Validator(schema)
    for error in validator.iter_errors(value):
        found.extend(_explain(schema, error, value if written is None else written, secret, at))
    for path, empty in _secrets(schema, schema, value, ()):
        if empty in ([], {}) or (isinstance(empty, str) and not empty.strip()):
            found.append((dotted(at + path), "must not be empty"))
    lines: dict[str, str] = {}
    for key, text in found:
        # The first rule that a value breaks says enough.
        lines.setdefault(key, f"{key}: {text}")
    return list(lines.values())


def secret_values(schema: Mapping[str, Any], value: object) -> Iterator[tuple[str, str]]:
    """:return: (dotted key, value) of each string that the schema marks ``writeOnly``."""
    seen: set[Path] = set()
    for path, found in _secrets(schema, schema, value, ()):
        for inner, text in strings(found, path):
            if inner not in seen:
                seen.add(inner)
                yield dotted(inner), text


def strings(value: object, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """:return: (where it stands, text) of each string within a setting."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from strings(item, (*path, index))


# ------------------------------------------------------------------------------------- internals
def _not_finite(value: object, path: Path) -> Iterator[Path]:
    """TOML has ``nan`` and ``inf``; ``nan`` passes every ``minimum`` and ``maximum``."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _not_finite(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_finite(item, (*path, index))


def _resolve(root: Mapping[str, Any], reference: str) -> Any:
    target: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key, {}) if isinstance(target, Mapping) else {}
    return target


def _secrets(root: Any, schema: Any, value: object, path: Path) -> Iterator[tuple[Path, object]]:
    """Walk a value along its schema: (path, value) of all that is marked ``writeOnly``."""
    if not isinstance(schema, Mapping) or len(path) > 64:
        return
    if schema.get("writeOnly") is True:
        yield path, value
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


def _explain(
    root: Mapping[str, Any], error: ValidationError, written: object, secret: set[Path], at: Path
) -> Iterator[tuple[str, str]]:
    """:return: (dotted key, what is wrong with it)."""
    schema: Any = error.schema
    instance: Any = error.instance
    limit: Any = error.validator_value
    if error.validator in ("anyOf", "oneOf") and error.context:
        # A type that no alternative has is said of all of them together.
        types = [inner for inner in error.context if inner.validator == "type"]
        if len(types) == len(error.context) and not any(inner.path for inner in types):
            expected = " or ".join(dict.fromkeys(_types(inner.validator_value) for inner in types))
            yield _key(at, error), f"must be {expected}, not {_type_of(error.instance)}"
            return
        # What went deepest into an alternative, and is least wrong there, was meant for that one.
        inside = [inner for inner in error.context if inner.validator != "type" or inner.path]
        if inside and "propertyNames" not in error.absolute_schema_path:
            wrong = collections.Counter(inner.schema_path[0] for inner in inside)
            meant = min(wrong, key=wrong.__getitem__)
            for inner in inside:
                if inner.schema_path[0] == meant and inner.schema is not False:
                    yield from _explain(root, inner, written, secret, at)
            # An error of a key that must not be there does not say which.
            way = limit[meant] if isinstance(limit[meant], Mapping) else {}
            others = " and ".join(way.get("required", ())) or "the others"
            for name, rule in way.get("properties", {}).items():
                if rule is False and name in instance:
                    key = dotted((*at, *error.absolute_path, name))
                    yield key, f"must not be there beside {others}"
            return
    if "propertyNames" in error.absolute_schema_path:
        name = str(error.instance)
        path = (*at, *error.absolute_path, name)
        yield dotted(path), f"not the name of a plugin{_meant(root, name, at)}"
    elif error.validator == "additionalProperties" and limit is False:
        known = schema.get("properties", {})
        for name in instance:
            if name not in known:
                yield _unknown(root, name, known, error, at)
    elif error.validator == "required":
        known = schema.get("properties", {})
        closed = schema.get("additionalProperties") is False
        misspelt = {nearest(name, known) for name in instance if closed and name not in known}
        for name in limit:
            # That a misspelt key is missing is said where its right name is.
            if name not in instance and name not in misspelt:
                path = (*at, *error.absolute_path, name)
                how = _written_as(known.get(name), path)
                yield dotted(path), f"is missing{how}"
    else:
        how = ""
        if error.validator == "type" and isinstance(instance, Mapping):
            how = _written_as(schema, (*at, *error.absolute_path))
        yield _key(at, error), f"{_rule(error)}{_quote(error, written, secret)}{how}"


def _written_as(schema: Any, path: Path) -> str:
    """How TOML writes a list of tables, for who wrote one table, or none."""
    items = schema.get("items") if isinstance(schema, Mapping) else None
    if not isinstance(items, Mapping) or "properties" not in items:
        return ""
    return f"; write [[{dotted(part for part in path if not isinstance(part, int))}]]"


def _key(at: Path, error: ValidationError) -> str:
    return dotted((*at, *error.absolute_path)) or "the file"


def _unknown(
    root: Mapping[str, Any],
    name: str,
    known: Mapping[str, Any],
    error: ValidationError,
    at: Path,
) -> tuple[str, str]:
    here = (*at, *error.absolute_path)
    key, text = dotted((*here, name)), "unknown key"
    meant = nearest(name, known)
    if meant is not None:
        return key, f"{text}; did you mean {dotted((*here, meant))}?"
    elsewhere = _meant(root, name, at)
    if elsewhere:
        return key, text + elsewhere
    keys = ", ".join(known) if known else "none"
    return key, f"{text}; valid here: {keys}"


def _meant(root: Mapping[str, Any], name: str, at: Path) -> str:
    """Look for a key in the whole schema: it may stand in the wrong table."""
    everywhere = list(_all_keys(root, root, ""))
    for wanted in (name, nearest(name, (key.rpartition(".")[2] for key in everywhere))):
        for key in everywhere:
            if wanted is not None and key.rpartition(".")[2] == wanted:
                return f"; did you mean {'.'.join(filter(None, (dotted(at), key)))}?"
    return ""


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
            return "must not be empty" if limit == 1 else f"too short (at least {limit})"
        case "maxLength" | "maxItems" | "maxProperties":
            return f"too long (at most {limit})"
        case "pattern":
            return f"must match {limit}"
        case "uniqueItems":
            return "has the same item twice"
        case _:
            return f"does not fit the schema's {keyword!r}"


def _quote(error: ValidationError, written: object, secret: set[Path]) -> str:
    """The value as it stands in the file, if it is short, plain and no secret."""
    path = tuple(error.absolute_path)
    if error.validator not in ("enum", "const", "pattern", "minimum", "maximum"):
        return ""
    if any(path[: len(hidden)] == hidden for hidden in secret):
        return ""
    value: Any = written
    try:
        for part in path:
            value = value[part]
        text = json.dumps(value)
    except (KeyError, IndexError, TypeError, ValueError):
        return ""
    if isinstance(value, (Mapping, list)):
        return ""
    return f" (it is {text if len(text) <= _QUOTED else text[: _QUOTED - 1] + '…'})"
