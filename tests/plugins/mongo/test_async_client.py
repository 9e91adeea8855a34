# SPDX-License-Identifier: Apache-2.0
"""The MongoDB storage passes the conformance suite with ``driver = "pymongo"``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import mongo
from support.mongo_conformance import Conformance

pytestmark = [pytest.mark.mongo, pytest.mark.long]


class TestAsyncMongoClient(Conformance):
    """With ``pymongo.AsyncMongoClient`` in place of motor."""

    driver = "pymongo"
    kind = mongo.kinds()[-1]

    @pytest.fixture(autouse=True)
    def _collected(self) -> Iterator[None]:
        yield
        mongo.collect_sockets()
