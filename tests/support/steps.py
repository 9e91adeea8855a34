# SPDX-License-Identifier: Apache-2.0
"""Calls of the pipeline, with what most tests send."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from support.core import Core

from engage.errors import ApiError
from engage.pipeline.results import BatchResult

GOOD = {"type": "track", "userId": "u", "event": "e"}
BAD = {"type": "track", "userId": "u", "messageId": "bad"}


async def event(core: Core, item: Any, operation: str = "track", **options: Any) -> Any:
    options.setdefault("principal", core.principal)
    return await core.pipeline.event(operation, orjson.dumps(item), **options)


async def batch(core: Core, items: Any, more: Any = None, **options: Any) -> BatchResult:
    options.setdefault("principal", core.principal)
    return await core.pipeline.batch(orjson.dumps({"batch": items, **(more or {})}), **options)


async def refused(call: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await call
    return caught.value
