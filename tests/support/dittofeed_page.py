# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/from-dittofeed.md, and a server that is started from its config."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from support.node import node
from support.server_process import Server

PAGE = Path(__file__).resolve().parents[2] / "docs/from-dittofeed.md"
TEXT = PAGE.read_text("utf-8")

#: Dittofeed's secret ``subscription-key``.
SECRET = "00112233aabbccdd"
#: The key of SendGrid's deliveries.
SENDGRID_KEY = ec.generate_private_key(ec.SECP256R1())
_DER = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
#: What the config of the page refers to.
ENVIRONMENT = {
    "SUBSCRIPTION_SECRET": SECRET,
    "SENDGRID_WEBHOOK_KEY": base64.b64encode(
        SENDGRID_KEY.public_key().public_bytes(*_DER)
    ).decode(),
    "RESEND_WEBHOOK_KEY": "whsec_" + base64.b64encode(b"the secret of resend").decode(),
    "POSTMARK_WEBHOOK_KEY": "the secret of postmark",
    "MAILCHIMP_WEBHOOK_KEY": "the secret of mailchimp",
    "TWILIO_AUTH_TOKEN": "the secret of twilio",
}


def blocks(language: str) -> list[str]:
    """Return the blocks of the page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


[CONFIG] = blocks("toml")
_WORKSPACE: Mapping[str, Any] = tomllib.loads(CONFIG)["workspaces"][0]
#: The URL that providers sign.
PUBLIC_URL: str = tomllib.loads(CONFIG)["server"]["public_url"]
WORKSPACE: str = _WORKSPACE["id"]
KEY: str = _WORKSPACE["write_keys"][0]["key"]
#: The groups that users leave, and that they join.
OPT_OUT, OPT_IN = (group["id"] for group in _WORKSPACE["subscription_groups"])
#: What clients of Dittofeed send: its dashboard shows it as the write key.
AUTHORIZATION = f"Basic {KEY}"


def start(folder: Path) -> Server:
    """Start a server from the config of the page, on a free port."""
    listener = '[logging]\nformat = "json"\n\n[server]\nhost = "127.0.0.1"\nport = 0\n'
    config = CONFIG.replace("[server]\n", listener, 1)
    return Server(folder, config, environment=ENVIRONMENT).start()


def sign(*people: tuple[str, str]) -> list[dict[str, str]]:
    """Return what Dittofeed puts into the links of people with an e-mail address, signed with
    JavaScript as it does.

    :param people: the id of each, of a user or a visitor, and the address.
    """
    script = """
const { createHmac } = require("crypto");
const [secret, w, people] = JSON.parse(process.argv[1]);
const sign = ([u, i]) =>
  createHmac("sha256", secret).update(JSON.stringify({ u, w, i, k: "email" })).digest("hex");
console.log(JSON.stringify(people.map((one) => ({ w, i: one[1], ik: "email", h: sign(one) }))));
"""
    plan = json.dumps([SECRET, WORKSPACE, people])
    done = subprocess.run(
        [node(), "-e", script, plan], capture_output=True, text=True, timeout=120, check=True
    )
    links: list[dict[str, str]] = json.loads(done.stdout)
    return links
