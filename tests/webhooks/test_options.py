# SPDX-License-Identifier: Apache-2.0
"""Options of providers: their schemas, and the keys that secrets contain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing

from engage.api import ConfigError, ProviderContext, Signing, Translation, WebhookRequest
from engage.registry import load_plugins
from engage.webhooks import SecretProvider, options_schema
from support.each import each

FOLDER = resources.files("engage_schemas").joinpath("plugins/webhooks")
FILES: dict[str, Any] = {
    file.name: json.loads(file.read_bytes())
    for file in FOLDER.iterdir()
    if file.name.endswith(".json")
}
REGISTRY: Any = referencing.Registry().with_contents(
    [(schema["$id"], schema) for schema in FILES.values()]
)
PROVIDERS = load_plugins().webhooks
CONTEXT = ProviderContext(workspace_id="acme", public_url=None)


def references(schema: Any) -> list[str]:
    """Return every ``$ref`` in a schema."""
    if isinstance(schema, dict):
        found = [schema["$ref"]] if "$ref" in schema else []
        return found + [inner for value in schema.values() for inner in references(value)]
    if isinstance(schema, list):
        return [inner for value in schema for inner in references(value)]
    return []


@each("name", sorted(PROVIDERS))
def test_the_registered_schema_is_the_file_without_references(name: str) -> None:
    registered, file = PROVIDERS[name].schema, FILES[f"{name}.json"]
    assert registered["$id"] == file["$id"]
    assert not references(registered)
    option = next(iter(file["examples"][0]))
    samples = [
        *file["examples"],
        *({}, {option: ""}, {option: []}, {option: ["a", ""]}),
        *({**file["examples"][0], "unknown": 1}, {**file["examples"][0], "basic_user": "a:b"}),
        {**file["examples"][0], "header": "a b"},
        {**file["examples"][0], "public_url": "ftp://x"},
    ]
    by_file = jsonschema.Draft202012Validator(file, registry=REGISTRY)
    by_registered = jsonschema.Draft202012Validator(registered)
    for sample in samples:
        assert by_file.is_valid(sample) == by_registered.is_valid(sample), sample


def test_keywords_beside_a_reference_take_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "acme_schemas"
    package.mkdir()
    (package / "__init__.py").touch()
    shared = {
        "$defs": {
            "text": {"type": "string", "description": "a text"},
            "word": {"$ref": "#/$defs/text", "minLength": 1},
        }
    }
    (package / "shared.json").write_text(json.dumps(shared))
    own = {
        "$defs": {"mine": {"type": "integer"}},
        "properties": {
            "a": {"$ref": "shared.json#/$defs/word", "description": "a word"},
            "b": {"$ref": "#/$defs/mine"},
            "c": {"$ref": "https://example.com/schema.json#/c"},
        },
    }
    (package / "own.json").write_text(json.dumps(own))
    monkeypatch.syspath_prepend(tmp_path)
    assert options_schema("acme_schemas", "own.json") == {
        "$defs": {"mine": {"type": "integer"}},
        "properties": {
            "a": {"type": "string", "minLength": 1, "description": "a word"},
            # References within the file, and to other places, stay as they are.
            "b": {"$ref": "#/$defs/mine"},
            "c": {"$ref": "https://example.com/schema.json#/c"},
        },
    }


class Acme(SecretProvider):
    """Signs with what the option ``key`` holds in hex."""

    secret_option = "key"
    signing = Signing(signature="x-acme")

    def key_of(self, secret: str) -> bytes:
        return bytes.fromhex(secret)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        raise NotImplementedError

    def translate(self, request: WebhookRequest) -> Translation:
        raise NotImplementedError


@each("options, keys", [({"key": "0102"}, [b"\1\2"]), ({"key": ["01", "02"]}, [b"\1", b"\2"])])
def test_a_secret_provider_has_a_key_for_each_secret(
    options: Mapping[str, Any], keys: list[bytes]
) -> None:
    provider = Acme(options, CONTEXT)
    assert provider.keys == keys
    assert provider.credentials() == keys


@each("options", [{}, {"key": ""}, {"key": []}, {"key": ["01", ""]}])
def test_an_empty_secret_is_refused(options: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match="key: must not be empty"):
        Acme(options, CONTEXT)
