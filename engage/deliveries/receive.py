# SPDX-License-Identifier: Apache-2.0
"""The steps of a webhook delivery: verify, translate, find its users, store, opt out, answer.

The URL or a header names the workspace, never the body. A delivery that is not verified leaves
only a counter and a log line. A verified delivery is never lost: one that cannot be translated is
kept whole as a dead letter, and the provider sends it again only if the storage or a fetch failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import orjson

from engage.api import (
    MAX_TIME,
    ConfigError,
    DeadLetter,
    Fetch,
    NothingSigned,
    Provider,
    Reply,
    SignatureMismatch,
    Translation,
    WebhookRequest,
    WebhookResult,
    render_time,
)
from engage.deliveries import provider_calls
from engage.deliveries.delivery import (
    UNTRANSLATED,
    Delivery,
    Destination,
    body_limit,
    delivery_of_letter,
    letter_of_delivery,
    named_workspaces,
    type_of,
)
from engage.deliveries.fetcher import Fetcher, FetchError, FetchRefusedError
from engage.deliveries.opt_outs import OptOuts
from engage.deliveries.recipients import Recipients
from engage.erasure.requests import note_requests
from engage.errors import ApiError, Limit, Problem, located, overloaded
from engage.keys.rules import Rules
from engage.pipeline.admission import LARGE_BODY
from engage.pipeline.clock import Clock
from engage.upkeep.time_limit import within

if TYPE_CHECKING:
    from engage.config import Limits, Workspace
    from engage.monitoring.metrics import Metrics
    from engage.pipeline.ingest import Ingest
    from engage.pipeline.pipeline import Pipeline

__all__ = ["Deliveries"]

_log = logging.getLogger(__name__)


class Deliveries:
    """Receives deliveries.

    :param known: the names of all installed providers.
    :param providers: provider → workspace id → the provider with the options of that workspace.
    :param workspaces: say what the reports of providers change.
    :param public_url: the URL under which providers reach this server, without a trailing slash.
    :param clock: the time of this process.
    """

    def __init__(
        self,
        *,
        known: Collection[str],
        providers: Mapping[str, Mapping[str, Provider]],
        workspaces: Iterable[Workspace],
        public_url: str | None,
        pipeline: Pipeline,
        ingest: Ingest,
        limits: Limits,
        metrics: Metrics,
        fetcher: Fetcher,
        clock: Clock | None = None,
    ) -> None:
        self._providers = {name: providers.get(name, {}) for name in known}
        workspaces = [*workspaces]
        self._rules = {
            (name, one.id): Rules.of_provider(one, name, enabled[one.id])
            for name, enabled in self._providers.items()
            for one in workspaces
            if one.id in enabled
        }
        self._body_limits = {
            name: body_limit(name, enabled.values(), limits)
            for name, enabled in self._providers.items()
        }
        self._public_url = public_url
        self._pipeline = pipeline
        self._ingest = ingest
        self._recipients = Recipients(ingest.store, ingest.timeout)
        self._opt_outs = OptOuts(workspaces, ingest.store, ingest.timeout)
        self._limits = limits
        self._metrics = metrics
        self._fetcher = fetcher
        #: Names of providers, and the notices of theirs that were logged.
        self._noticed: set[tuple[str, str]] = set()
        #: The time of this process.
        self.clock = Clock() if clock is None else clock

    async def close(self) -> None:
        """Close the connections to providers. Idempotent."""
        await self._fetcher.close()

    def check_provider(self, name: str) -> None:
        """Return if a provider of this name is installed.

        :raises ApiError: 404 ``unknown_provider`` if it is not.
        """
        if name not in self._providers:
            self._metrics.count("webhook_deliveries", "unknown", "unknown_provider")
            raise ApiError("unknown_provider", "no webhook provider of this name is installed")

    def body_limit(self, name: str) -> Limit:
        """Return the largest body of a delivery, compressed and decompressed.

        :param name: an installed provider, see :meth:`check_provider`.
        """
        return self._body_limits[name]

    def destination(
        self, name: str, target: str, headers: Sequence[tuple[str, str]]
    ) -> Destination:
        """Find the workspace that a delivery is for, and its provider.

        :param name: an installed provider, see :meth:`check_provider`.
        :param target: path and query.
        :raises ApiError: 400 ``workspace_required`` if the delivery names no workspace and there is
            not exactly one with this provider; 401 ``invalid_signature`` if it names two, or one
            that is unknown or does not have this provider. (A wrong signature gets the same answer,
            so that a client cannot find out which workspaces exist.)
        """
        enabled = self._providers[name]
        try:
            named = named_workspaces(target, headers)
        except ValueError:
            raise self._refused(name, None, "its query has too many parameters") from None
        if not named and len(enabled) != 1:
            self._metrics.count("webhook_deliveries", name, "workspace_required")
            _log.warning(
                "webhook %s refused: it names no workspace, and %d have this provider",
                name,
                len(enabled),
                extra={"provider": name, "workspaceId": None},
            )
            raise ApiError(
                "workspace_required",
                "name the workspace that this is for: append ?workspaceId= to the URL"
                if enabled
                else "no workspace of this server receives deliveries of this provider",
            )
        workspace_id, *others = named or enabled
        if others or workspace_id not in enabled:
            raise self._refused(name, None, "the named workspace does not have it")
        return Destination(name=name, workspace_id=workspace_id, provider=enabled[workspace_id])

    async def receive(
        self, destination: Destination, delivery: Delivery, log_fields: dict[str, str] | None = None
    ) -> Reply:
        """Verify, translate and store a delivery.

        :param log_fields: gets what the line of the request in the log has of a verified delivery.
        :return: the answer, with status 200; everything is durable.
        :raises ApiError: if the delivery is refused.
        :raises StorageUnavailable: if not everything is durable; the provider sends it again.
        """
        name, provider = destination.name, destination.provider
        log_fields = {} if log_fields is None else log_fields
        small = delivery.encoding == "identity" and len(delivery.body) <= LARGE_BODY
        with await self._ingest.admission.enter(_key_of(destination), small=small):
            request = await provider_calls.request_of(
                delivery, self._public_url, self._body_limits[name]
            )
        with await self._ingest.admission.pace(_key_of(destination)):
            probed = provider_calls.probe(provider, request)
            if probed is not None:
                self._metrics.count("webhook_deliveries", name, "probe")
                log_fields["outcome"] = "probe"
                return probed
            await self._verify(destination, request)
        translation, result, problems = await self._store(destination, request)
        log_fields |= {"workspace": destination.workspace_id, "type": type_of(translation)}
        if problems:
            await self._keep(destination, delivery, problems)
        if translation.call is not None:
            await self._call(destination, translation.call)
        log_fields["outcome"] = outcome = _outcome(translation, result)
        self._metrics.count("webhook_deliveries", name, outcome)
        return provider_calls.reply(name, provider, request, result) or _usual_reply(result)

    async def retry(self, letter: DeadLetter) -> WebhookResult:
        """Translate the delivery of a dead letter again; it was verified when it arrived.

        The caller removes the letter if the result has nothing rejected.

        :raises ConfigError: if the workspace no longer has this provider, or if the letter does not
            hold a whole delivery.
        :raises StorageUnavailable: if not everything is durable.
        """
        delivery = delivery_of_letter(letter)
        provider = self._providers.get(letter.origin, {}).get(letter.workspace_id)
        if provider is None:
            raise ConfigError(
                f"dead letter {letter.id}: workspace {letter.workspace_id} has no {letter.origin}"
            )
        destination = Destination(
            name=letter.origin, workspace_id=letter.workspace_id, provider=provider
        )
        # It was verified when it arrived; the limit may have been higher then.
        limit = Limit(self._limits.decompressed_bytes, "limits.decompressed_bytes")
        request = await provider_calls.request_of(delivery, self._public_url, limit)
        received_at = min(max(letter.received_at, 0), MAX_TIME)  # of a letter by another program
        _, result, _ = await self._store(destination, request, undated=render_time(received_at))
        return result

    # ------------------------------------------------------------------------------------ steps
    async def _verify(self, destination: Destination, request: WebhookRequest) -> None:
        """:raises ApiError: 401, 400 if there is nothing that could be signed, or 503."""
        name = destination.name
        try:
            await provider_calls.verify(destination.provider, request, self._fetcher)
        except NothingSigned as error:
            self._metrics.count("webhook_deliveries", name, "invalid_payload")
            raise ApiError("invalid_payload", str(error)) from None
        except SignatureMismatch as error:
            raise self._refused(name, destination.workspace_id, str(error)) from None
        except FetchError as error:
            raise self._fetch_failed(name, error) from None

    async def _store(
        self, destination: Destination, request: WebhookRequest, *, undated: str | None = None
    ) -> tuple[Translation, WebhookResult, list[Problem]]:
        """Translate a verified request, store its events, and apply what they report.

        :param undated: the time of events that have none; ``None``: the time of arrival.
        :return: the translation, its result, and the problems of events that could not be stored;
            if there are any, the caller keeps the delivery.
        """
        translation, problems = await self._translate(destination, request)
        events = translation.events
        notices = {(destination.name, event.notice) for event in events if event.notice}
        for provider, notice in sorted(notices - self._noticed):
            _log.warning("webhook %s: %s", provider, notice)
        self._noticed |= notices
        documents = await self._recipients.identify(
            destination.workspace_id, destination.name, events
        )
        if undated is not None:
            documents = [
                document
                if document.get("timestamp") or document.get("originalTimestamp")
                else {**document, "timestamp": undated}
                for document in documents
            ]
        accepted = duplicates = 0
        workspace_id, name = destination.workspace_id, destination.name
        if documents:
            delivered = await self._pipeline.deliver(
                workspace_id,
                name,
                documents,
                restated={index for index, event in enumerate(events) if event.restated},
                rules=self._rules[name, workspace_id],
            )
            accepted, duplicates = delivered.accepted, delivered.duplicates
            for refused in delivered.rejected:
                problems += located(refused.error, f"/{events[refused.index].index}")
            # Also of duplicates: the process may have been killed after it stored the events.
            without = {refused.index for refused in delivered.rejected}
            pairs = enumerate(zip(events, documents, strict=True))
            reports = [pair for index, pair in pairs if index not in without]
            applied = await self._opt_outs.apply(workspace_id, name, reports, now=self.clock())
            if applied:
                self._metrics.event("subscription", "stored", applied, workspace_id)
        if translation.erasures:
            store, ids = self._ingest.store, translation.erasures
            async with within(self._ingest.timeout):
                await note_requests(store, workspace_id, name, ids, now=self.clock())
        result = WebhookResult(
            accepted=accepted,
            ignored=translation.ignored,
            duplicates=duplicates,
            rejected=len({problem.pointer.split("/")[1] for problem in problems}),
        )
        return translation, result, problems

    async def _translate(
        self, destination: Destination, request: WebhookRequest
    ) -> tuple[Translation, list[Problem]]:
        """Translate a verified request: see :func:`provider_calls.translate`."""
        depth = self._limits.json_depth
        if len(request.body) <= LARGE_BODY:
            return provider_calls.translate(destination.provider, request, depth)
        # A delivery of thousands of events takes 0.3 s, which the event loop must not wait for. In
        # turn with other large bodies, so that the memory of one of them is needed at a time.
        key = _key_of(destination)
        with await self._ingest.admission.enter(key, small=False):
            return await asyncio.to_thread(
                provider_calls.translate, destination.provider, request, depth
            )

    async def _keep(
        self, destination: Destination, delivery: Delivery, problems: Sequence[Problem]
    ) -> None:
        """Keep a delivery as a dead letter.

        :raises ApiError: 503, if it cannot be kept: the provider sends it again.
        """
        letter = letter_of_delivery(delivery, destination, problems, received_at=self.clock())
        kept = all(await self._ingest.keep([letter]))
        _log.warning(
            "webhook %s: %s: %s",
            destination.name,
            f"kept as dead letter {letter.id}" if kept else "not acknowledged, it cannot be kept",
            letter.message,
            extra={"provider": destination.name, "workspaceId": destination.workspace_id},
        )
        if not kept:
            self._metrics.count("webhook_deliveries", destination.name, "overloaded")
            raise overloaded("the delivery cannot be translated or kept now; send it again later")

    async def _call(self, destination: Destination, call: Fetch) -> None:
        """Make the outgoing call that a delivery needs.

        :raises ApiError: 503 if it fails; the provider sends the delivery again.
        """
        try:
            await self._fetcher.get(call, destination.provider.hosts)
        except FetchError as error:
            raise self._fetch_failed(destination.name, error) from None
        except FetchRefusedError as error:
            _log.error("webhook %s: %s", destination.name, error)

    # ----------------------------------------------------------------------------------- errors
    def _refused(self, name: str, workspace_id: str | None, reason: str) -> ApiError:
        self._metrics.count("webhook_deliveries", name, "invalid_signature")
        _log.warning(
            "webhook %s refused: %s",
            name,
            reason,
            extra={"provider": name, "workspaceId": workspace_id},
        )
        return ApiError("invalid_signature", "the webhook signature could not be verified")

    def _fetch_failed(self, name: str, error: FetchError) -> ApiError:
        self._metrics.count("webhook_deliveries", name, "fetch_failed")
        _log.warning("webhook %s: cannot fetch a document: %s", name, error)
        return overloaded("a document that the signature needs cannot be fetched now")


def _key_of(destination: Destination) -> str:
    """Return the name of the share of the queue that a provider's deliveries have."""
    return f"webhook {destination.workspace_id} {destination.name}"


def _usual_reply(result: WebhookResult) -> Reply:
    answer = {"success": True, "accepted": result.accepted, "ignored": result.ignored}
    return Reply(body=orjson.dumps(answer))


def _outcome(translation: Translation, result: WebhookResult) -> str:
    if result.rejected:
        return UNTRANSLATED
    if result.accepted or result.duplicates:
        return "accepted"
    if translation.tests:
        return "test"
    return "not_understood" if translation.unknown else "ignored"
