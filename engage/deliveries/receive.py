# SPDX-License-Identifier: Apache-2.0
"""What becomes of a webhook delivery: verified, translated, given to its users, stored.

Which workspace it is for is said by its URL or a header, never by its body. Until it is verified it
leaves nothing behind but a counter and a line in the log; afterwards nothing of it is lost: what
does not translate is kept whole as a dead letter, and only trouble with the storage refuses it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from engage.api import (
    ConfigError,
    DeadLetter,
    EventStore,
    Fetch,
    NothingSigned,
    PayloadInvalid,
    Provider,
    Rejected,
    Reply,
    SignatureMismatch,
    Translation,
    WebhookRequest,
    WebhookResult,
    render_time,
)
from engage.deliveries.delivery import (
    UNTRANSLATED,
    Incoming,
    delivery_of_letter,
    letter_of_delivery,
    named_workspaces,
)
from engage.deliveries.fetcher import Fetcher, FetchError, FetchRefusedError
from engage.deliveries.recipients import Recipients
from engage.errors import ApiError, Limit, Problem, located, overloaded
from engage.pipeline.decode import decompress, too_deep

if TYPE_CHECKING:
    from engage.config import Limits
    from engage.metrics import Metrics
    from engage.pipeline.ingest import Ingest
    from engage.pipeline.pipeline import Pipeline

__all__ = ["Deliveries", "translated", "unkeepable"]

_log = logging.getLogger(__name__)


class Deliveries:
    """Takes deliveries.

    :param known: names of all installed providers.
    :param providers: provider → workspace id → the provider with that workspace's options.
    :param public_url: under which the providers reach this server, without a slash at the end.
    :param timeout: seconds that a call of the storage may take.
    """

    def __init__(
        self,
        *,
        known: Collection[str],
        providers: Mapping[str, Mapping[str, Provider]],
        public_url: str | None,
        pipeline: Pipeline,
        ingest: Ingest,
        store: EventStore,
        limits: Limits,
        metrics: Metrics,
        fetcher: Fetcher,
        timeout: float = 8.0,
    ) -> None:
        self._known = frozenset(known)
        self._providers = providers
        self._public_url = public_url or ""
        self._pipeline = pipeline
        self._ingest = ingest
        self._recipients = Recipients(store, timeout)
        self._limits = limits
        self._metrics = metrics
        self._fetcher = fetcher

    def check_provider(self, provider: str) -> None:
        """:raises ApiError: 404 ``unknown_provider``: nothing of this name is installed."""
        if provider not in self._known:
            self._metrics.webhook("unknown", "unknown_provider")
            raise ApiError("unknown_provider", "no such webhook provider is installed")

    def workspace(self, provider: str, target: str, headers: Sequence[tuple[str, str]]) -> str:
        """Find the workspace that a delivery is for.

        :param target: path and query.
        :raises ApiError: 404 ``unknown_provider``; 400 ``workspace_required``: none is named and
            there is not exactly one; 401 ``invalid_signature``: the named one is unknown or has not
            this provider, or two are named. (The same answer as to a wrong signature: no hint.)
        """
        self.check_provider(provider)
        enabled = self._providers.get(provider, {})
        named = named_workspaces(target, headers)
        if named:
            workspace = named.pop()
            if named or workspace not in enabled:
                raise self._refused(provider, None, "the named workspace does not have it")
            return workspace
        if len(enabled) != 1:
            self._metrics.webhook(provider, "workspace_required")
            _log.warning(
                "webhook %s refused: it names no workspace, and %d have this provider",
                provider,
                len(enabled),
                extra={"provider": provider, "workspaceId": None},
            )
            raise ApiError(
                "workspace_required",
                "say which workspace this is for: append ?workspaceId= to the URL",
            )
        return next(iter(enabled))

    async def receive(self, incoming: Incoming) -> Reply:
        """Take a delivery.

        :return: the answer, status 200; everything is durable.
        :raises ApiError: it is refused.
        :raises StorageUnavailable: not everything is durable; the provider delivers it again.
        """
        name = incoming.provider
        workspace = self.workspace(name, incoming.target, incoming.headers)
        provider = self._providers[name][workspace]
        request = self._request(incoming, time.time())
        probed = _probed(provider, request)
        if probed is not None:
            self._metrics.webhook(name, "probe")
            return probed
        await self._verify(name, workspace, provider, request)
        return await self._take(name, workspace, provider, request, incoming)

    def _request(self, incoming: Incoming, now: float) -> WebhookRequest:
        body = incoming.body
        if incoming.encoding != "identity":
            body = decompress(
                body,
                incoming.encoding,
                Limit(self._limits.decompressed_bytes, "limits.decompressed_bytes"),
            )
        return WebhookRequest(
            method=incoming.method,
            headers=incoming.headers,
            body=body,
            url=self._public_url + incoming.target,
            now=now,
        )

    async def _verify(
        self, name: str, workspace: str, provider: Provider, request: WebhookRequest
    ) -> None:
        try:
            needed = provider.needs(request)
            fetched = None if needed is None else await self._fetch(name, provider, needed)
            provider.verify(request, fetched)
        except ApiError:
            raise
        except NothingSigned as error:
            self._metrics.webhook(name, "invalid_payload")
            raise ApiError("invalid_payload", str(error)) from None
        except (SignatureMismatch, FetchRefusedError) as error:
            raise self._refused(name, workspace, str(error)) from None
        except Exception as error:  # whatever a forged delivery makes a provider stumble over
            raise self._refused(name, workspace, type(error).__name__) from None

    async def _fetch(self, name: str, provider: Provider, needed: Fetch) -> bytes:
        """:raises ApiError: 503."""
        try:
            return await self._fetcher.get(needed, provider.hosts)
        except FetchError as error:
            _log.warning("webhook %s: cannot fetch what it needs: %s", name, error)
            self._metrics.webhook(name, "fetch_failed")
            raise overloaded("what the signature needs cannot be fetched now") from None

    def _refused(self, name: str, workspace: str | None, reason: str) -> ApiError:
        self._metrics.webhook(name, "invalid_signature")
        _log.warning(
            "webhook %s refused: %s",
            name,
            reason,
            extra={"provider": name, "workspaceId": workspace},
        )
        return ApiError("invalid_signature", "the delivery does not verify")

    async def _take(
        self,
        name: str,
        workspace: str,
        provider: Provider,
        request: WebhookRequest,
        incoming: Incoming,
    ) -> Reply:
        translation, result, rejected = await self._translate(name, workspace, provider, request)
        if rejected:
            now = time.time_ns() // 1_000_000
            letter = letter_of_delivery(incoming, workspace, provider, rejected, received_at=now)
            kept = await self._ingest.put_dead_letters([letter])
            _log.warning(
                "webhook %s: %s: %s",
                name,
                f"kept as dead letter {letter.id}"
                if kept
                else "lost, the storage keeps no dead letters",
                letter.message,
                extra={"provider": name, "workspaceId": workspace},
            )
        if translation.call is not None:
            try:
                await self._fetch(name, provider, translation.call)
            except FetchRefusedError as error:
                _log.error("webhook %s: %s", name, error)
        self._metrics.webhook(name, _outcome(result))
        try:
            reply = provider.reply(request, result)
        except Exception:  # all is stored: the usual answer is as true
            _log.exception("webhook %s: making its reply failed", name)
            reply = None
        if reply is not None:
            return reply
        answer = {"success": True, "accepted": result.accepted, "ignored": result.ignored}
        return Reply(body=orjson.dumps(answer))

    async def _translate(
        self,
        name: str,
        workspace: str,
        provider: Provider,
        request: WebhookRequest,
        *,
        undated: str | None = None,
    ) -> tuple[Translation, WebhookResult, list[Problem]]:
        """Translate a verified delivery and store its events.

        :param undated: the time of events that have none of their own; ``None``: now.
        :return: the last: what could not be taken; the delivery has to be kept then.
        """
        translation, problems = translated(provider, request)
        events = []
        for event in translation.events:
            problem = unkeepable(event.document, self._limits.json_depth)
            if problem is not None:
                problems.append(Problem(f"/{event.index}", problem))
            else:
                events.append(event)
        documents = await self._recipients.identify(workspace, events)
        if undated is not None:
            documents = [
                document
                if document.get("timestamp") or document.get("originalTimestamp")
                else {**document, "timestamp": undated}
                for document in documents
            ]
        accepted = duplicates = 0
        if documents:
            delivered = await self._pipeline.deliver(workspace, name, documents)
            accepted, duplicates = delivered.accepted, delivered.duplicates
            for refused in delivered.rejected:
                problems += located(refused.error, f"/{events[refused.index].index}")
        result = WebhookResult(
            accepted=accepted,
            ignored=translation.ignored,
            duplicates=duplicates,
            rejected=len({problem.pointer.split("/")[1] for problem in problems}),
        )
        return translation, result, problems

    async def retry(self, letter: DeadLetter) -> WebhookResult:
        """Translate a delivery again that is a dead letter; it was verified when it came.

        The letter is not removed; do so if nothing of the result is rejected.

        :raises ConfigError: its workspace has this provider no more, or it is no whole delivery.
        :raises StorageUnavailable: not everything is durable.
        """
        incoming = delivery_of_letter(letter)
        provider = self._providers.get(letter.origin, {}).get(letter.workspace_id)
        if provider is None:
            raise ConfigError(
                f"dead letter {letter.id}: workspace {letter.workspace_id} has no {letter.origin}"
            )
        request = self._request(incoming, letter.received_at / 1000)
        _, result, _ = await self._translate(
            letter.origin,
            letter.workspace_id,
            provider,
            request,
            undated=render_time(letter.received_at),
        )
        return result


def translated(provider: Provider, request: WebhookRequest) -> tuple[Translation, list[Problem]]:
    """Call ``translate``; whatever it raises means that the delivery was not understood."""
    try:
        translation = provider.translate(request)
    except PayloadInvalid as error:
        return Translation(), [Problem("/", str(error))]
    except Exception as error:
        _log.exception("translating a webhook delivery failed")
        return Translation(), [Problem("/", f"the provider failed: {type(error).__name__}")]
    return translation, [_problem(rejected) for rejected in translation.rejected]


def _probed(provider: Provider, request: WebhookRequest) -> Reply | None:
    try:
        return provider.probe(request)
    except Exception:  # nobody has verified the request yet: let verify refuse it
        return None


def unkeepable(document: dict[str, Any], depth: int) -> str | None:
    """:return: why a document that a provider made cannot be an event's."""
    try:
        orjson.dumps(document)
    except TypeError:
        return "cannot be stored as JSON"
    return "is nested too deep" if too_deep(document, depth) else None


def _problem(rejected: Rejected) -> Problem:
    return Problem(f"/{rejected.index}", rejected.message)


def _outcome(result: WebhookResult) -> str:
    if result.rejected:
        return UNTRANSLATED
    return "accepted" if result.accepted or result.duplicates else "ignored"
