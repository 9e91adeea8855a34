# SPDX-License-Identifier: Apache-2.0
"""The table of operations and its handlers; what they answer is tested in ``contract/``."""

from __future__ import annotations

from engage.handlers.base import METHODS
from engage.handlers.operations import OPERATIONS
from engage.handlers.routes import HANDLERS
from support.each import each

#: What metrics and logs call each operation. Dashboards depend on it.
NAMES = {
    "identify": "identify",
    "track": "track",
    "page": "page",
    "screen": "screen",
    "group": "group",
    "alias": "alias",
    "batch": "batch",
    "beacon": "batch",
    "subscriptions": "subscriptions",
    "userSubscriptions": "subscriptions",
    "preferencesPage": "preferences",
    "preferences": "preferences",
    "webhook": "webhook",
    "projectSettings": "project-settings",
    "sourceConfig": "source-config",
    "snippet": "snippet",
    "healthz": "healthz",
    "readyz": "readyz",
    "openapi": "openapi",
    "docs": "docs",
}


def test_every_operation_has_one_handler_and_every_handler_an_operation() -> None:
    ids = [operation.id for operation in OPERATIONS]
    assert len(ids) == len(set(ids))
    assert set(ids) == set(HANDLERS)


#: Path → its operations.
PATHS = {
    path: [operation for operation in OPERATIONS if path in operation.paths]
    for path in dict.fromkeys(path for operation in OPERATIONS for path in operation.paths)
}


@each("path", PATHS)
def test_a_handler_implements_the_methods_of_its_path(path: str) -> None:
    allowed = {method for operation in PATHS[path] for method in operation.allowed}
    [handler] = {HANDLERS[operation.id] for operation in PATHS[path]}
    assert allowed == {method for method, name in METHODS.items() if hasattr(handler, name)}


@each("path", PATHS)
def test_operations_of_one_path_differ_only_in_their_methods(path: str) -> None:
    operations = PATHS[path]
    assert len({operation.method for operation in operations}) == len(operations)
    rules = {(one.name, one.paths, one.credentials, one.cross_origin) for one in operations}
    assert len(rules) == 1


def test_names_in_metrics_and_logs_stay_the_same() -> None:
    assert {operation.id: operation.name for operation in OPERATIONS} == NAMES


def test_only_operations_for_events_allow_credentials() -> None:
    """A beacon is sent with credentials; nothing else needs them."""
    for operation in OPERATIONS:
        assert operation.credentials == (operation.tag == "Events")
