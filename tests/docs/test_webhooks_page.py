# SPDX-License-Identifier: Apache-2.0
"""docs/webhooks.md has a section for every installed provider, and its examples are valid."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engage.webhooks import StaticCredentialProvider
from support.each import each
from support.exports import registry

pytestmark = pytest.mark.checkout

PAGE = (Path(__file__).resolve().parents[2] / "docs/webhooks.md").read_text("utf-8")
SECTIONS: dict[str, str] = dict(
    re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
)
PROVIDERS = registry().webhooks


def signs_nothing(name: str) -> bool:
    """Return whether deliveries of a provider carry a secret instead of a signature."""
    factory = PROVIDERS[name].factory
    return isinstance(factory, type) and issubclass(factory, StaticCredentialProvider)


@each("name", sorted(PROVIDERS))
def test_every_provider_has_a_section_with_the_same_parts(name: str) -> None:
    assert f"[{name}](#{name})" in PAGE
    for part in ("```toml", "**At ", "**Events**", "**Retries**"):
        assert part in SECTIONS[name], part


@each("name", sorted(PROVIDERS))
def test_every_section_says_what_is_signed(name: str) -> None:
    assert ("**Deliveries are not signed.**" in SECTIONS[name]) == signs_nothing(name)
    assert ("Signed: " in SECTIONS[name]) != signs_nothing(name)


@each("name", sorted(PROVIDERS))
def test_every_example_is_valid_and_every_option_is_shown(name: str) -> None:
    [block] = re.findall(r"^```toml\n(.*?)^```", SECTIONS[name], re.MULTILINE | re.DOTALL)
    options: dict[str, Any] = tomllib.loads(block)["workspaces"]["webhooks"][name]
    schema = PROVIDERS[name].schema
    jsonschema.validate(options, schema)
    for option in schema["properties"]:
        assert re.search(rf"\b{option}\b", SECTIONS[name]), option


@each("name", sorted(PROVIDERS))
def test_every_option_has_a_description_and_valid_examples(name: str) -> None:
    schema = PROVIDERS[name].schema
    assert schema["additionalProperties"] is False
    for option in schema["properties"].values():
        assert option["description"]
        for example in option.get("examples", []):
            jsonschema.validate(example, option)
