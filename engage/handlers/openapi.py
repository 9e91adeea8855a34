# SPDX-License-Identifier: Apache-2.0
"""The description of the API as OpenAPI 3.1, made from ``schemas/`` and the operations.

Every schema and every example comes from the schema files, every status from the table of error
codes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Final

import engage
from engage.api import EVENT_TYPES
from engage.errors import STATUS
from engage.handlers.operations import FORM, OPERATIONS, Operation, Parameter

__all__ = ["describe", "load_schemas"]

#: The folders of ``schemas/`` that describe requests and answers.
_FOLDERS: Final = ("payloads", "answers")

#: A row of a file that is imported, not of a request.
_ROW: Final = "choice.json"

#: Where a write key may be, besides the body.
_KEYS: Final[Mapping[str, Any]] = {
    "writeKey": {
        "type": "http",
        "scheme": "basic",
        "description": "The write key is the user name; the password is ignored.",
    },
    "writeKeyAsToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "The same credential as for Basic, or the write key itself.",
    },
    "writeKeyInQuery": {"type": "apiKey", "in": "query", "name": "writeKey"},
}

#: Errors of every request.
_EVERYWHERE: Final = ("headers_too_large", "internal_error", "overloaded")


def load_schemas() -> dict[str, dict[str, Any]]:
    """Read the packaged schemas.

    :return: name of the component (``payloads-track``, ``answers-batch``, ``error``) → schema.
    """
    root = resources.files("engage_schemas")
    schemas = {"error": json.loads(root.joinpath("error.json").read_bytes())}
    for folder in _FOLDERS:
        for file in root.joinpath(folder).iterdir():
            if file.name.endswith(".json") and file.name != _ROW:
                name = f"{folder}-{file.name.removesuffix('.json')}"
                schemas[name] = json.loads(file.read_bytes())
    return dict(sorted(schemas.items()))


def describe(
    schemas: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    public_url: str | None = None,
    operations: Sequence[Operation] = OPERATIONS,
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document.

    :param schemas: those of :func:`load_schemas` by default.
    :param public_url: where clients reach the server; by default, where they got the document.
    """
    schemas = load_schemas() if schemas is None else schemas
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        for number, path in enumerate(operation.paths):
            described = _operation(operation, number, schemas)
            paths.setdefault(path, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "engage",
            "version": engage.__version__,
            "summary": "Event ingestion, compatible with Segment's and Dittofeed's clients.",
            "description": "A 2xx means that everything sent is stored durably. Sending the same"
            " message id again is always safe.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": public_url.rstrip("/") if public_url else "/"}],
        "tags": [{"name": tag} for tag in dict.fromkeys(o.tag for o in operations)],
        "paths": paths,
        "components": {
            "schemas": _components(schemas),
            "securitySchemes": _KEYS,
        },
    }


# ------------------------------------------------------------------------------------------ parts
def _components(schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schema files and each of their ``$defs`` as a separate component: not every client
    generator finds the deeper ones."""
    components: dict[str, Any] = {}
    for name, schema in schemas.items():
        components[name] = _component(name, schema)
        if "$ref" in components[name]:
            # JSON Schema heeds the members next to a reference, but many tools ignore them. Where
            # both define a field, the payload's definition is the stricter one.
            shared = _component("payloads-common", schemas["payloads-common"])
            assert components[name].pop("$ref") == "#/components/schemas/payloads-common"
            properties = {**shared["properties"], **components[name].pop("properties")}
            rules = {"type": shared["type"], "properties": properties, "anyOf": shared["anyOf"]}
            components[name] |= rules
        for part, definition in components[name].pop("$defs", {}).items():
            components[f"{name}-{part}"] = definition
    return components


def _component(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema file as a component, with references that point into the document."""
    folder = name.partition("-")[0]

    def rewrite(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {
                key: _target(value, name, folder)
                if key == "$ref" and isinstance(value, str)
                else rewrite(value)
                for key, value in node.items()
                if key != "x-messages"
            }
        return [rewrite(value) for value in node] if isinstance(node, list) else node

    component: dict[str, Any] = rewrite(schema)
    component.pop("$id", None)
    component.pop("$schema", None)
    if name == "payloads-batch":
        component["properties"]["batch"]["items"] = {"anyOf": [_item(k) for k in EVENT_TYPES]}
    return component


def _item(kind: str) -> dict[str, Any]:
    """Return the schema of a batch item. The schema of a batch omits it: items are independent."""
    typed = {"properties": {"type": {"const": kind}}, "required": ["type"]}
    return {"allOf": [{"$ref": f"#/components/schemas/payloads-{kind}"}, typed]}


def _target(reference: str, name: str, folder: str) -> str:
    file, _, pointer = reference.partition("#")
    target = f"{folder}-{file.removesuffix('.json')}" if file else name
    return f"#/components/schemas/{target}{pointer.replace('/$defs/', '-')}"


def _operation(
    operation: Operation, number: int, schemas: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.id if number == 0 else f"{operation.id}{number + 1}",
        "summary": operation.summary,
        "description": operation.description,
        "tags": [operation.tag],
        "parameters": [_parameter(parameter) for parameter in operation.parameters],
        "responses": _responses(operation, schemas),
    }
    if not described["parameters"]:
        del described["parameters"]
    if number:
        described["x-alias-of"] = operation.paths[0]
    elif operation.paths[1:]:
        described["x-aliases"] = list(operation.paths[1:])
    if operation.request == "*":
        described["requestBody"] = {
            "required": True,
            "description": "The body that the provider sends.",
            "content": {"application/json": {"schema": {}}},
        }
    elif operation.request is not None:
        name = f"payloads-{operation.request}"
        described["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"$ref": f"#/components/schemas/{name}"},
                    "examples": _examples(schemas[name]),
                }
            },
        }
        if operation.form:
            described["requestBody"]["content"][FORM] = {
                "schema": {"$ref": f"#/components/schemas/{name}"},
                "encoding": {"changes": {"style": "deepObject", "explode": True}},
            }
    described["security"] = [{scheme: []} for scheme in _KEYS] if operation.key else []
    return described


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.description,
        "required": parameter.required,
        "schema": dict(parameter.schema),
    }


def _examples(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {f"example{n}": {"value": value} for n, value in enumerate(schema["examples"], 1)}


def _responses(
    operation: Operation, schemas: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    headers = {
        "X-Request-Id": {
            "description": "Identifies the request in the server's log.",
            "schema": {"type": "string"},
        }
    }
    success: dict[str, Any] = {"description": "Success.", "headers": headers}
    unchanged: dict[str, Any] = {}
    if operation.conditional:
        unchanged = {"304": {"description": "Not modified (`If-None-Match`).", "headers": headers}}
    if "/" in operation.success:
        success["content"] = {operation.success: {"schema": _kind_of(operation.success)}}
    else:
        name = f"answers-{operation.success}"
        success["description"] = str(schemas[name]["description"])
        success["content"] = {
            "application/json": {
                "schema": {"$ref": f"#/components/schemas/{name}"},
                "examples": _examples(schemas[name]),
            }
        }
    responses = {"200": success, **unchanged}
    by_status: dict[int, list[str]] = {}
    for code in _codes(operation):
        by_status.setdefault(STATUS[code], []).append(code)
    for status, codes in sorted(by_status.items()):
        error: dict[str, Any] = {
            "description": ", ".join(f"`{code}`" for code in codes),
            "headers": headers,
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/error"},
                    "examples": {
                        code: {
                            "value": {
                                "success": False,
                                "status": status,
                                "code": code,
                                "message": code.replace("_", " "),
                                "requestId": "4b7e1c2a9d0f4e5b",
                            }
                        }
                        for code in codes
                    },
                }
            },
        }
        if operation.error_pages:
            error["content"]["text/html"] = {"schema": {"type": "string"}}
        if status in (429, 503):
            error["headers"] = {
                **headers,
                "Retry-After": {
                    "description": "Seconds to wait before trying again.",
                    "schema": {"type": "integer", "minimum": 1},
                },
            }
        responses[str(status)] = error
    return responses


def _kind_of(media_type: str) -> dict[str, Any]:
    return {"type": "object"} if media_type == "application/json" else {"type": "string"}


def _codes(operation: Operation) -> Iterator[str]:
    yield from dict.fromkeys((*operation.errors, *_EVERYWHERE))
