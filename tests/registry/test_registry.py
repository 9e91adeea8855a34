# SPDX-License-Identifier: Apache-2.0
"""The registry makes storages, providers, transforms and observers from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.api import ConfigError, LogContext, StorageContext, StorageUnavailable
from engage.config import Config, load
from engage.config.schema_check import SettingsError
from engage.registry import PluginError, Registry
from engage.registry.discovery import KINDS, Discovered, Registered
from support.each import each
from support.memory_store import MemoryEvents, MemoryProfiles, MemorySubscriptions

OPTIONS = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "secret": {"writeOnly": True, "type": ["string", "array"]},
        "mode": {"enum": ["fast", "safe"]},
    },
    "x-removed": {"speed": "the transform measures it."},
}


class Events(MemoryEvents):
    """A storage of events that keeps its options and its context."""

    def __init__(self, options: Mapping[str, Any], context: StorageContext) -> None:
        super().__init__()
        self.options = options
        self.context = context


class Whole(Events, MemoryProfiles, MemorySubscriptions):
    """A storage with profiles, subscriptions, suppressions and counters."""


class Mailer:
    """A provider that reports unsubscribes."""

    opt_out_channels = ("email", "sms")

    def __init__(self, *_: object) -> None:
        """Take any options."""

    def credentials(self) -> list[bytes]:
        """Return none."""
        return []


def registry(**tables: Mapping[str, Any]) -> Registry:
    """Return a registry with these factories, whose options are :data:`OPTIONS`."""
    kinds = {
        kind: {
            name: Registered(
                name=name, factory=factory, schema=OPTIONS, plugin="p", distribution="d 1.0"
            )
            for name, factory in tables.get(kind, {}).items()
        }
        for kind in KINDS
    }
    plugins: Any = ("p",) if tables else ()
    return Registry(Discovered(plugins=plugins, tables=kinds, commands={}, command_plugins={}))


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    """Return a function that loads a config of these lines and one workspace."""

    def _config(text: str = "", workspace: str = "") -> Config:
        path = tmp_path / "engage.toml"
        path.write_text(f'{text}\n[[workspaces]]\nid = "acme"\n{workspace}')
        return load(path, {"MODE": "hunter2"})

    return _config


def test_the_storage_is_made_from_the_config(config: Any, tmp_path: Path) -> None:
    text = """
        [storage]
        backend = "whole"
        write_timeout = 3
        [storage.whole]
        mode = "fast"
        [limits]
        user_traits = 1
        user_trait_bytes = 2
        visitors = 3
        dead_letter_count = 5
        dead_letter_bytes = 6
        [retention]
        events_days = 9
        dead_letters_days = 10
    """
    made = registry(storage={"whole": Whole}).make_storage(
        config(text, 'subscription_identifiers = ["crm"]\nsubscription_secret = "s"')
    )
    assert isinstance(made, Whole)
    assert made.options == {"mode": "fast"}
    context = made.context
    assert context.base_dir == tmp_path
    assert context.identifiers == {"acme": ("crm", "email", "phone")}
    limits, budget = context.profile_limits, context.dead_letter_budget
    assert [limits.traits, limits.trait_bytes, limits.visitors] == [1, 2, 3]
    assert [budget.api_count, budget.api_bytes] == [5, 6]
    assert [budget.webhook_count, budget.webhook_bytes] == [5, 24]
    assert [budget.conflict_count, budget.conflict_bytes] == [5, 6]
    assert context.write_timeout == 3
    assert (context.events_days, context.dead_letters_days) == (9, 10)


def test_the_log_is_made_from_the_config(config: Any, tmp_path: Path) -> None:
    made: list[tuple[Any, LogContext]] = []

    def queue(options: Any, context: LogContext) -> Any:
        made.append((options, context))
        return "a log"

    installed = registry(storage={"whole": Whole}, log={"queue": queue})
    text = """
        [storage]
        backend = "whole"
        write_timeout = 3
        [limits]
        event_bytes = 300_000
        header_bytes = 2_000
        [log]
        backend = "queue"
        [log.queue]
        mode = "fast"
    """
    log: Any = installed.make_log(config(text))
    assert log == "a log"
    ((options, context),) = made
    assert options == {"mode": "fast"}
    assert (context.base_dir, context.write_timeout) == (tmp_path, 3)
    # The letter of a refused event has the event in Base64. That of a delivery has its body.
    assert context.max_value_bytes == 400_000 + 4_000 + 128 * 1024
    installed.make_log(config(text, "[workspaces.webhooks.shop]\n"))
    assert made[1][1].max_value_bytes > 5 * 1024 * 1024 * 4 / 3


def test_there_is_no_log_without_its_section(config: Any) -> None:
    assert registry(storage={"whole": Whole}).make_log(config()) is None


@each(
    "lines, said",
    [
        ('backend = "kafak"', "log.backend: no log 'kafak' is installed; did you mean 'kafka'?"),
        ("[log.kafka]\nmode = 1", 'log.kafka.mode: must be one of "fast", "safe" (it is 1)'),
        ("[log.other]\nx = 1", "log.other: no log 'other' is installed; install its plugin"),
    ],
)
def test_a_wrong_log_is_an_error(config: Any, lines: str, said: str) -> None:
    installed = registry(storage={"mongo": Whole}, log={"kafka": object})
    chosen = config(f"[log]\n{lines}\n")
    with pytest.raises(SettingsError) as caught:
        installed.check(chosen)
    (problem,) = caught.value.problems
    assert said in problem


def test_secrets_of_a_log_are_known(config: Any) -> None:
    chosen = config('[log]\nbackend = "kafka"\n[log.kafka]\nsecret = "hush"\n')
    installed = registry(storage={"mongo": Whole}, log={"kafka": object})
    assert list(installed.secrets(chosen)) == [("log", "hush")]


class Shop:
    """A provider that finds users by two traits."""

    identifiers = ("shopId", "email")


def test_a_workspace_declares_the_identifiers_of_its_providers(config: Any) -> None:
    """A trait by which a provider finds users is indexed in the workspaces that enable it."""
    text = '[storage]\nbackend = "whole"\n'
    installed = registry(storage={"whole": Whole}, webhook={"shop": Shop, "other": object})
    for webhooks, expected in (
        ("", ()),
        ("[workspaces.webhooks.other]\n", ()),
        ("[workspaces.webhooks.shop]\n", ("shopId",)),
    ):
        made = installed.make_storage(config(text, webhooks))
        assert isinstance(made, Whole)
        assert made.context.identifiers == {"acme": ("email", "phone", *expected)}


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("sqlte", "no storage 'sqlte' is installed; did you mean 'sqlite'?"),
        (
            "oracle",
            "no storage 'oracle' is installed; install its plugin with pip, or name its"
            " file in plugins.files (installed: mongo, sqlite)",
        ),
    ],
)
def test_an_unknown_backend_is_an_error(config: Any, backend: str, said: str) -> None:
    chosen = config(f'[storage]\nbackend = "{backend}"')
    installed = registry(storage={"mongo": Events, "sqlite": Events})
    for call in (installed.check, installed.make_storage):
        with pytest.raises(ConfigError) as caught:
            call(chosen)
        assert str(caught.value) == f"{chosen.path}: storage.backend: {said}"


def test_a_registry_without_plugins_is_an_error(config: Any) -> None:
    with pytest.raises(SettingsError, match=r"no plugin is installed at all.*pip install -e \."):
        registry().check(config())


def test_options_are_checked_against_the_schema_of_the_plugin(config: Any) -> None:
    chosen = config(
        """
        [storage]
        backend = "s"
        [storage.s]
        moed = 1
        [storage.other]
        mode = "x"
        [storage.gone]
        [observers.o]
        mode = "${MODE}"
        [[transforms]]
        name = "t"
        options = { secret = 5 }
        [[transforms]]
        name = "u"
        """,
        '[workspaces.webhooks.w]\nsecret = ""\n[workspaces.webhooks.v]',
    )
    installed = registry(
        storage={"other": Events, "s": Events},
        transform={"t": dict},
        observer={"o": dict},
        webhook={"w": dict},
    )
    with pytest.raises(SettingsError) as caught:
        installed.check(chosen)
    lines = [line.removeprefix(f"{chosen.path}: ") for line in caught.value.problems]
    assert lines == [
        "storage.s.moed: unknown key; did you mean storage.s.mode?",
        'storage.other.mode: must be one of "fast", "safe" (it is "x")',
        "storage.gone: no storage 'gone' is installed; install its plugin with pip, or name its"
        " file in plugins.files (installed: other, s)",
        "transforms[0].options.secret: must be a string or a list, not an integer",
        "transforms[1].name: no transform 'u' is installed; install its plugin with pip, or name"
        " its file in plugins.files (installed: t)",
        'observers.o.mode: must be one of "fast", "safe" (it is "${MODE}")',
        "workspaces[0].webhooks.w.secret: must not be empty",
        "workspaces[0].webhooks.v: no webhook provider 'v' is installed; install its plugin with"
        " pip, or name its file in plugins.files (installed: w)",
    ]


def test_a_factory_gets_only_valid_options(config: Any) -> None:
    made: list[object] = []
    installed = registry(transform={"t": made.append})
    with pytest.raises(ConfigError, match="mode"):
        installed.make_transforms(config('[[transforms]]\nname = "t"\noptions = {mode = "x"}'))
    assert made == []


GROUP = '[[workspaces.subscription_groups]]\nid = "n"\nchannel = "c"\ntype = "opt_in"\n'
UNSUBSCRIBES = '[workspaces.unsubscribes.mailer]\naction = "channel"\n'
MAILER = "[workspaces.webhooks.mailer]\n" + UNSUBSCRIBES


@each(
    "workspace, problem",
    [
        (MAILER, None),
        (MAILER.replace('action = "channel"', ""), None),
        (UNSUBSCRIBES, "mailer: the workspace does not have [workspaces.webhooks.mailer]"),
        (
            UNSUBSCRIBES.replace("mailer", "maler"),
            "maler: no webhook provider 'maler' is installed; did you mean 'mailer'?",
        ),
        (MAILER.replace("mailer", "shop"), "shop: shop reports neither unsubscribes nor bounces"),
    ],
)
def test_unsubscribes_are_of_an_enabled_provider_that_reports_them(
    config: Any, workspace: str, problem: str | None
) -> None:
    installed = registry(
        storage={"whole": Whole}, webhook={"mailer": Mailer, "shop": lambda *_: Mailer()}
    )
    chosen = config('[storage]\nbackend = "whole"', workspace)
    if problem is None:
        installed.check(chosen)
        assert list(installed.make_webhooks(chosen)) == ["mailer"]
        return
    for call in (installed.check, installed.make_webhooks):
        with pytest.raises(ConfigError) as caught:
            call(chosen)
        assert str(caught.value) == f"{chosen.path}: workspaces[0].unsubscribes.{problem}"


def test_an_action_on_a_channel_without_groups_is_a_warning(config: Any) -> None:
    installed = registry(storage={"whole": Whole}, webhook={"mailer": Mailer})
    for channel, expected in (("sms", 0), ("Email", 1)):
        group = GROUP.replace('"c"', f'"{channel}"')
        found = installed.warnings(config("", group + MAILER))
        assert (
            found
            == [
                "workspaces[0].unsubscribes.mailer: no choice of a user changes, because no"
                " subscription group has the channel email or sms"
            ]
            * expected
        )


def test_removed_options_are_reported_and_not_passed_on(config: Any) -> None:
    installed = registry(transform={"t": dict}, storage={"mongo": Events})
    chosen = config('[[transforms]]\nname = "t"\noptions = {mode = "safe", speed = 3}')
    installed.check(chosen)
    made: list[object] = [*installed.make_transforms(chosen)]
    assert made == [("t", {"mode": "safe"})]
    assert installed.warnings(chosen) == [
        "transforms[0].options.speed has no effect: the transform measures it."
    ]


def test_transforms_keep_the_order_of_the_config(config: Any) -> None:
    installed = registry(
        transform={"a": lambda options: ("A", options), "b": lambda options: ("B", options)},
        observer={"o": lambda options: ("O", options)},
    )
    chosen = config(
        '[[transforms]]\nname = "b"\noptions = {mode = "fast"}\n[[transforms]]\nname = "a"\n'
        "[observers.o]\n"
    )
    made: list[object] = [*installed.make_transforms(chosen), *installed.make_observers(chosen)]
    assert made == [("b", ("B", {"mode": "fast"})), ("a", ("A", {})), ("o", ("O", {}))]


def _raises(error: Exception) -> Callable[..., Any]:
    def factory(*_: Any) -> Any:
        raise error

    return factory


def test_an_error_of_a_factory_names_the_place(config: Any) -> None:
    chosen = config('[storage]\nbackend = "s"')
    with pytest.raises(ConfigError) as caught:
        registry(storage={"s": _raises(ConfigError("url: no host"))}).make_storage(chosen)
    assert str(caught.value) == f"{chosen.path}: storage.s: url: no host"
    with pytest.raises(ConfigError) as caught:
        registry(storage={"s": _raises(ConfigError("mode: not: now"))}).make_storage(chosen)
    assert str(caught.value) == f"{chosen.path}: storage.s.mode: not: now"
    with pytest.raises(PluginError) as caught:
        registry(storage={"s": _raises(ModuleNotFoundError("No module\n named x"))}).make_storage(
            chosen
        )
    assert str(caught.value) == (
        "plugin \"p\" (distribution d 1.0): cannot make the storage 's': ModuleNotFoundError:"
        " No module named x"
    )
    with pytest.raises(PluginError, match="'s': TypeError: the factory returned None"):
        registry(storage={"s": lambda *_: None}).make_storage(chosen)
    with pytest.raises(StorageUnavailable):
        registry(storage={"s": _raises(StorageUnavailable("gone"))}).make_storage(chosen)


def test_the_text_of_a_factorys_error_has_no_secret(config: Any) -> None:
    chosen = config('[storage]\nbackend = "s"\n[storage.s]\nsecret = "hunter2"')
    with pytest.raises(PluginError) as caught:
        registry(storage={"s": _raises(ValueError("bad: hunter2"))}).make_storage(chosen)
    assert str(caught.value).endswith("ValueError: bad: ***")


def test_each_workspace_gets_its_providers(config: Any) -> None:
    class Made(tuple[Any, ...]):
        def credentials(self) -> list[bytes]:
            return [self[0].encode()]

    def make(options: Mapping[str, Any], context: Any) -> Made:
        return Made((options["secret"], context.workspace_id, context.public_url))

    installed = registry(webhook={"w": make})
    chosen = config(
        '[server]\npublic_url = "https://e.example/"',
        '[workspaces.webhooks.w]\nsecret = "1"\n'
        '[[workspaces]]\nid = "b"\n[workspaces.webhooks.w]\nsecret = "2"\n'
        '[[workspaces]]\nid = "c"\n',
    )
    made: object = installed.make_webhooks(chosen)
    assert made == {
        "w": {"acme": ("1", "acme", "https://e.example"), "b": ("2", "b", "https://e.example")}
    }
