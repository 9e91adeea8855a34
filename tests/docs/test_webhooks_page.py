# SPDX-License-Identifier: Apache-2.0
"""What docs/webhooks.md says of each provider: its options are allowed, its weakness is named."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest

from support.providers import DATA, registered

PAGE = Path(__file__).parents[2] / "docs" / "webhooks.md"
PROVIDERS = sorted(
    {vector["provider"] for vector in json.loads((DATA / "webhook_signatures.json").read_bytes())}
)
STATIC = ["amplitude", "mixpanel", "mparticle", "posthog", "postmark", "rudderstack"]


def section(provider):
    """:return: what the page says under the provider's heading."""
    text = PAGE.read_text("utf-8")
    match = re.search(rf"^## {provider}$\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert match is not None, f"docs/webhooks.md has no section {provider}"
    return match[1]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_options_in_the_page_are_allowed(provider):
    blocks = re.findall(r"```toml\n(.*?)```", section(provider), re.DOTALL)
    assert blocks, "no TOML"
    for block in blocks:
        options = tomllib.loads(block)["workspaces"]["webhooks"][provider]
        jsonschema.validate(options, registered(provider).schema)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_page_says_where_to_click_what_comes_and_how_long_it_is_tried(provider):
    text = section(provider)
    for said in ("**At ", "**Events**", "**Retries**"):
        assert said in text


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_page_says_who_signs_nothing(provider):
    assert ("**Nothing is signed.**" in section(provider)) == (provider in STATIC)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_option_has_a_description(provider):
    schema = registered(provider).schema
    assert schema["additionalProperties"] is False
    for option in schema["properties"].values():
        assert option["description"]
        for example in option.get("examples", []):
            jsonschema.validate(example, option)
