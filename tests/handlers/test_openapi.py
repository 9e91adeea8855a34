# SPDX-License-Identifier: Apache-2.0
"""The description of the API: complete, and valid OpenAPI 3.1."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import validate

import engage_schemas
from engage.errors import STATUS
from engage.handlers import files
from engage.handlers.openapi import describe, load_schemas
from engage.handlers.operations import OPERATIONS
from engage.keys.limits import STRANGE

#: As installed.
SCHEMAS = Path(engage_schemas.__file__).parent


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return describe()


def test_the_description_is_valid_openapi(document: dict[str, Any]) -> None:
    validate(document)


def test_the_description_has_every_schema(document: dict[str, Any]) -> None:
    packaged = {
        str(path.relative_to(SCHEMAS).with_suffix("")).replace("/", "-")
        for folder in ("payloads", "answers")
        for path in (SCHEMAS / folder).glob("*.json")
        if path.stem != "choice"  # A row of an import.
    }
    components = set(document["components"]["schemas"])
    assert {name for name in components if not name.startswith("payloads-common-")} == packaged | {
        "error"
    }


def test_every_schema_is_used() -> None:
    """No operation would need a schema of a payload or an answer that none refers to."""
    used = {f"payloads-{o.request}" for o in OPERATIONS} | {
        f"answers-{o.success}" for o in OPERATIONS
    }
    # The others refer to ``common``; ``item`` chooses the schema for an item of a batch.
    unused = set(load_schemas()) - used - {"error", "payloads-common", "payloads-item"}
    assert unused == set()


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    for reference in re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)):
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part.replace("~1", "/").replace("~0", "~")]


def test_client_generators_understand_the_description(document: dict[str, Any]) -> None:
    """A reference names a whole component and has only a description beside it, and an operation
    without a key says so: openapi-typescript and linters support no more of JSON Schema."""

    def nodes(node: Any) -> Iterator[dict[str, Any]]:
        if isinstance(node, dict):
            yield node
        for child in node.values() if isinstance(node, dict) else node:
            if isinstance(child, dict | list):
                yield from nodes(child)

    for node in nodes(document):
        if isinstance(node.get("$ref"), str):
            assert node["$ref"].count("/") == 3
            assert set(node) <= {"$ref", "title", "description"}
    # Without it a generated type has no members.
    assert document["components"]["schemas"]["payloads-common-object"]["additionalProperties"]
    for operations in document["paths"].values():
        assert all("security" in operation for operation in operations.values())


def test_every_code_is_described(document: dict[str, Any]) -> None:
    """The description has every error code that a client can get."""
    codes = {
        code
        for operations in document["paths"].values()
        for operation in operations.values()
        for response in operation["responses"].values()
        for content in response.get("content", {}).values()
        for code in content.get("examples", {})
        if not code.startswith("example")
    }
    # 405 is no operation's; invalid_request is what is hardly HTTP.
    assert set(STATUS) - codes == {"method_not_allowed", "invalid_request"}


def test_every_answer_that_can_become_a_429_is_described_with_it() -> None:
    """An address that has too many refusals gets one: see :mod:`engage.keys.limits`."""
    refusing = [one for one in OPERATIONS if STRANGE & {STATUS[code] for code in one.errors}]
    assert len(refusing) > 10
    assert [one.id for one in refusing if "rate_limited" not in one.errors] == []


def test_every_example_is_valid(document: dict[str, Any]) -> None:
    count = 0
    for operations in document["paths"].values():
        for operation in operations.values():
            parts = [operation.get("requestBody", {}), *operation["responses"].values()]
            for part in parts:
                for content in part.get("content", {}).values():
                    for example in content.get("examples", {}).values():
                        schema = {**content["schema"], "components": document["components"]}
                        jsonschema.Draft202012Validator(schema).validate(example["value"])
                        count += 1
    assert count > 100


def test_the_server_of_the_description_is_the_public_url(document: dict[str, Any]) -> None:
    assert document["servers"] == [{"url": "/"}]
    assert describe(public_url="https://x.test/")["servers"] == [{"url": "https://x.test"}]


def test_the_page_is_self_contained() -> None:
    """It has every operation, everything is escaped, and it needs no script and no other file."""
    text = files.page('https://x.test/"><script>alert(1)</script>').content.decode()
    assert "<script" not in text
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)
    for operation in OPERATIONS:
        assert f'id="{operation.id}"' in text
        for path in operation.paths:
            assert path in text
