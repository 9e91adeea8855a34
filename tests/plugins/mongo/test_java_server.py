# SPDX-License-Identifier: Apache-2.0
"""The same on mongo-java-server where there is no MongoDB: updates of one document are atomic."""

from __future__ import annotations

import pytest

from support import mongo
from support.mongo_conformance import Conformance

pytestmark = [pytest.mark.mongo, pytest.mark.slow]


if "java" in mongo.kinds():

    class TestJava(Conformance):
        """Atomic updates, and cut off."""

        kind = "java"
