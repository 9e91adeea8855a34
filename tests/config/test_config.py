# SPDX-License-Identifier: Apache-2.0
"""The config file, from TOML to dataclasses."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, cast

import jsonschema
import jsonschema_rs
import pytest

from engage.api import ConfigError
from engage.config import (
    Config,
    ConsoleConfig,
    Cors,
    Limits,
    LogConfig,
    Logging,
    Plugins,
    PreferencesPage,
    Quota,
    Rate,
    Retention,
    Selected,
    ServerConfig,
    StorageConfig,
    SubscriptionGroup,
    Unsubscribes,
    Workspace,
    WriteKey,
    config_schema,
    load,
)
from engage.config.schema_check import SettingsError
from engage.config.sections import default
from support.each import each

MINIMAL = '[[workspaces]]\nid = "acme"\n'
KEY = '[[workspaces.write_keys]]\nid = "a"\n'


UNSUBSCRIBES = """
[workspaces.unsubscribes.x]
action = "groups"
groups = { "7" = "news" }
[[workspaces.subscription_groups]]
id = "news"
channel = "email"
type = "opt_out"
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Write a config file and return its path."""

    def _write(text: str) -> Path:
        path = tmp_path / "engage.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def refused(path: Path, environ: dict[str, str] | None = None) -> list[str]:
    """Return the lines of the error for a config, without the name of the file."""
    with pytest.raises(SettingsError) as caught:
        load(path, environ or {})
    prefix = f"{path}: "
    assert all(line.startswith(prefix) for line in caught.value.problems)
    return [line.removeprefix(prefix) for line in caught.value.problems]


def test_a_short_config_has_the_defaults(write: Any) -> None:
    path = write(MINIMAL)
    assert load(path) == Config(
        path=path,
        base_dir=path.parent,
        workspaces=(Workspace(id="acme", name="acme"),),
        written={"workspaces": [{"id": "acme"}]},
    )
    assert load(path).storage.backend == "mongo"
    assert load(path).storage.options == {}


#: Each key of these sections has a value that is not its default.
SET: dict[str, Any] = {
    "server": ServerConfig(
        host="0.0.0.0",
        port=9000,
        workers=3,
        public_url="https://events.example.com/base",
        head_timeout=1,
        request_timeout=1.5,
        idle_timeout=5,
        max_connections=10,
        shutdown_grace=3,
        shutdown_delay=1,
        hang_timeout=3,
        metrics_host="::1",
        metrics_port=0,
        trusted_proxies=("10.0.0.0/8", "::1"),
    ),
    "console": ConsoleConfig(
        host="::",
        port=0,
        public_url="https://ops.example.com/engage",
        password="scrypt$15$8$3$c2FsdHNhbHRzYWx0$" + "A" * 43,
        allowed_hosts=("Ops.internal",),
        read_only=True,
    ),
    "cors": Cors(origins=("https://a.example", "http://localhost:3000")),
    "logging": Logging(level="warning", format="json"),
    "plugins": Plugins(files=("mine.py",)),
    "log": LogConfig(
        backend="queue",
        group="eu.main",
        loaders=3,
        load_host="0.0.0.0",
        load_port=9000,
    ),
}


def test_every_key_is_loaded(write: Any) -> None:
    lines = [f"{name} = {toml(changed(section))}\n" for name, section in SET.items()]
    config = load(write("".join(lines) + MINIMAL))
    for name, section in SET.items():
        assert getattr(config, name) == section
        unset = dataclasses.asdict(section).keys() - changed(section).keys()
        assert unset == NOT_KEYS.get(name, set())


def test_a_config_with_workspaces_and_plugins_is_loaded(write: Any) -> None:
    path = write("""
        [server]
        public_url = "https://events.example.com/base/"
        [storage]
        backend = "sqlite"
        write_timeout = 2
        [storage.sqlite]
        path = "x.db"
        [storage.mongo]
        url = "${URL}"
        [limits]
        body_bytes = 1000
        user_traits = 7
        [retention]
        events_days = 30
        dead_letters_days = 0
        [log.kafka]
        servers = "a"
        [log.queue]
        servers = "b"
        [[transforms]]
        name = "first"
        options = { keys = ["a"] }
        [[transforms]]
        name = "second"
        [observers.bell]
        loud = true
        [[workspaces]]
        id = "acme"
        name = "Acme"
        subscription_secret = ["new", "${OLD}"]
        subscription_identifiers = ["email"]
        keep_addresses = true
        [[workspaces.write_keys]]
        id = "website"
        key = "k1"
        [[workspaces.write_keys]]
        id = "old"
        key = "k2"
        disabled = true
        origins = ["https://a.example"]
        operations = ["track"]
        [[workspaces.write_keys]]
        id = "backend"
        kind = "server"
        sha256 = "${DIGEST}"
        [[workspaces.subscription_groups]]
        id = "news"
        name = "News"
        channel = "email"
        type = "opt_out"
        [workspaces.webhooks.sendgrid]
        verification_key = "x"
        [[workspaces]]
        id = "other"
        subscription_secret = "one"
        identity_secret = "two"
        verify_identity = "required"
        [cors]
        origins = ["https://a.example"]
    """)
    config = load(path, {"URL": "mongodb://u:p@h/", "OLD": "old", "DIGEST": "5E" * 32})
    assert config.server.public_url == "https://events.example.com/base"
    assert config.storage == StorageConfig(
        backend="sqlite",
        write_timeout=2,
        options={"path": "x.db"},
        tables={"sqlite": {"path": "x.db"}, "mongo": {"url": "mongodb://u:p@h/"}},
    )
    assert config.limits == Limits(body_bytes=1000, user_traits=7)
    assert config.retention == Retention(events_days=30, dead_letters_days=None)
    assert config.log is not None
    assert config.log.options == {"servers": "a"}
    assert config.log.tables == {"kafka": {"servers": "a"}, "queue": {"servers": "b"}}
    assert config.transforms == (
        Selected(name="first", options={"keys": ["a"]}),
        Selected(name="second"),
    )
    assert config.observers == (Selected(name="bell", options={"loud": True}),)
    acme, other = config.workspaces
    assert acme == Workspace(
        id="acme",
        name="Acme",
        subscription_secrets=("new", "old"),
        subscription_identifiers=("email",),
        keep_addresses=True,
        subscription_groups=(
            SubscriptionGroup(id="news", name="News", channel="email", type="opt_out"),
        ),
        write_keys=(
            WriteKey(id="website", key="k1"),
            WriteKey(
                id="old",
                key="k2",
                disabled=True,
                origins=("https://a.example",),
                operations=("track",),
            ),
            WriteKey(id="backend", kind="server", sha256="5e" * 32),
        ),
        webhooks={"sendgrid": {"verification_key": "x"}},
    )
    assert other == Workspace(
        id="other",
        name="other",
        subscription_secrets=("one",),
        identity_secrets=("two",),
        verify_identity="required",
    )


def test_what_providers_report_is_loaded(write: Any) -> None:
    [workspace] = load(write(MINIMAL + UNSUBSCRIBES)).workspaces
    assert workspace.unsubscribes == {"x": Unsubscribes(action="groups", groups={"7": "news"})}
    [workspace] = load(write(MINIMAL + "[workspaces.unsubscribes.x]")).workspaces
    assert workspace.unsubscribes == {"x": Unsubscribes(action="none", groups={})}


def test_a_log_needs_its_section(write: Any) -> None:
    assert load(write(MINIMAL)).log is None
    assert load(write("[log]\n" + MINIMAL)).log == LogConfig()


def test_removed_keys_are_read_and_reported(write: Any) -> None:
    """Whatever their values are."""
    text, expected = MINIMAL, []
    for name, schema in config_schema()["properties"].items():
        if removed := schema.get("x-removed"):
            text += f"[{name}]\n" + "".join(f"{key} = '${{UNSET}}'\n" for key in removed)
            expected += [f"{name}.{key} has no effect: {now}" for key, now in removed.items()]
    config = load(write(text), {})
    assert (config.cors, config.limits, config.log) == (Cors(), Limits(), LogConfig())
    assert list(config.warnings) == expected
    assert not load(write(MINIMAL)).warnings


def test_a_whole_float_is_an_integer(write: Any) -> None:
    port = load(write("[server]\nport = 8081.0\n" + MINIMAL)).server.port
    assert (port, type(port)) == (8081, int)


def test_a_byte_order_mark_and_crlf_are_accepted(write: Any) -> None:
    assert load(write("\ufeff" + MINIMAL.replace("\n", "\r\n"))).workspaces[0].id == "acme"


#: Lines of a config, and below them, indented, the problem that is reported.
WRONG = """
[[transforms]]
    transforms[0].name: is missing
workspaces = []
    workspaces: must not be empty
worksapces = []
    worksapces: unknown key; did you mean workspaces?
workspaces.id = "x"
    workspaces: must be a list, not a table; write [[workspaces]]
workspaces = [{id = "x", write_keys = {id = "a", key = "b"}}]
    workspaces[0].write_keys: must be a list, not a table; write [[workspaces.write_keys]]
workspaces = [{id = "-"}]
    workspaces[0].id: must be 1 to 64 letters, digits, - and _, and start with a letter or digit
    (it is "-")
workspaces = [{name = "x"}]
    workspaces[0].id: is missing
workspaces = [{id = "acme"}, {id = "acme"}]
    workspaces[1].id: is the same workspace id as workspaces[0].id; use a different one
workspaces = [{id = "a", identity_secret = "SECRET"}, {id = "b", identity_secret = "SECRET"}]
    workspaces[1].identity_secret[0]: is the same secret as workspaces[0].identity_secret[0]; use
    a different one
workspaces = [{id = "a", identity_secret = "SECRET"}, {id = "b", subscription_secret = "SECRET"}]
    workspaces[0].identity_secret[0]: is the same secret as workspaces[1].subscription_secret[0];
    use a different one
workspaces = [{id = "a", write_keys = [{id = "a", key = "SECRET"}]},
{id = "b", write_keys = [{id = "a", key = "SECRET"}]}]
    workspaces[1].write_keys[0].key: is the same write key as workspaces[0].write_keys[0].key; use
    a different one
port = 1
    port: unknown key; did you mean server.port?
server = 1979-05-27
    server: must be a table, not a date or time
server.prot = 1
    server.prot: unknown key; did you mean server.port?
server.port = 65536
    server.port: must be at most 65535 (it is 65536)
server.port = 8.5
    server.port: must be an integer, not a number
server.workers = 0
    server.workers: must be at least 1 (it is 0)
server.hang_timeout = 2.9
    server.hang_timeout: must be at least 3 (it is 2.9)
server.request_timeout = 0
    server.request_timeout: must be more than 0
server = {shutdown_grace = 5, shutdown_delay = 5}
    server.shutdown_delay: must be less than server.shutdown_grace, which includes it (5 >= 5)
server.public_url = "http://[::1"
    server.public_url: must name a host, and a port from 1 to 65535 if any
server.public_url = "events.example.com"
    server.public_url: must be a URL without a query, such as https://events.example.com
    (it is "events.example.com")
server.trusted_proxies = ["proxy.example.com"]
    server.trusted_proxies[0]: must be an IP address or a network, such as 10.0.0.0/8
    (it is "proxy.example.com")
server.trusted_proxies = ["10.0.0.1/8"]
    server.trusted_proxies[0]: 10.0.0.1/8 is an address within a network; write 10.0.0.0/8 for all
    of it
console.password = "secret"
    console.password: must be the line that `engage console-password` prints, not the password
    itself
console.public_url = "http://ops.example.com:99999/x"
    console.public_url: must name a host, and a port from 1 to 65535 if any
cors.origins = ["http://a:80", "http://a:0"]
    cors.origins[1]: must name a host, and a port from 1 to 65535 if any
cors.origins = ["https://a.example/path"]
    cors.origins[0]: must be "*" or an origin without a path, such as https://shop.example.com
    (it is "https://a.example/path")
storage.write_timeuot = 1
    storage.write_timeuot: is not the name of a plugin; did you mean storage.write_timeout?
storage.url = "mongodb://SECRET"
    storage.url: must be a table, not a string
log.loaders = 0
    log.loaders: must be at least 1 (it is 0)
log.loaders = 257
    log.loaders: must be at most 256 (it is 257)
log.load_prot = 50
    log.load_prot: is not the name of a plugin; did you mean log.load_port?
log.group = "a b"
    log.group: must consist of letters, digits, ., - and _, and start with a letter or digit
    (it is "a b")
limits.body_bytes = 0
    limits.body_bytes: must be at least 1 (it is 0)
limits.rate.events_per_second = 1e-320
    limits.rate.events_per_second: must be 0 or at least 0.000001
limits.rate.burst = 5
    limits.rate.burst: has no effect without events_per_second
"""

#: The same for lines of the first workspace.
WRONG_WORKSPACE = """
subscription_secret = ""
    subscription_secret: must not be empty
subscription_secret = []
    subscription_secret: must not be empty
subscription_secret = ["SECRET", ""]
    subscription_secret[1]: must not be empty
subscription_secret = ["SECRET", "SECRET"]
    subscription_secret[1]: is the same secret as workspaces[0].subscription_secret[0]; use a
    different one
verify_identity = "required"
    identity_secret: is missing; verify_identity needs it
verify_identity = "on"
    verify_identity: must be one of "off", "required" (it is "on")
identity_secret = [""]
    identity_secret[0]: must not be empty
identity_secret = ["SECRET", "SECRET"]
    identity_secret[1]: is the same secret as workspaces[0].identity_secret[0]; use a different one
unsubscribes.x.action = "all"
    unsubscribes.x.action: must be one of "none", "channel", "groups" (it is "all")
unsubscribes.x.action = "groups"
    unsubscribes.x.groups: is missing; action = "groups" needs it
unsubscribes.x = {action = "channel", groups = {"7" = "news"}}
subscription_groups = [{id = "news", channel = "email", type = "opt_out"}]
    unsubscribes.x.groups: has no effect unless action = "groups"
unsubscribes.x = {action = "groups", groups = {"7" = "nwes"}}
subscription_groups = [{id = "news", channel = "email", type = "opt_out"}]
    unsubscribes.x.groups."7": there is no subscription group "nwes" in the workspace
write_keys = [{id = "a", key = "1", name = "of a key"}]
    write_keys[0].name: unknown key; the valid keys here: id, key, sha256, kind, origins,
    operations, rate, disabled
write_keys = [{id = "a", key = "1"}, {id = "a", key = "2"}]
    write_keys[1].id: is the same id as workspaces[0].write_keys[0].id; use a different one
write_keys = [{id = "a", key = "SECRET:"}]
    write_keys[0].key: must be visible ASCII characters, without a colon
write_keys = [{id = "a", key = "${SECRET_KEY}"}]
    write_keys[0].key: the environment variable SECRET_KEY is not set
write_keys = [{id = "a"}]
    write_keys[0].key: is missing
write_keys = [
{id = "a", sha256 = "5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E5E"}]
    write_keys[0].sha256: only a key with kind = "server" has it
write_keys = [{id = "a", kind = "server", key = "SECRET"}]
    write_keys[0].key: a server key is a secret; write its sha256 instead
write_keys = [{id = "a", kind = "server"}]
    write_keys[0].sha256: is missing
write_keys = [{id = "a", kind = "server", sha256 = "SECRET"}]
    write_keys[0].sha256: must be the SHA-256 of the key: 64 hexadecimal digits
write_keys = [{id = "a", key = "SECRET"},
{id="b", kind="server", sha256="0917B13A9091915D54B6336F45909539CCE452B3661B21F386418A257883B30A"}]
    write_keys[1].sha256: is the same write key as workspaces[0].write_keys[0].key; use a different
    one
write_keys = [{id = "a", key = "1", origins = ["*"]}]
    write_keys[0].origins[0]: must be an origin without a path or wildcard, such as
    https://shop.example.com (it is "*")
write_keys = [{id = "a", key = "1", origins = ["https://a.example:"]}]
    write_keys[0].origins[0]: must be an origin without a path or wildcard, such as
    https://shop.example.com (it is "https://a.example:")
write_keys = [{id = "a", key = "1", origins = ["https://a.example:443"]}]
    write_keys[0].origins[0]: leave out the port, as browsers do
write_keys = [{id = "a", key = "1", origins = ["https://a.example"]}]
[cors]
origins = ["https://b.example"]
    write_keys[0].origins[0]: add it to cors.origins too, or browsers send nothing
write_keys = [{id = "a", key = "1", rate = {burst = 5}}]
    write_keys[0].rate.burst: has no effect without events_per_second
write_keys = [{id = "a", key = "1", operations = ["batch"]}]
    write_keys[0].operations[0]: must be one of "identify", "track", "page", "screen", "group",
    "alias" (it is "batch")
subscription_groups = [{id = "n", channel = "c", type = "opt_in"},
{id = "n", channel = "c", type = "opt_in"}]
    subscription_groups[1].id: is the same id as workspaces[0].subscription_groups[0].id; use a
    different one
subscription_groups = [{id = "n", channel = "c", type = "opt_in", name = {German = "Neues"}}]
    subscription_groups[0].name.German: must be the code of a language, such as de or pt-BR
preferences_page.color = "#777777"
    preferences_page.color: its contrast to white is 4.48:1; use a darker colour, of at least 4.5:1
preferences_page.imprint = "javascript:alert(1)"
    preferences_page.imprint: must be a URL that begins with https:// or http://
    (it is "javascript:alert(1)")
preferences_page.privacy = "https://a.example:0/"
    preferences_page.privacy: must name a host, and a port from 1 to 65535 if any
[workspaces.webhooks.Bad]
    webhooks.Bad: is not the name of a plugin
"""


def examples(text: str) -> list[tuple[str, str]]:
    """Return each config and its problem."""
    pairs = re.findall(r"((?:^\S.*\n)+)((?:^    .*\n)+)", text, re.MULTILINE)
    return [(config, " ".join(problem.split())) for config, problem in pairs]


@each(
    "text, line",
    [
        ("", "workspaces: is missing; write [[workspaces]]"),
        *(
            (text if "workspaces" in text else text + MINIMAL, line)
            for text, line in examples(WRONG)
        ),
        *((MINIMAL + text, f"workspaces[0].{line}") for text, line in examples(WRONG_WORKSPACE)),
    ],
)
def test_a_wrong_config_is_refused(write: Any, text: str, line: str) -> None:
    reported = refused(write(text))
    assert line in reported
    assert "SECRET" not in "".join(reported).replace("SECRET_KEY", "")


def test_a_colour_of_just_enough_contrast_is_accepted(write: Any) -> None:
    text = MINIMAL + '[workspaces.preferences_page]\ncolor = "#767676"\none_click = "channel"\n'
    page = load(write(text)).workspaces[0].preferences_page
    assert page == PreferencesPage(color="#767676", one_click="channel")


@each(
    "name, default",
    [
        ('{ de = "Neues", en = "News" }', "News"),
        ('{ fr = "Nouvelles", de = "Neues" }', "Nouvelles"),
    ],
)
def test_a_group_may_have_a_name_in_each_language(write: Any, name: str, default: str) -> None:
    group = '[[workspaces.subscription_groups]]\nid = "n"\nchannel = "c"\ntype = "opt_in"\n'
    [found] = load(write(f"{MINIMAL}{group}name = {name}\n")).workspaces[0].subscription_groups
    assert (found.name, found.names["de"]) == (default, "Neues")


def test_a_limit_is_at_most_one_that_includes_it(write: Any) -> None:
    for small, large in (
        ("event_bytes", "decompressed_bytes"),
        ("event_bytes", "queue_bytes"),
        ("body_bytes", "inflight_bytes"),
        ("batch_events", "queue_events"),
    ):
        text = f"{MINIMAL}[limits]\n{large} = 1000\n{small} = "
        assert load(write(f"{text}1000"))
        line = f"limits.{small}: must be at most limits.{large} (1001 > 1000)"
        assert refused(write(f"{text}1001")) == [line]


def test_an_empty_secret_from_the_environment_is_refused(write: Any) -> None:
    path = write(MINIMAL + 'subscription_secret = "${S}"')
    assert refused(path, {"S": ""}) == [
        "workspaces[0].subscription_secret: the environment variable S is empty"
    ]
    assert refused(path, {"S": " "}) == ["workspaces[0].subscription_secret: must not be empty"]


def test_all_problems_are_reported_at_once(write: Any) -> None:
    path = write("[server]\nport = -1\nhots = 1\n[[workspaces]]\n")
    with pytest.raises(SettingsError, match=r"\(and 2 more\)$"):
        load(path)
    assert len(refused(path)) == 3


@each(
    "data, message",
    [
        (b"[server\n", "is not valid TOML: Expected ']'"),
        (b"a = 1\na = 2\n", "is not valid TOML: Cannot overwrite a value"),
        (b"\xff\xfea\0", "is not UTF-8 text (at byte 0)"),
        (b"a = " + b"[" * 100_000, "is not valid TOML: "),
    ],
)
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path} {message}")
    assert "\n" not in str(caught.value)


@each(
    "text, end",
    [
        ("[server]\nport = SECRET\n", "(at line 2, column 8): port = …; write a text in quotation"),
        ('a = 1\n  b."c" = SECRET\n', "column 11); write a text in quotation marks"),
        ('[server]\nhost = "SECRET\nport = 1\n', "column 15): host = …; end a text with a"),
        ('x = [\n  "SECRET,\n]\n', "(at line 2, column 11); end a text with a"),
        ('path = "C:\\qSECRET"\n', ": path = …; write a text with backslashes in single"),
        ("[a]\n[a] # SECRET\n", "column 3): [a]; the table is there twice; write [[name]]"),
        ("a=1\na=2 # SECRET\n", "Cannot overwrite a value (at line 2, column 4): a= …; the key"),
        ("a = 1 SECRET = 2\n", "after a statement (at line 1, column 7): a = …; write each key in"),
    ],
)
def test_an_error_of_toml_shows_its_key_and_no_value(write: Any, text: str, end: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    assert end in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_a_missing_file_is_one_error(write: Any) -> None:
    path = write(
        MINIMAL + '[[workspaces.write_keys]]\nid = "a"\nkey = "${file:nowhere}"\n'
        '[[workspaces.write_keys]]\nid = "b"\nkey = "${NOT_SET}"\nkeys = 1\n'
    )
    first, second, third = refused(path)
    assert first.startswith("workspaces[0].write_keys[0].key: the file nowhere cannot be read")
    assert second == "workspaces[0].write_keys[1].key: the environment variable NOT_SET is not set"
    assert third.startswith("workspaces[0].write_keys[1].keys: unknown key")


def test_no_secret_is_in_a_repr(write: Any) -> None:
    path = write(
        MINIMAL
        + 'subscription_secret = "SECRET"\n[[workspaces.write_keys]]\nid = "a"\nkey = "SECRET"\n'
        + '[workspaces.webhooks.x]\nkey = "SECRET"\n[storage.mongo]\nurl = "SECRET"\n'
        + '[log.kafka]\npassword = "SECRET"\n'
        + '[observers.o]\nkey = "SECRET"\n[[transforms]]\nname = "t"\noptions = {k = "SECRET"}\n'
    )
    assert "SECRET" not in repr(load(path))


# ------------------------------------------------------------------------- the schema and the code
SECTIONS = {
    "server": ServerConfig,
    "console": ConsoleConfig,
    "storage": StorageConfig,
    "log": LogConfig,
    "limits": Limits,
    "limits.rate": Rate,
    "limits.quota": Quota,
    "retention": Retention,
    "cors": Cors,
    "logging": Logging,
    "plugins": Plugins,
}
NOT_KEYS = {"storage": {"options", "tables"}, "log": {"options", "tables"}}


def properties_of(section: str) -> dict[str, Any]:
    schema = config_schema()
    for name in section.split("."):
        schema = schema["properties"][name]
        if "$ref" in schema:
            schema = config_schema()["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return cast("dict[str, Any]", schema["properties"])


@each("section", SECTIONS)
def test_the_schema_and_the_dataclasses_have_the_same_keys_and_defaults(section: str) -> None:
    properties = properties_of(section)
    made = SECTIONS[section]()
    fields = {field.name for field in dataclasses.fields(made)} - NOT_KEYS.get(section, set())
    assert set(properties) == fields
    for name, schema in properties.items():
        if f"{section}.{name}" in SECTIONS:
            continue
        assert getattr(made, name) == default(f"{section}.{name}")
        if "default" in schema:
            jsonschema.validate(schema["default"], {"$defs": config_schema()["$defs"], **schema})


def test_the_schema_of_workspaces_has_the_fields_of_the_dataclasses() -> None:
    workspace = config_schema()["properties"]["workspaces"]["items"]["properties"]
    fields = {field.name for field in dataclasses.fields(Workspace)}
    assert {key.replace("secret", "secrets") for key in workspace} == fields
    for key, cls, inner in (
        ("write_keys", WriteKey, "items"),
        ("subscription_groups", SubscriptionGroup, "items"),
        ("unsubscribes", Unsubscribes, "additionalProperties"),
    ):
        # The names of a group are its `name`, if that is a table.
        assert set(workspace[key][inner]["properties"]) == {
            field.name for field in dataclasses.fields(cls) if field.name != "names"
        }
    page = workspace["preferences_page"]["properties"]
    assert set(page) == {field.name for field in dataclasses.fields(PreferencesPage)}
    for name, schema in page.items():
        if "default" in schema:
            assert getattr(PreferencesPage(), name) == schema["default"]


def test_the_examples_of_the_schema_are_valid_and_load(tmp_path: Path) -> None:
    schema = config_schema()
    for number, example in enumerate(schema["examples"]):
        jsonschema.validate(example, schema, cls=jsonschema.Draft202012Validator)
        assert jsonschema_rs.is_valid(schema, example)
        path = tmp_path / f"{number}.toml"
        # JSON strings, numbers and arrays are valid TOML; inline tables differ only in the colon.
        lines = [f"{key} = {toml(value)}" for key, value in example.items()]
        path.write_text("\n".join(lines))
        assert load(path).workspaces[0].write_keys[0].key == "3b1c"


def changed(section: Any) -> dict[str, Any]:
    """Return what differs from the defaults of a section."""
    defaults = dataclasses.asdict(type(section)())
    return {k: v for k, v in dataclasses.asdict(section).items() if v != defaults[k]}


def toml(value: Any) -> str:
    """Return a value as inline TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def test_a_problem_has_the_ids_of_what_its_key_counts(tmp_path: Path) -> None:
    """From the third on: with ten workspaces, one would have to count."""
    path = tmp_path / "engage.toml"
    workspaces = [f'[[workspaces]]\nid = "w{n}"\n' for n in range(4)]
    workspaces[1] += "name = 1\n"
    workspaces[3] += 'name = ""\n'
    keys = [f'[[workspaces.write_keys]]\nid = "k{n}"\nkey = "a{n}"\n' for n in range(3)]
    path.write_text("".join([*workspaces, *keys, "kind = 1\n"]))
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert [line.removeprefix(f"{path}: ") for line in caught.value.problems] == [
        "workspaces[1].name: must be a string, not an integer",
        "workspaces[3].name: must not be empty (of w3)",
        'workspaces[3].write_keys[2].kind: must be one of "public", "server" (it is 1) (of w3, k2)',
    ]
