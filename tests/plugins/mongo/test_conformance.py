# SPDX-License-Identifier: Apache-2.0
"""The MongoDB storage keeps the promises of every storage: on MongoDB, else on FerretDB, which is
killed and restarted."""

from __future__ import annotations

import pytest

from support import mongo
from support.mongo_conformance import Conformance

pytestmark = [pytest.mark.mongo, pytest.mark.slow]


if mongo.kinds()[0] == "ferretdb":

    class TestFerretDB(Conformance):
        """Durable, and killed."""

        kind = "ferretdb"

else:

    class TestMongo(Conformance):
        """MongoDB itself."""

        kind = mongo.kinds()[0]
