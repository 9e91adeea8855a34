# SPDX-License-Identifier: Apache-2.0
"""A server that verifies users, and the hashes that it accepts."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Final

from support.server_process import Server, start_server

SECRET: Final = "the secret of acme"
#: Lines of the workspace.
REQUIRED: Final = f'verify_identity = "required"\nidentity_secret = "{SECRET}"'


def hash_of(user_id: str, secret: str = SECRET) -> str:
    """Return the hash of a user id as docs/events.md describes it."""
    return hmac.new(secret.encode(), user_id.encode(), hashlib.sha256).hexdigest()


def start_verifying(folder: Path) -> Server:
    """Start a server whose public keys need ``context.userHash``."""
    return start_server(folder, workspace=REQUIRED)
