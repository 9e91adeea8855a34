# SPDX-License-Identifier: Apache-2.0
"""The day motor ends: the same with the driver's own asynchronous client."""

from __future__ import annotations

import pytest

from support import mongo
from support.mongo_conformance import Conformance

pytestmark = [pytest.mark.mongo, pytest.mark.slow]


class TestAsyncMongoClient(Conformance):
    """``pymongo.AsyncMongoClient`` in motor's place."""

    plugin = "support.mongo_async"
    kind = mongo.kinds()[-1]
