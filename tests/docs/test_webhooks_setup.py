# SPDX-License-Identifier: Apache-2.0
"""docs/webhooks.md has a section for every provider, and its TOML is taken."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import jsonschema
import pytest

from engage.registry import load_plugins

pytestmark = pytest.mark.checkout

PAGE = (Path(__file__).resolve().parents[2] / "docs/webhooks.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
PROVIDERS = load_plugins().webhooks


@pytest.mark.parametrize("name", sorted(PROVIDERS))
def test_a_section_says_what_there_is_to_know(name):
    section = SECTIONS[name]
    assert f"[{name}](#{name})" in PAGE
    for part in ("```toml", "**At ", "**Events**", "**Retries**"):
        assert part in section, part
    signed = "Signed: " in section
    assert signed != ("**Nothing is signed.**" in section)


@pytest.mark.parametrize("name", sorted(PROVIDERS))
def test_every_option_is_shown_and_taken(name):
    [block] = re.findall(r"^```toml\n(.*?)^```", SECTIONS[name], re.MULTILINE | re.DOTALL)
    options = tomllib.loads(block)["workspaces"]["webhooks"][name]
    jsonschema.validate(options, PROVIDERS[name].schema)
    for option in PROVIDERS[name].schema["properties"]:
        assert re.search(rf"\b{option}\b", SECTIONS[name]), option
