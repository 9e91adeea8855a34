# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on mongo-java-server, whose updates are atomic; not run with MongoDB."""

from __future__ import annotations

import pytest

from support import mongo
from support.mongo_conformance import Conformance

pytestmark = [pytest.mark.mongo, pytest.mark.long]


if "java" in mongo.kinds():

    class TestJava(Conformance):
        """On mongo-java-server, behind a proxy that cuts it off."""

        kind = "java"
