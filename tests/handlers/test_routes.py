# SPDX-License-Identifier: Apache-2.0
"""The table of operations and its handlers; what they answer is tested in ``contract/``."""

from __future__ import annotations

import pytest

from engage.handlers.base import METHODS
from engage.handlers.operations import OPERATIONS, Operation
from engage.handlers.routes import HANDLERS

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


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.id)
def test_a_handler_implements_the_methods_of_its_operation(operation: Operation) -> None:
    handler = HANDLERS[operation.id]
    assert set(operation.allowed) == {
        method for method, name in METHODS.items() if hasattr(handler, name)
    }


def test_no_two_operations_share_a_path() -> None:
    paths = [path for operation in OPERATIONS for path in operation.paths]
    assert len(paths) == len(set(paths))


def test_names_in_metrics_and_logs_stay_the_same() -> None:
    assert {operation.id: operation.name for operation in OPERATIONS} == NAMES


def test_only_operations_for_events_allow_credentials() -> None:
    """A beacon is sent with credentials; nothing else needs them."""
    for operation in OPERATIONS:
        assert operation.credentials == (operation.tag == "Events")
