# SPDX-License-Identifier: Apache-2.0
"""``/system``: the processes, the storage, the limits, and what to look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from engage.api import DAY_MS, BackupStore
from engage.console.base import ConsoleHandler
from engage.console.data.badge import Budget, budgets_of
from engage.console.display.formats import number, plural, size, span
from engage.copy.backups import last_backup
from engage.monitoring.history import MINUTE, UP
from engage.people.erase import obstacle

if TYPE_CHECKING:
    from engage.config import Config

__all__ = ["SystemHandler"]

#: Minutes of the history that are looked at for the number of processes.
_RECENT: Final = 3

#: Milliseconds after which a backup is old: one that a timer makes each day has failed once.
_OLD_BACKUP: Final = 2 * DAY_MS

#: Names of the budgets of dead letters for people.
BUDGETS: Final[Mapping[str, str]] = {
    "api": "From clients",
    "webhook": "Webhook deliveries",
    "conflict": "Conflicting message ids",
}
#: Names of gauges for people; of others, their words are shown.
GAUGES: Final[Mapping[str, str]] = {
    "free_bytes": "Free disk space",
    "database_bytes": "Database file",
    "wal_bytes": "Write-ahead log",
}


class Part(NamedTuple):
    """The storage or the log, as the page shows it."""

    title: str
    answers: bool
    facts: Mapping[str, str]
    alarms: Sequence[str] = ()


class SystemHandler(ConsoleHandler):
    """The state of the server."""

    async def get(self) -> None:
        """Show the state."""
        console = self.console
        store = console.store
        await self.read(store.check())
        answers = self.outage is None
        budgets = await self._budgets() if answers else []
        backup, warnings = await self._backup() if answers else ({}, [])
        facts = {"Plugin": console.config.storage.backend, **store.versions()}
        storage = Part("Storage", answers, {**facts, **_gauges(store.gauges()), **backup})
        self.page(
            "system.html",
            title="System",
            nav="system",
            answers=answers,
            parts=[storage, *await self._log_part()],
            processes=await self._processes() if answers else None,
            budgets=budgets,
            budget_names=BUDGETS,
            warnings=[
                *_warnings(console.config),
                *filter(None, [obstacle(console.config)]),
                *console.app.keys.problems,
                *warnings,
            ],
            settings=_settings(console.config),
        )

    async def _log_part(self) -> list[Part]:
        """Return the log, if there is one."""
        config, lag = self.console.config.log, self.console.lag
        if config is None or lag is None:
            return []
        from engage.log.gaps import past_gaps

        facts = {"Plugin": config.backend, "Group of the loaders": config.group}
        if lag.backlog is not None:
            kept = lag.backlog.retention
            facts["Not loaded"] = plural(lag.records, "record")
            if lag.records:
                facts["Oldest of them"] = f"{span(lag.seconds)} old"
            facts["Records are kept"] = "indefinitely" if kept is None else span(kept / 1000)
        now = self.console.now()
        gaps = await self.read(past_gaps(self.console.store, now=now))
        return [Part("Log", lag.error is None, facts, [*lag.alarms, *(gaps or ())])]

    async def _processes(self) -> Mapping[str, str] | None:
        """Return the processes of each version that wrote to the history lately; ``None``: it is
        unknown."""
        store = self.console.store
        now = self.console.now()
        page = await self.read(
            store.counts(
                MINUTE, since=now - _RECENT * 60_000, until=now + 60_000, names=[UP], limit=1000
            )
        )
        if page is None:
            return None
        versions: dict[str, int] = {}
        for count in page.items:
            version = count.labels[0]
            versions[version] = max(versions.get(version, 0), count.processes)
        return {
            f"engage {version}": plural(count, "process", "processes")
            for version, count in sorted(versions.items())
        }

    async def _backup(self) -> tuple[Mapping[str, str], Sequence[str]]:
        """Return the facts about the last backup, and warnings."""
        store = self.console.store
        if not isinstance(store, BackupStore):
            return {}, []
        last = await self.read(last_backup(store))
        if last is None:
            return ({"Last backup": "none"} if self.outage is None else {}), []
        milliseconds = max(0, self.console.now() - last.made_at)
        age = span(milliseconds / 1000)
        facts = {
            "Last backup": f"{age} ago: {plural(last.events, 'event')}, {size(last.size)}",
            "Its file": f"{last.path} ({last.who}, {last.origin})",
        }
        old = milliseconds > _OLD_BACKUP
        return facts, [f"The last backup of the store was made {age} ago."] if old else []

    async def _budgets(self) -> list[Budget]:
        store = self.console.store
        uses = await self.read(store.budget_use()) or ()
        return budgets_of(uses, self.console.config.limits.dead_letter_budget)


def _gauges(values: Mapping[str, float]) -> Mapping[str, str]:
    """Return the storage's gauges for people: name → value. The last word of a name is its unit."""
    gauges = {}
    for name, value in values.items():
        words, _, unit = name.rpartition("_")
        if unit == "bytes":
            text = size(int(value))
        elif unit == "pid":
            text = str(int(value))
        elif unit == "seconds":
            text = f"{number(round(value, 1))} s"
        else:
            words, text = name, number(value)
        label = words.replace("_", " ").replace("cpu", "CPU")
        gauges[GAUGES.get(name) or label[:1].upper() + label[1:]] = text
    return gauges


def _warnings(config: Config) -> Iterator[str]:
    """Yield warnings about the config."""
    if config.server.public_url is None:
        yield (
            "server.public_url is not set: the snippets and webhook URLs show the address that the"
            " server listens on, which clients elsewhere cannot reach."
        )
    for workspace in config.workspaces:
        if workspace.subscription_groups and not workspace.subscription_secrets:
            yield (
                f"The workspace {workspace.id} has subscription groups but no subscription_secret,"
                " so no subscription link works."
            )
    if config.retention.dead_letters_days is None:
        yield "retention.dead_letters_days is not set: rejected events are kept indefinitely."


def _settings(config: Config) -> Mapping[str, str]:
    """Return the settings that are shown; none is a secret."""
    server, retention, limits = config.server, config.retention, config.limits

    def days(number: int | None) -> str:
        return "indefinitely" if number is None else f"{number} days"

    return {
        "Address": f"{server.host}:{server.port}",
        "Public URL": server.public_url or "not set",
        "Workers": str(server.workers),
        "Metrics": "off" if server.metrics_port is None else f"port {server.metrics_port}",
        "Events are kept": days(retention.events_days),
        "Rejected events are kept": days(retention.dead_letters_days),
        "Largest event": size(limits.event_bytes),
        "Largest body": size(limits.body_bytes),
        "Events in a batch": number(limits.batch_events),
        "Transforms": ", ".join(transform.name for transform in config.transforms) or "none",
        "Observers": ", ".join(observer.name for observer in config.observers) or "none",
    }
