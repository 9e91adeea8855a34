# SPDX-License-Identifier: Apache-2.0
"""The steps of a webhook delivery: verify, translate, find its users, store, opt out, answer.

The URL or a header names the workspace, never the body. A delivery that is not verified leaves
only a counter and a log line. A verified delivery is never lost: one that cannot be translated is
kept whole as a dead letter, and the provider sends it again only if the storage or a fetch failed.

A provider is a plugin, and it reads what anyone may send: whatever it raises becomes an error or a
result that the caller expects.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

import orjson

from engage.api import (
    MAX_TIME,
    ConfigError,
    DeadLetter,
    Fetch,
    NothingSigned,
    PayloadInvalid,
    Provider,
    Reply,
    SignatureMismatch,
    TranslatedEvent,
    Translation,
    WebhookRequest,
    WebhookResult,
    render_time,
)
from engage.deliveries.delivery import (
    UNTRANSLATED,
    Delivery,
    Destination,
    body_limit,
    delivery_of_letter,
    letter_of_delivery,
)
from engage.deliveries.fetcher import Fetcher, FetchError, FetchRefusedError
from engage.errors import ApiError, Limit, Problem, body_too_large, located, overloaded
from engage.people.requests import note_requests
from engage.pipeline.admission import LARGE_BODY
from engage.pipeline.decode import decompress_in_slices, too_deep
from engage.pipeline.normalise import Arrival
from engage.reading.time_limit import within
from engage.subscriptions.opt_outs import apply_reports
from engage.subscriptions.recipients import Recipients
from engage.webhooks import names_person

if TYPE_CHECKING:
    from engage.config import Config
    from engage.monitoring.metrics import Metrics
    from engage.pipeline.admission import Admitted
    from engage.pipeline.clock import Clock
    from engage.pipeline.ingest import Ingest
    from engage.pipeline.pipeline import Pipeline

__all__ = [
    "Deliveries",
    "named_workspaces",
    "request_of",
    "translate",
    "type_of",
    "verify",
]

_log = logging.getLogger(__name__)

#: Maximum number of parameters in the query of a delivery.
_MAX_PARAMETERS: Final = 1000
#: What a type may not have in the log.
_UNPRINTABLE: Final = re.compile(r"[^!-+\--~]")


class Deliveries:
    """Receives deliveries.

    :param installed: the names of all installed providers.
    :param providers: provider → workspace id → the provider with the options of that workspace.
    :param clock: the time of this process.
    """

    def __init__(
        self,
        config: Config,
        *,
        installed: Collection[str],
        providers: Mapping[str, Mapping[str, Provider]],
        pipeline: Pipeline,
        ingest: Ingest,
        metrics: Metrics,
        fetcher: Fetcher,
        clock: Clock,
    ) -> None:
        self._limits = config.limits
        self._public_url = config.server.public_url
        self._pipeline = pipeline
        self._ingest = ingest
        self._recipients = Recipients(ingest.store, ingest.timeout)
        self._metrics = metrics
        self._fetcher = fetcher
        #: The time of this process.
        self.clock = clock
        self._destinations: dict[str, dict[str, Destination]] = {}
        #: Name of an installed provider → its largest body, compressed and decompressed.
        self.body_limits: dict[str, Limit] = {}
        #: The notices of each provider that were logged, and none.
        self._noticed = {name: {""} for name in installed}
        for name in installed:
            enabled = providers.get(name, {})
            self.body_limits[name] = body_limit(name, enabled.values(), config.limits)
            self._destinations[name] = {
                workspace.id: Destination.of(workspace, name, enabled[workspace.id])
                for workspace in config.workspaces
                if workspace.id in enabled
            }

    async def close(self) -> None:
        """Close the connections to providers. Idempotent."""
        await self._fetcher.close()

    def unknown_provider(self) -> ApiError:
        """Count a delivery of a provider that is not in :attr:`body_limits`; return its error."""
        self._metrics.count("webhook_deliveries", "unknown", "unknown_provider")
        return ApiError("unknown_provider", "no webhook provider of this name is installed")

    def destination(
        self, name: str, target: str, headers: Sequence[tuple[str, str]]
    ) -> Destination:
        """Find the workspace that a delivery is for, and its provider.

        :param name: one of :attr:`body_limits`.
        :param target: path and query.
        :raises ApiError: 400 ``workspace_required`` if the delivery names no workspace and there is
            not exactly one with this provider; 401 ``invalid_signature`` if it names two, or one
            that is unknown or does not have this provider. (A wrong signature gets the same answer,
            so that a client cannot find out which workspaces exist.)
        """
        enabled = self._destinations[name]
        try:
            named = named_workspaces(target, headers)
        except ValueError:
            raise self._refused(name, "its query has too many parameters") from None
        if not named and len(enabled) != 1:
            reason = f"it names no workspace, and {len(enabled)} have this provider"
            message = "name the workspace that this is for: append ?workspaceId= to the URL"
            if not enabled:
                message = "no workspace of this server receives deliveries of this provider"
            raise self._refused(name, reason, error=ApiError("workspace_required", message))
        workspace_id, *others = named or enabled
        if others or workspace_id not in enabled:
            raise self._refused(name, "the named workspace does not have it")
        return enabled[workspace_id]

    async def receive(
        self, destination: Destination, delivery: Delivery, log_fields: dict[str, str] | None = None
    ) -> Reply:
        """Verify, translate and store a delivery.

        :param log_fields: gets what the line of the request in the log has of a verified delivery.
        :return: the answer, with status 200; everything is durable.
        :raises ApiError: if the delivery is refused.
        :raises StorageUnavailable: if not everything is durable; the provider sends it again.
        """
        name, workspace_id, limits = destination.name, destination.workspace.id, self._limits
        log_fields = {} if log_fields is None else log_fields
        received_at = round(delivery.arrived_at * 1000) or self.clock()
        delivery.arrived_at = delivery.arrived_at or received_at / 1000
        small = delivery.encoding == "identity" and len(delivery.body) <= LARGE_BODY
        admitted = await self._ingest.admission.enter(destination.key, small=small)
        try:
            arrival = Arrival.of_delivery(
                workspace_id, name, received_at=received_at, limits=limits, rules=destination.rules
            )
            request = await request_of(delivery, self._public_url, self.body_limits[name])
            probed = await verify(destination.provider, request, self._fetcher, admitted)
            if probed is not None:
                self._metrics.count("webhook_deliveries", name, "probe")
                log_fields["outcome"] = "probe"
                return probed
            translation, result, problems = await self._store(
                destination, request, admitted, arrival
            )
            log_fields |= {"workspace": workspace_id, "type": type_of(translation)}
            if problems:
                await self._keep(letter_of_delivery(delivery, destination, problems, received_at))
            if translation.call is not None:
                await self._call(destination, translation.call)
        except NothingSigned as error:
            self._metrics.count("webhook_deliveries", name, "invalid_payload")
            raise ApiError("invalid_payload", str(error)) from None
        except SignatureMismatch as error:
            raise self._refused(name, str(error), workspace_id) from None
        except FetchError as error:
            self._metrics.count("webhook_deliveries", name, "fetch_failed")
            _log.warning("webhook %s: cannot fetch a document: %s", name, error)
            message = "a document that the signature needs cannot be fetched now"
            raise overloaded(message) from None
        finally:
            admitted.leave()
        if result.rejected:
            outcome = UNTRANSLATED
        elif result.accepted or result.duplicates:
            outcome = "accepted"
        elif translation.tests:
            outcome = "test"
        else:
            outcome = "not_understood" if translation.unknown else "ignored"
        log_fields["outcome"] = outcome
        self._metrics.count("webhook_deliveries", name, outcome)
        try:
            own = destination.provider.reply(request, result)
        except Exception:  # everything is stored, so the usual answer is true as well
            _log.exception("webhook %s: making its reply failed", name)
            own = None
        answer = {"success": True, "accepted": result.accepted, "ignored": result.ignored}
        return own or Reply(body=orjson.dumps(answer))

    async def retry(self, letter: DeadLetter) -> WebhookResult:
        """Translate the delivery of a dead letter again; it was verified when it arrived.

        The caller removes the letter if the result has nothing rejected.

        :raises ConfigError: if the workspace no longer has this provider, or if the letter does not
            hold a whole delivery.
        :raises StorageUnavailable: if not everything is durable.
        """
        delivery = delivery_of_letter(letter)
        destination = self._destinations.get(letter.origin, {}).get(letter.workspace_id)
        if destination is None:
            raise ConfigError(
                f"dead letter {letter.id}: workspace {letter.workspace_id} has no {letter.origin}"
            )
        # It was verified when it arrived; the limit may have been higher then.
        limit = Limit(self._limits.decompressed_bytes, "limits.decompressed_bytes")
        # Another program may have written the letter.
        first = render_time(min(max(letter.received_at, 0), MAX_TIME))
        with await self._ingest.admission.enter(destination.key, small=False) as admitted:
            request = await request_of(delivery, self._public_url, limit)
            now, limits, rules = self.clock(), self._limits, destination.rules
            arrival = Arrival.of_delivery(
                letter.workspace_id, letter.origin, received_at=now, limits=limits, rules=rules
            )
            _, result, _ = await self._store(destination, request, admitted, arrival, undated=first)
        return result

    # ------------------------------------------------------------------------------------ steps
    async def _store(
        self,
        destination: Destination,
        request: WebhookRequest,
        admitted: Admitted,
        arrival: Arrival,
        *,
        undated: str | None = None,
    ) -> tuple[Translation, WebhookResult, list[Problem]]:
        """Translate a verified request, store its events, and apply what they report.

        :param admitted: the context of the delivery; it has left when this returns.
        :param arrival: that of its events.
        :param undated: the time of events that have none; ``None``: the time of arrival.
        :return: the translation, its result, and the problems of events that could not be stored;
            if there are any, the caller keeps the delivery.
        """
        name, workspace_id = destination.name, destination.workspace.id
        arguments = destination.provider, request, self._limits.json_depth
        if len(request.body) <= LARGE_BODY:
            translation, problems = translate(*arguments)
        else:
            # A delivery of thousands of events takes 0.3 s, which the event loop must not wait for.
            # It has the turn, so that the memory of one such delivery is needed at a time.
            translation, problems = await asyncio.to_thread(translate, *arguments)
        events = translation.events
        for notice in sorted({event.notice for event in events} - self._noticed[name]):
            self._noticed[name].add(notice)
            _log.warning("webhook %s: %s", name, notice)
        documents = [event.document for event in events]
        if not all(document.get("userId") for document in documents):
            admitted.leave()
            documents = await self._recipients.identify(workspace_id, name, events)
            await admitted.enter_again(small=True)
        if undated is not None:
            documents = [
                document
                if document.get("timestamp") or document.get("originalTimestamp")
                else {**document, "timestamp": undated}
                for document in documents
            ]
        accepted = duplicates = 0
        if not documents:
            admitted.leave()
        else:
            restated = {index for index, event in enumerate(events) if event.restated}
            delivered = await self._pipeline.deliver(
                arrival, documents, admitted, restated=restated
            )
            accepted, duplicates = delivered.accepted, delivered.duplicates
            for refused in delivered.rejected:
                problems += located(refused.error, f"/{events[refused.index].index}")
            if any(event.opt_outs for event in events):
                # Also of duplicates: the process may have been killed after it stored the events.
                without = {refused.index for refused in delivered.rejected}
                pairs = enumerate(zip(events, documents, strict=True))
                reports = [pair for index, pair in pairs if index not in without]
                applied = await apply_reports(
                    self._ingest.store,
                    destination.workspace,
                    name,
                    reports,
                    now=arrival.received_at,
                    seconds=self._ingest.timeout,
                )
                if applied:
                    self._metrics.event("subscription", "stored", applied, workspace_id)
        if translation.erasures:
            store, ids = self._ingest.store, translation.erasures
            async with within(self._ingest.timeout):
                await note_requests(store, workspace_id, name, ids, now=arrival.received_at)
        result = WebhookResult(
            accepted=accepted,
            ignored=translation.ignored,
            duplicates=duplicates,
            rejected=len({problem.pointer.split("/")[1] for problem in problems}),
        )
        return translation, result, problems

    async def _keep(self, letter: DeadLetter) -> None:
        """Keep the dead letter of a delivery.

        :raises ApiError: 503, if it cannot be kept: the provider sends it again.
        """
        kept = all(await self._ingest.keep([letter]))
        _log.warning(
            "webhook %s: %s: %s",
            letter.origin,
            f"kept as dead letter {letter.id}" if kept else "not acknowledged, it cannot be kept",
            letter.message,
            extra={"provider": letter.origin, "workspaceId": letter.workspace_id},
        )
        if not kept:
            self._metrics.count("webhook_deliveries", letter.origin, "overloaded")
            raise overloaded("the delivery cannot be translated or kept now; send it again later")

    async def _call(self, destination: Destination, call: Fetch) -> None:
        """Make the outgoing call that a delivery needs.

        :raises FetchError: if it fails; the provider sends the delivery again.
        """
        try:
            await self._fetcher.get(call, destination.provider.hosts)
        except FetchRefusedError as error:
            _log.error("webhook %s: %s", destination.name, error)

    def _refused(
        self,
        name: str,
        reason: str,
        workspace_id: str | None = None,
        error: ApiError | None = None,
    ) -> ApiError:
        """Count and log a delivery that is refused; return the error, which does not say why."""
        error = error or ApiError(
            "invalid_signature", "the webhook signature could not be verified"
        )
        self._metrics.count("webhook_deliveries", name, error.code)
        extra = {"provider": name, "workspaceId": workspace_id}
        _log.warning("webhook %s refused: %s", name, reason, extra=extra)
        return error


def named_workspaces(target: str, headers: Sequence[tuple[str, str]]) -> set[str]:
    """Return every workspace that the query or a header names.

    A delivery that names more than one is refused.

    :param target: path and query.
    :raises ValueError: if the query has more than 1000 parameters.
    """
    query = parse_qsl(
        target.partition("?")[2], keep_blank_values=True, max_num_fields=_MAX_PARAMETERS
    )
    named = {value for name, value in query if name == "workspaceId"}
    return named | {value for name, value in headers if name.lower() == "df-workspace-id"}


async def request_of(delivery: Delivery, public_url: str | None, limit: Limit) -> WebhookRequest:
    """Return the request as a provider sees it.

    :param public_url: ``server.public_url``.
    :param limit: the largest body, compressed and decompressed.
    :raises ApiError: 413 ``body_too_large``, or 400 ``invalid_encoding`` if the body cannot be
        decompressed.
    """
    body = delivery.body
    # A body in chunks that arrives together with its head has passed the connection already.
    if len(body) > limit.bytes:
        raise body_too_large(limit)
    if delivery.encoding != "identity":
        body = await decompress_in_slices(body, delivery.encoding, limit)
    return WebhookRequest(
        method="POST",
        headers=delivery.headers,
        body=body,
        url=(public_url or "") + delivery.target,
        now=delivery.arrived_at,
    )


async def verify(
    provider: Provider,
    request: WebhookRequest,
    fetcher: Fetcher,
    admitted: Admitted | None = None,
) -> Reply | None:
    """Verify that the provider signed the request, and fetch the document that its signature needs.

    :param admitted: the context of the delivery, which is left while the document is fetched.
    :return: ``None``; the answer to a request by which the provider only tries the URL, which is
        not verified.
    :raises SignatureMismatch: if it did not, or if the provider failed.
    :raises FetchError: if the document that the signature needs cannot be fetched now.
    :raises ApiError: 503 ``overloaded``, see :meth:`Admitted.enter_again`.
    """
    with contextlib.suppress(Exception):  # It is a real delivery, then.
        probed = provider.probe(request)
        if probed is not None:
            return probed
    try:
        fetched, needed = None, provider.needs(request)
        if needed is not None:
            if admitted is not None:
                admitted.leave()
            fetched = await fetcher.get(needed, provider.hosts)
            if admitted is not None:
                await admitted.enter_again(small=not admitted.large)
        provider.verify(request, fetched)
    except (SignatureMismatch, FetchError, ApiError):
        raise
    except FetchRefusedError as error:
        raise SignatureMismatch(str(error)) from error
    except Exception as error:  # a forged request can make a provider fail in any way
        raise SignatureMismatch(type(error).__name__) from error
    return None


def translate(
    provider: Provider, request: WebhookRequest, depth: int
) -> tuple[Translation, list[Problem]]:
    """Translate a verified request.

    :param depth: how deeply a stored event may be nested (``limits.json_depth``).
    :return: the translation with those events that can be stored, and a problem for each part of
        the delivery that could not be translated.
    """
    try:
        translation = provider.translate(request)
    except PayloadInvalid as error:
        return Translation(types=[error.kind]), [Problem("/", str(error))]
    except RecursionError:
        return Translation(), [Problem("/", "the delivery is nested too deeply")]
    except Exception as error:
        _log.exception("translating a webhook delivery failed")
        return Translation(), [Problem("/", f"the provider failed: {type(error).__name__}")]
    problems = [Problem(f"/{item.index}", item.message) for item in translation.rejected]
    unknown: dict[int, object] = {}
    for index, element in translation.unknown.items():
        if names_person(element):
            problems.append(Problem(f"/{index}", "names a person, but is not understood"))
        else:
            unknown[index] = element
    storable: list[TranslatedEvent] = []
    for event in translation.events:
        context = event.document.get("context")
        if isinstance(context, dict) and "engage" in context:  # Only engage sets this mark.
            context = {name: context[name] for name in context if name != "engage"}
            event = dataclasses.replace(event, document={**event.document, "context": context})
        reason = event.problem
        if not reason:
            try:
                text = orjson.dumps(event.document)
            except TypeError:
                reason = "cannot be stored as JSON"
            else:
                # Most events have fewer containers than levels are allowed.
                containers = text.count(b"{") + text.count(b"[")
                if containers > depth and too_deep(event.document, depth):
                    reason = "is nested too deeply"
        if reason:
            problems.append(Problem(f"/{event.index}", reason))
        else:
            storable.append(event)
    left_out = translation.ignored - len(translation.unknown) + len(unknown)
    kept = dataclasses.replace(translation, events=storable, ignored=left_out, unknown=unknown)
    return kept, problems


def type_of(translation: Translation) -> str:
    """Return what the service calls a delivery, for the log: the types of its elements, or else of
    its events, in at most 200 characters; ``unknown`` if none is read."""
    types = translation.types or {str(event.document.get("type")) for event in translation.events}
    shown = ",".join(sorted({_UNPRINTABLE.sub("?", name) for name in types if name}))
    return shown[:200] or "unknown"
