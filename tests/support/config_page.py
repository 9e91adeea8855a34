# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/configuration.md, generated from schemas/config.json.

``python tests/support/config_page.py`` writes them again; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/configuration.md"
BEGIN = "<!-- generated from schemas/config.json by tests/support/config_page.py -->\n"
END = "<!-- end -->\n"


def tables() -> str:
    """Return the tables in Markdown."""
    schema = json.loads((ROOT / "schemas/config.json").read_text("utf-8"))
    return "\n".join((*_sections(schema, schema, ""), *_removed(schema)))


def page(text: str) -> str:
    """Return a page with newly generated tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def _sections(root: Mapping[str, Any], schema: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, given in schema["properties"].items():
        section = _resolved(root, given)
        items = _resolved(root, section.get("items", {}))
        named = section.get("additionalProperties") or {}
        path = f"{prefix}{name}"
        if section.get("type") == "object" and "properties" in section:
            yield from _table(root, f"[{path}]", section, section)
            yield from _sections(root, section, f"{path}.")
        elif "properties" in items:
            yield from _table(root, f"[[{path}]]", section, items)
            yield from _sections(root, items, f"{path}.")
        elif "properties" in named:
            yield from _table(root, f"[{path}.<name>]", section, named)
        elif not prefix:
            yield f"### `[{path}.<name>]`\n\n{section['description']}\n"


def _removed(schema: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        f"| `{section}.{key}` | {sentence[0].upper()}{sentence[1:]} |"
        for section, table in schema["properties"].items()
        for key, sentence in table.get("x-removed", {}).items()
    ]
    yield "### Removed keys\n\nA config may still have these keys; they change nothing.\n"
    yield "| Key | What decides now |\n|---|---|\n" + "\n".join(rows) + "\n"


def _table(
    root: Mapping[str, Any], title: str, section: Mapping[str, Any], table: Mapping[str, Any]
) -> Iterator[str]:
    rows = []
    for key, given in table["properties"].items():
        schema = _resolved(root, given)
        parts = (schema, schema.get("items", {}), schema.get("additionalProperties") or {})
        if any("properties" in _resolved(root, part) for part in parts):
            continue  # It has a separate section.
        required = key in table.get("required", ())
        default = "required" if required else _default(key, schema)
        rows.append(f"| `{key}` | {_type(root, schema)} | {default} | {schema['description']} |")
    yield f"### `{title}`\n\n{section['description']}\n"
    yield "| Key | Type | Default | Description |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _resolved(root: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return dict(schema)
    return {**root["$defs"][reference.rpartition("/")[2]], **schema}


def _type(root: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " \\| ".join(f"`{choice}`" for choice in schema["enum"])
    if "anyOf" in schema:
        inner = [_type(root, _resolved(root, choice)) for choice in schema["anyOf"]]
        return " or ".join(dict.fromkeys(inner))
    kind: str = schema["type"]
    return {"object": "table", "array": "list"}.get(kind, kind)


def _default(key: str, schema: Mapping[str, Any]) -> str:
    if "default" not in schema or schema["default"] in ({}, []):
        return ""
    value = schema["default"]
    if key.endswith("_bytes"):
        for unit, size in (("MiB", 1024 * 1024), ("KiB", 1024)):
            if value % size == 0:
                return f"{value} ({value // size} {unit})"
    return f"`{json.dumps(value)}`" if not isinstance(value, (int, float)) else json.dumps(value)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")
