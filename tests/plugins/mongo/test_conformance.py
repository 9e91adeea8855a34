# SPDX-License-Identifier: Apache-2.0
"""The MongoDB storage passes the conformance suite: on MongoDB, or on FerretDB, which is killed
and restarted."""

from __future__ import annotations

import pytest

from support import mongo
from support.mongo_conformance import Conformance

pytestmark = [pytest.mark.mongo, pytest.mark.long]


if mongo.kinds()[0] == "ferretdb":

    class TestFerretDB(Conformance):
        """On FerretDB, which is durable and is killed."""

        kind = "ferretdb"

else:

    class TestMongo(Conformance):
        """On MongoDB."""

        kind = mongo.kinds()[0]
