# SPDX-License-Identifier: Apache-2.0
"""Providers that sign nothing and send a static credential: a header, or HTTP Basic."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from engage.api import Translation
from support.providers import make, request

HEADER = {"header": "X-Secret", "value": "s3cret"}
BASIC = {"basic_user": "hook", "basic_password": "pä:ss"}


def basic(pair: str) -> str:
    """Return the header of HTTP Basic."""
    return "Basic " + base64.b64encode(pair.encode()).decode()


def translate(provider: str, payload: Any, options: Mapping[str, Any] = HEADER) -> Translation:
    """Return the translation of a payload; bytes are sent unchanged, anything else as JSON."""
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return make(provider, options).translate(request(body))
