# SPDX-License-Identifier: Apache-2.0
"""The table of operations: paths, methods and documentation of everything that the server answers.

The router (:mod:`engage.handlers.routes`) and ``/openapi.json`` (:mod:`engage.handlers.openapi`)
are both made from it. To add an operation, describe it here and name its handler there. Payloads
and answers are described in ``schemas/``; here they are only named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["FORM", "OPERATIONS", "PREFERENCES_PAGE", "Operation", "Parameter", "allowed_at"]

#: Content type of a form.
FORM: Final = "application/x-www-form-urlencoded"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A header, or a part of the path or query."""

    name: str
    #: ``path``, ``query`` or ``header``.
    place: str
    description: str
    schema: Mapping[str, Any]
    required: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation, with all the paths that it answers at."""

    id: str
    #: What metrics and logs call it, if that is not :attr:`id`; operations may share a name.
    logged_as: str | None = None
    method: str
    #: Whether it answers ``HEAD`` as well; every ``GET`` does.
    head: bool = False
    #: The first is the canonical one, the others are its aliases. A part in braces
    #: (``{provider}``) takes any one segment. Operations that share a path have other methods, and
    #: the same name, handler and rules for other origins.
    paths: Sequence[str]
    #: Whether beacons are sent to it: CORS with credentials.
    credentials: bool = False
    #: Whether pages of other origins may read its answers.
    cross_origin: bool = True
    summary: str
    description: str
    tag: str
    #: Kind of the payload (a file in ``schemas/payloads``), if it has a body; ``*`` is any body.
    request: str | None = None
    #: Whether the body may also be a form, which has a change as ``changes[<group>]``.
    form: bool = False
    #: Kind of the answer (a file in ``schemas/answers``), or a media type if it is not JSON.
    success: str
    #: Codes of the errors that it may answer with, in addition to those of every operation.
    errors: Sequence[str] = ()
    #: Whether its errors are pages for people.
    error_pages: bool = False
    #: Whether the answer has an ``ETag``, so that it can be a 304.
    conditional: bool = False
    #: Whether a write key is needed: in the header, the query or (events) the body.
    key: bool = False
    parameters: Sequence[Parameter] = ()

    @property
    def name(self) -> str:
        """What metrics and logs call it."""
        return self.logged_as or self.id

    @property
    def allowed(self) -> tuple[str, ...]:
        """The methods that it answers."""
        head = ("HEAD",) if self.head or self.method == "GET" else ()
        return (self.method, *head, "OPTIONS")


_IDEMPOTENCY_KEY: Final = Parameter(
    name="Idempotency-Key",
    place="header",
    description="Derives message ids for events without one: the same key gives the same ids.",
    schema={"type": "string"},
)
_STRICT: Final = Parameter(
    name="X-Strict-Mode",
    place="header",
    description="With `1`, a batch with an invalid item is rejected as a whole (400).",
    schema={"type": "string"},
)
#: Errors of every request that has a body.
_BODY_ERRORS: Final = (
    "invalid_json",
    "invalid_encoding",
    "invalid_payload",
    "body_too_large",
    "unsupported_encoding",
    "length_required",
    "request_timeout",
    "storage_unavailable",
    "overloaded",
    "shutting_down",
)
_KEY_ERRORS: Final = ("missing_write_key", "invalid_write_key", "write_key_disabled")
_EVENT_ERRORS: Final = (
    *_BODY_ERRORS,
    *_KEY_ERRORS,
    "origin_not_allowed",
    "operation_not_allowed",
    "identity_not_verified",
    "server_key_exposed",
    "event_refused",
    "message_id_conflict",
    "transform_failed",
    "event_too_large",
    "rate_limited",
    "quota_exceeded",
)


_UNAVAILABLE: Final = ("storage_unavailable", "overloaded", "shutting_down")

_MANAGEMENT: Final = "/api/public/subscription-management/"
PREFERENCES_PAGE: Final = _MANAGEMENT + "page"
#: The second is the path of links of older versions of Dittofeed.
_PAGE: Final = (PREFERENCES_PAGE, "/dashboard/public/subscription-management")


def _of_link(name: str, description: str, *, required: bool = False, **schema: Any) -> Parameter:
    return Parameter(
        name=name,
        place="query",
        description=description,
        schema={"type": "string", **schema},
        required=required,
    )


#: The members of a signed link.
_LINK: Final = (
    _of_link("w", "The workspace's id.", required=True),
    _of_link("i", "The identifier, such as the user id.", required=True),
    _of_link("ik", "The kind of the identifier, such as `id`.", required=True),
    _of_link("h", "The hash that signs the link.", required=True),
    _of_link("e", "If it is signed: when the link expires, in Unix seconds.", pattern="^[0-9]+$"),
)
#: What its page is about.
_SHOWN: Final = (
    _of_link("s", "The subscription group that the message was sent to."),
    _of_link("sub", "`1`: the page offers to subscribe to that group, otherwise to unsubscribe."),
    _of_link("lang", "The language of the page; by default, as `Accept-Language` says."),
)


def _event(kind: str, letter: str, summary: str, description: str) -> Operation:
    return Operation(
        id=kind,
        method="POST",
        paths=(f"/api/public/apps/{kind}", f"/v1/{kind}", f"/v1/{letter}"),
        credentials=True,
        summary=summary,
        description=description,
        tag="Events",
        request=kind,
        success="event",
        errors=_EVENT_ERRORS,
        key=True,
        parameters=(_IDEMPOTENCY_KEY,),
    )


#: Every operation. Unmodified SDKs use the paths under ``/v1`` and ``/beacon``.
OPERATIONS: Final[Sequence[Operation]] = (
    _event("identify", "i", "Identify a user", "Sets traits; the latest value of each wins."),
    _event("track", "t", "Record what a user did", "An event with a name and properties."),
    _event("page", "p", "Record a page view", "On a website."),
    _event("screen", "s", "Record a screen view", "In an app."),
    _event("group", "g", "Add a user to a group", "`assigned: false` removes the user."),
    _event("alias", "a", "Link an earlier id to a user", "`previousId` becomes an id of the user."),
    Operation(
        id="batch",
        method="POST",
        # Segment's libraries for Java (with the slash), Ruby, .NET and Android use /v1/import.
        paths=("/api/public/apps/batch", "/v1/batch", "/v1/b", "/v1/import", "/v1/import/"),
        credentials=True,
        summary="Send many events",
        description="Items are independent: valid ones are stored, invalid ones are listed in"
        " `rejected` and kept as dead letters. The answer is 200 even if no item is valid.",
        tag="Events",
        request="batch",
        success="batch",
        errors=(*_EVENT_ERRORS, "batch_too_large"),
        key=True,
        parameters=(_IDEMPOTENCY_KEY, _STRICT),
    ),
    Operation(
        id="beacon",
        logged_as="batch",
        method="POST",
        paths=("/beacon/v1/batch",),
        credentials=True,
        summary="Send many events with navigator.sendBeacon",
        description="Works as batch. A beacon cannot set headers, so the key goes in the query.",
        tag="Events",
        request="batch",
        success="batch",
        errors=(*_EVENT_ERRORS, "batch_too_large"),
        key=True,
    ),
    Operation(
        id="subscriptions",
        method="PUT",
        paths=(_MANAGEMENT + "user-subscriptions",),
        summary="Change a user's subscriptions",
        description="Takes no write key: `hash` proves that the link came from the workspace.",
        tag="Subscriptions",
        request="subscriptions",
        form=True,
        success="subscriptions",
        errors=(
            *_BODY_ERRORS,
            "invalid_user_hash",
            "link_expired",
            "unknown_subscription_group",
            "rate_limited",
        ),
    ),
    Operation(
        id="userSubscriptions",
        logged_as="subscriptions",
        method="GET",
        paths=(_MANAGEMENT + "user-subscriptions",),
        summary="Read a user's subscriptions",
        description="For a preferences page of your own: the query is that of the user's link.",
        tag="Subscriptions",
        success="subscriptions",
        errors=("invalid_user_hash", "link_expired", "rate_limited", *_UNAVAILABLE),
        parameters=_LINK,
    ),
    Operation(
        id="preferencesPage",
        logged_as="preferences",
        method="GET",
        paths=_PAGE,
        cross_origin=False,
        summary="The page on which a user chooses",
        description="It changes nothing.",
        tag="Subscriptions",
        success="text/html",
        errors=("invalid_user_hash", "rate_limited", *_UNAVAILABLE),
        error_pages=True,
        parameters=(*_LINK, *_SHOWN),
    ),
    Operation(
        id="preferences",
        method="POST",
        paths=_PAGE,
        cross_origin=False,
        summary="Unsubscribe with one click, or send the form of the page",
        description="The body `List-Unsubscribe=One-Click` (RFC 8058), as a form or multipart, at"
        " most 4 KiB, unsubscribes at once. The page's form has other fields.",
        tag="Subscriptions",
        success="text/html",
        errors=(*_BODY_ERRORS, "invalid_user_hash", "rate_limited"),
        error_pages=True,
        parameters=(*_LINK, *_SHOWN),
    ),
    Operation(
        id="webhook",
        method="POST",
        head=True,
        # The second is the path of Dittofeed's servers whose providers were set up earlier.
        paths=("/api/public/webhooks/{provider}", "/api/webhooks/{provider}"),
        summary="Receive a webhook delivery",
        description="The provider's signature authenticates it. `HEAD` answers 200.",
        tag="Webhooks",
        request="*",
        success="webhook",
        errors=(
            *_BODY_ERRORS,
            "invalid_signature",
            "unknown_provider",
            "workspace_required",
            "rate_limited",
        ),
        parameters=(
            Parameter(
                name="provider",
                place="path",
                description="The name of an installed and configured provider.",
                schema={"type": "string", "minLength": 1, "maxLength": 64},
                required=True,
            ),
            Parameter(
                name="workspaceId",
                place="query",
                description="Required if several workspaces use this provider.",
                schema={"type": "string"},
            ),
        ),
    ),
    Operation(
        id="projectSettings",
        logged_as="project-settings",
        method="GET",
        paths=("/v1/projects/{writeKey}/settings",),
        summary="Settings of @segment/analytics-next",
        description="The SDK fetches them from its `cdnURL`.",
        tag="Clients",
        success="project-settings",
        conditional=True,
        errors=("not_found", "rate_limited", "storage_unavailable", "overloaded"),
        parameters=(
            Parameter(
                name="writeKey",
                place="path",
                description="A write key.",
                schema={"type": "string", "minLength": 1, "maxLength": 512},
                required=True,
            ),
        ),
    ),
    Operation(
        id="sourceConfig",
        logged_as="source-config",
        method="GET",
        paths=("/sourceConfig/", "/sourceConfig"),
        summary="Settings of RudderStack's SDKs",
        description="An SDK fetches them from its `configUrl` (browser) or `controlPlaneUrl` (app)."
        " The key goes in header or query.",
        tag="Clients",
        success="source-config",
        conditional=True,
        errors=(
            "missing_write_key",
            "invalid_write_key",
            "rate_limited",
            "storage_unavailable",
            "overloaded",
        ),
        key=True,
    ),
    Operation(
        id="snippet",
        method="GET",
        paths=("/engage.js",),
        summary="The tracking snippet's script",
        description="Plain JavaScript, less than 3 KB gzipped.",
        tag="Clients",
        success="text/javascript",
        conditional=True,
    ),
    Operation(
        id="healthz",
        method="GET",
        paths=("/healthz",),
        summary="Check that the process is alive",
        description="For a supervisor.",
        tag="Operation",
        success="health",
    ),
    Operation(
        id="readyz",
        method="GET",
        paths=("/readyz",),
        summary="Check that events can be stored",
        description="For a load balancer.",
        tag="Operation",
        success="health",
        errors=("storage_unavailable", "shutting_down"),
    ),
    Operation(
        id="openapi",
        method="GET",
        paths=("/openapi.json",),
        summary="This description",
        description="OpenAPI 3.1.",
        tag="Operation",
        success="application/json",
        conditional=True,
    ),
    Operation(
        id="docs",
        method="GET",
        paths=("/docs",),
        summary="This description as a page",
        description="One page without scripts.",
        tag="Operation",
        success="text/html",
        conditional=True,
    ),
)


def allowed_at(path: str) -> tuple[str, ...]:
    """Return every method that a path answers, as in the header ``Allow``.

    :param path: as in :attr:`Operation.paths`.
    """
    here = [operation.allowed for operation in OPERATIONS if path in operation.paths]
    own = [method for allowed in here for method in allowed if method != "OPTIONS"]
    return (*own, "OPTIONS")
