# SPDX-License-Identifier: Apache-2.0
"""Links to the preferences page, and a server whose workspace has groups to choose from."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from engage.api import Kind, Subject
from engage.subscriptions.links import BY_ID, subscription_hash
from support.server_process import SECRET, Server

PAGE = "/api/public/subscription-management/page"
SUBSCRIPTIONS = "/api/public/subscription-management/user-subscriptions"
OLD_SECRET = "the-secret-before"

GROUPS = """
[[workspaces.subscription_groups]]
id = "news"
name = { en = "Newsletter", de = "Rundbrief", ar = "النشرة" }
channel = "email"
type = "opt_out"

[[workspaces.subscription_groups]]
id = "offers"
name = "Offers & <more>"
channel = "email"
type = "opt_in"

[[workspaces.subscription_groups]]
id = "product"
channel = "email"
type = "opt_out"

[[workspaces.subscription_groups]]
id = "delivery"
name = "Delivery"
channel = "sms"
type = "opt_out"
"""
#: What a person has who has not chosen.
AT_FIRST = {"news": True, "offers": False, "product": True, "delivery": True}


def members(
    user: str,
    *,
    identifier: str | None = None,
    key: str = "id",
    visitor: bool = False,
    expires: int | None = None,
    secret: str = SECRET,
    workspace: str = "acme",
) -> dict[str, str]:
    """Return the signed members of a link, by their names in the query.

    :param visitor: whether a link by an address names a visitor.
    """
    identifier = user if identifier is None else identifier
    signed = subscription_hash(
        secret,
        subject=Subject(Kind.VISITOR if visitor else BY_ID.get(key, Kind.USER), user),
        workspace_id=workspace,
        identifier=identifier,
        identifier_key=key,
        expires=expires,
    )
    link = {
        "w": workspace,
        "i": identifier,
        "ik": key,
        "h": signed,
        **({"v": "1"} if visitor else {}),
    }
    return link if expires is None else {**link, "e": str(expires)}


def page_of(link: dict[str, str], path: str = PAGE, **more: str) -> str:
    """Return the path and the query of a link."""
    return f"{path}?{urlencode({**link, **more})}"


def choices(server: Server, link: dict[str, str]) -> dict[str, bool]:
    """Return what a person has chosen, as the server tells a page."""
    answer = server.get(page_of(link, SUBSCRIPTIONS))
    assert answer.status_code == 200, answer.text
    subscriptions: dict[str, bool] = answer.json()["subscriptions"]
    return subscriptions


def body_of(link: dict[str, str], **changes: bool) -> dict[str, object]:
    """Return the body of the PUT of a link."""
    names = {"w": "workspaceId", "i": "identifier", "ik": "identifierKey", "h": "hash"}
    return {**{names[name]: link[name] for name in names}, "changes": changes}


def ledger(server: Server, user: str) -> list[dict[str, Any]]:
    """Return the history of a person's choices."""
    return [change for change in server.export("subscription-history") if change["userId"] == user]
