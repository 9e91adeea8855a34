# SPDX-License-Identifier: Apache-2.0
"""The MongoDB storage works with the driver's asynchronous client, which will replace motor."""

from __future__ import annotations

import pytest

from support import mongo
from support.mongo_conformance import Conformance

pytestmark = [pytest.mark.mongo, pytest.mark.slow]


class TestAsyncMongoClient(Conformance):
    """The conformance suite with ``pymongo.AsyncMongoClient`` in place of motor."""

    plugin = "support.mongo_async"
    kind = mongo.kinds()[-1]
