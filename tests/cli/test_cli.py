# SPDX-License-Identifier: Apache-2.0
"""The command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import re
import shlex
import socket
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import engage
import engage.server.serve
from engage.api import Event, EventFilter, StorageUnavailable
from engage.cli.output import safe
from engage.config import Config, load
from engage.registry import Registered, Registry
from engage.registry.discovery import Discovered
from engage.testing.factories import event, identify, letter
from engage_plugins.sqlite.store import SqliteStorage
from support.commands import run
from support.distributions import distribution
from support.each import each
from support.exports import on_store, registry
from support.sqlite import ONE_NAMESPACE, config_file

COMMANDS = [
    *("check", "console", "console-link", "console-logout", "console-password"),
    *("copy", "dead-letters check", "dead-letters replay", "export", "init", "load", "plugins"),
    *("serve", "subscription-link", "suppressions list", "suppressions remove", "tail"),
    *("users remove-trait", "users show"),
    *("webhook-retry", "webhook-test", "webhook-url"),
]


def fails(result: Result, line: str, *, status: int = 1) -> None:
    """Check that a command failed with this one line and nothing else."""
    assert (result.exit_code, result.stderr, result.stdout) == (status, f"engage: {line}\n", "")


def process(*arguments: object, path: Sequence[Path] = (), **options: Any) -> Any:
    """Run ``engage`` in a separate process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-m", "engage", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=False,
        **options,
    )


def fill(path: Path, *events: Event) -> None:
    """Write events and a dead letter into the store of a config."""

    async def write(store: Any) -> None:
        await store.write(events)
        await store.put([letter("d1")])

    on_store(path, write)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Make a config whose store has five events."""
    path = config_file(tmp_path)
    fill(
        path,
        identify("m1", "ann", 1, traits={"plan": "pro"}),
        event("m2", user_id="ann", at=2),
        event("m3", user_id="bob", at=3),
        event("m4", user_id="bob", workspace="other", at=4),
        event("m5", type="group", user_id="ann", groupId="g", at=5),
    )
    return path


# ---------------------------------------------------------------------------------------- general
@each("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Example:\n    engage {command}" in result.stdout
    if command not in ("copy", "console-password"):
        assert "--config" in result.stdout
        assert "ENGAGE_CONFIG" in result.stdout


def test_help_and_version_are_printed() -> None:
    result = run("--help")
    assert result.exit_code == 0
    groups = re.findall(r"^(\S.*):\n((?:  .*\n)+)", result.stdout, re.MULTILINE)
    titles = [title for title, _ in groups]
    assert titles == ["Options", "Set up and run", "Events and users", "Keys, webhooks and sign-in"]
    for command in COMMANDS:
        assert sum(f"  {command.split()[0]} " in lines for _, lines in groups) == 1
    assert "..." not in str(groups), "a summary that was cut"
    # CliRunner's terminal has 80 columns: a summary that is too long goes on in the next line.
    assert not re.search(r"^ {5}", "".join(lines for _, lines in groups[1:]), re.MULTILINE)
    assert run("--version").stdout == f"engage, version {engage.__version__}\n"


def test_the_summaries_of_a_group_are_whole() -> None:
    for group in ("dead-letters", "keys", "users"):
        commands = run(group, "--help").stdout.partition("\nCommands:\n")[2]
        assert commands
        assert "..." not in commands


@each(
    "arguments",
    [
        *(("nothing",), ("export",), ("export", "stars"), ("export", "events", "--limit", "0")),
        *(("export", "events", "--since", "yesterday"), ("export", "events", "--type", "event")),
        *(("export", "users", "--type", "track"), ("export", "groups", "--user", "ann")),
        ("export", "groups", "--since", "2026-01-01"),
        ("export", "suppressions", "--user", "ann"),
        *(("export", "subscription-history", "--format", "csv"), ("serve", "--port", "65536")),
        *(("serve", "--workers", "0"), ("check", "--nothing"), ("copy", "--from", "a.toml")),
        ("users", "remove-trait", "--workspace", "acme", "ann"),
        ("copy", "--from", "a.toml", "--to", "./a.toml"),
    ],
)
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert result.stdout == ""


def test_a_missing_config_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    for command in ("check", "serve", "export events"):
        result = run(*command.split(), "--config", path)
        fails(result, f"{path} does not exist; run `engage init` to create it")


def test_the_config_may_come_from_the_environment(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGAGE_CONFIG", str(stored))
    assert run("export", "events", "--limit", "1").exit_code == 0


def test_each_problem_of_a_config_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "engage.toml"
    path.write_text('prot = 1\n[logging]\nlevel = "x"\n')
    for command in ("check", "serve", "export events"):
        result = run(*command.split(), "--config", path)
        assert result.exit_code == 1
        keys = [line.split(": ")[2] for line in result.stderr.splitlines()]
        assert keys == ["prot", "workspaces", "logging.level"]


def test_only_serve_creates_a_store(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    for command in ("check", "export events", "export users"):
        result = run(*command.split(), "--config", path)
        assert "there is no store; `engage serve` creates one" in result.output
        assert list(tmp_path.iterdir()) == [path]


def test_control_characters_are_escaped() -> None:
    assert safe('a\x1b[31m\x07\x7f\x9b é€ "ü" \u202e\u2066\u200b\u2028\ufeff\U000e0041') == (
        r'a\u001b[31m\u0007\u007f\u009b é€ "ü" \u202e\u2066\u200b\u2028\ufeff\udb40\udc41'
    )
    text = json.dumps("\x80\u202e\U000e0041", ensure_ascii=False)
    assert json.loads(safe(text)) == json.loads(text)


def test_joiners_stay_where_they_belong_to_the_spelling() -> None:
    for text in ("می\u200cخواهم", "क्\u200dष", "👩\u200d👩\u200d👧", "❤\ufe0f\u200d🔥"):
        assert safe(text) == text
    assert safe("ann\u200d ann\u200c") == r"ann\u200d ann\u200c"
    assert safe("ж\u200d") == r"ж\u200d"
    assert safe("👩\u200d\u200d") == "👩\u200d" + r"\u200d"


# ------------------------------------------------------------------------------------------- init
def test_init_makes_a_config_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("init")
    assert (result.exit_code, result.stderr) == (0, "")
    config = load("engage.toml")
    assert config.storage.backend == "sqlite"
    (workspace,) = config.workspaces
    (key,) = workspace.write_keys
    assert re.fullmatch(r"[0-9a-f]{32}", key.key)
    assert [path.name for path in tmp_path.iterdir()] == ["engage.toml"]
    assert stat.S_IMODE(Path("engage.toml").stat().st_mode) == 0o600
    assert run("check").exit_code == 0

    (curl,) = re.findall(r"^  (curl .*)$", result.stdout, re.MULTILINE)
    arguments = shlex.split(curl)
    assert arguments[1:3] == ["-u", f"{key.key}:"]
    assert json.loads(arguments[arguments.index("-d") + 1]) == {
        "userId": "ann",
        "event": "Signed Up",
    }
    assert arguments[-1] == "http://127.0.0.1:8080/api/public/apps/track"
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8080)


def test_init_makes_a_config_elsewhere_and_new_keys_each_time(tmp_path: Path) -> None:
    keys = []
    for name in ("a/b", "c"):
        result = run("init", tmp_path / name)
        assert result.exit_code == 0
        assert f"serve --config {tmp_path / name}/engage.toml" in result.stdout
        keys.append(load(tmp_path / name / "engage.toml").workspaces[0].write_keys[0].key)
    assert keys[0] != keys[1]
    named = tmp_path / "named.toml"
    assert run("init", "--config", named).exit_code == 0
    assert load(named)


@pytest.mark.parametrize("name", ["engage.db", 'a "b" \\c ü.db'])
def test_init_puts_the_store_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Relative to the working directory, as every path of a command; the config has it whole."""
    (tmp_path / "var").mkdir()
    monkeypatch.chdir(tmp_path / "var")
    assert run("init", tmp_path / "etc", "--store", name).exit_code == 0
    path = load(tmp_path / "etc/engage.toml").storage.options["path"]
    assert path == str(tmp_path / "var" / name)


def test_init_prints_how_to_call_engage_when_it_is_not_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / ".venv/bin/engage")])
    monkeypatch.setenv("PATH", "/nowhere")
    assert "\n  .venv/bin/engage serve\n" in run("init").stdout


@pytest.mark.checkout
def test_make_run_starts_the_server_without_telling_how(tmp_path: Path) -> None:
    """The second time, there is a config."""
    makefile = Path(__file__).parents[2] / "Makefile"
    venv, config = tmp_path / "venv", tmp_path / "engage.toml"
    (venv / "bin").mkdir(parents=True)
    program = venv / "bin/engage"
    program.write_text(
        f'#!/bin/sh\n[ $1 = serve ] && echo serves && exit\nexec {sys.executable} -m engage "$@"\n'
    )
    program.chmod(0o755)
    (venv / ".run").touch()
    command = ["make", "-s", "-f", str(makefile), "run", f"VENV={venv}", f"CONFIG={config}"]
    starts = "\nStarting the server.\n\nserves\n"
    for created in (True, False):
        done = subprocess.run(command, cwd=makefile.parent, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        before, _, after = done.stdout.partition(starts)
        assert after == ""
        assert ("curl" in before) == created
        assert "engage serve" not in before
        assert config.exists()


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "engage.toml"
    path.write_text("mine")
    fails(run("init", tmp_path), f"{path} already exists; nothing was changed")
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_init_reports_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("init", tmp_path / "file" / "x")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


# ----------------------------------------------------------------------------------------- serve
def test_serve_hands_over_and_returns_the_status(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Config] = []

    def serve(config: Config, registry: Any) -> int:
        assert "sqlite" in registry.storages
        calls.append(config)
        return 7

    monkeypatch.setattr(engage.server.serve, "serve", serve)
    assert run("serve", "--config", stored).exit_code == 7
    arguments = ["--host", "::1", "--port", "0", "--workers", "4"]
    assert run("serve", "--config", stored, *arguments).exit_code == 7
    assert [(c.server.host, c.server.port, c.server.workers) for c in calls] == [
        ("127.0.0.1", 8080, 1),
        ("::1", 0, 4),
    ]


def test_serve_starts_nothing_when_a_plugin_option_is_wrong(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engage.server.serve, "serve", lambda *_: pytest.fail("started"))
    stored.write_text(stored.read_text().replace("min_free_bytes", "min_fre_bytes"))
    fails(
        run("serve", "--config", stored),
        f"{stored}: storage.sqlite.min_fre_bytes: unknown key; did you mean"
        " storage.sqlite.min_free_bytes?",
    )


# ----------------------------------------------------------------------------------------- check
def test_check_reports_a_config_that_works(stored: Path) -> None:
    result = run("check", "--config", stored)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    names = ["config", "workspace", "workspace", "erasures", "plugins", "storage"]
    assert [line[0] for line in lines] == names
    assert lines[1][1] == "acme: 1 write key, 1 subscription group"
    assert lines[3][1].startswith("people cannot be erased: the config has no key for erasures")
    assert lines[5][1].startswith("sqlite: open, accepts events; SQLite 3.")


def test_check_shows_a_budget_of_dead_letters_that_is_nearly_full(stored: Path) -> None:
    text = stored.read_text()
    stored.write_text(f"{text}[limits]\ndead_letter_count = 2\n")
    assert "\nbudget\t" not in run("check", "--config", stored).stdout
    stored.write_text(f"{text}[limits]\ndead_letter_count = 1\n")
    result = run("check", "--config", stored)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == (
        "budget\tacme: refused items (limits.dead_letter_count, limits.dead_letter_bytes) use 1 of "
        "1 letters and 0 of 64 MiB; no more are kept"
    )


def odd_paths(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield paths that are not a config file, and what is wrong with them."""
    file = folder / "large"
    with file.open("wb") as large:
        large.truncate(1024 * 1024 + 1)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(folder / "socket"))
    sock.close()
    loop = folder / "loop"
    loop.symlink_to(loop)
    yield "/dev/zero", "is larger than 1024 KiB"
    yield str(file), "is larger than 1024 KiB"
    yield "/dev/null", "workspaces: is missing"
    yield str(folder / "socket"), "cannot be read: No such device or address"
    yield str(loop), "cannot be read: Too many levels of symbolic links"
    yield "/proc/self/mem", "cannot be read: Input/output error"
    yield str(folder), "cannot be read: Is a directory"
    yield f"{file}/x", "cannot be read: Not a directory"
    yield "x" * 5000, "cannot be read: File name too long"


def test_an_odd_config_path_is_one_line(tmp_path: Path) -> None:
    """The size that is read is bounded, and whatever the path names, the answer is one line."""
    for path, problem in odd_paths(tmp_path):
        result = run("check", "--config", path)
        assert result.exit_code == 1, path
        assert result.exception is None or isinstance(result.exception, SystemExit), path
        assert result.stderr.count("\n") == 1, path
        assert problem in result.stderr, path


@each(
    "text",
    ["a = 1" + "0" * 5000, "[[workspaces]]\nid = 1979-99-99", "a = 1e999999\n" * 2, "a=" * 9],
)
def test_an_odd_config_is_a_few_lines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "engage.toml"
    path.write_text(text)
    result = run("check", "--config", path)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith(f"engage: {path}")


def test_a_config_can_come_from_a_pipe(stored: Path) -> None:
    fifo = stored.parent / "fifo"
    os.mkfifo(fifo)
    text = stored.read_text()
    # More than a pipe holds, in two parts.
    padding = "# padding\n" * 20_000
    with subprocess.Popen(
        ["sh", "-c", f"cat >{fifo}; true"], stdin=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        feeder = threading.Thread(target=lambda: writer.communicate(padding + text))
        feeder.start()
        result = run("check", "--config", fifo)
        feeder.join()
    assert (result.exit_code, result.stderr) == (0, "")


def test_check_shows_no_secret(stored: Path) -> None:
    stored.write_text(stored.read_text() + 'subscription_secret = "HIDDEN"\n')
    result = run("check", "--config", stored)
    assert result.exit_code == 0
    assert "HIDDEN" not in result.output
    assert "k-acme" not in result.output


def test_check_works_before_the_first_start(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    result = run("check", "--config", path)
    assert (result.exit_code, result.stderr) == (0, "")
    missing = f"{tmp_path / 'engage.db'}: there is no store; `engage serve` creates one"
    assert result.stdout.endswith(f"storage\tsqlite: {missing}\n")
    (tmp_path / "engage.db-wal").write_bytes(b"log")
    result = run("check", "--config", path)
    assert result.exit_code == 1
    assert "contains acknowledged events" in result.stderr


def test_check_works_before_the_first_start_of_a_new_version(stored: Path) -> None:
    with contextlib.closing(sqlite3.connect(stored.with_name("engage.db"))) as db:
        db.executescript(f"BEGIN; {ONE_NAMESPACE} COMMIT;")
    result = run("check", "--config", stored)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "start `engage serve` once, which brings the store up to date" in result.stdout
    assert run("export", "users", "--config", stored).exit_code == 1


@pytest.mark.parametrize(
    ("hosts", "ports", "key"),
    [
        (("127.0.0.1", "127.0.0.1", "127.0.0.1"), (8080, 8080, 9000), "server.metrics_port"),
        (("127.0.0.1", "127.0.0.1", "0.0.0.0"), (8080, 8081, 8080), "console.port"),
        (("0.0.0.0", "127.0.0.1", "localhost"), (8080, 9000, 8080), "console.port"),
        (("127.0.0.1", "127.0.0.1", "::"), (8080, 9000, 9000), "console.port"),
        (("127.0.0.1", "127.0.0.2", "127.0.0.3"), (8080, 8080, 8080), None),
        (("127.0.0.1", "0.0.0.0", "::"), (0, 0, 0), None),
    ],
)
def test_check_finds_two_listeners_on_one_port(
    tmp_path: Path, hosts: tuple[str, ...], ports: tuple[int, ...], key: str | None
) -> None:
    path = config_file(tmp_path)
    tables = (
        f'[server]\nhost = "{hosts[0]}"\nport = {ports[0]}\n'
        f'metrics_host = "{hosts[1]}"\nmetrics_port = {ports[1]}\n'
        f'[console]\nhost = "{hosts[2]}"\nport = {ports[2]}\n'
    )
    path.write_text(tables + path.read_text("utf-8"), encoding="utf-8")
    result = run("check", "--config", path)
    if key is None:
        assert (result.exit_code, result.stderr) == (0, "")
        assert "port" not in result.stdout
    else:
        assert result.exit_code == 1
        assert f"engage.toml: {key}: is the same port as server." in result.stderr


def test_check_warns_of_a_host_of_another_machine(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    text = path.read_text("utf-8")
    for host in ("192.0.2.1", "nowhere.invalid"):
        path.write_text(f'[server]\nhost = "{host}"\n{text}', encoding="utf-8")
        result = run("check", "--config", path)
        assert result.exit_code == 0
        line = f"warning\tserver.host: '{host}' is not an address of this machine\n"
        assert line in result.stdout


def test_check_succeeds_while_the_ports_are_in_use(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tables = f'[server]\nhost = "127.0.0.1"\nport = {port}\n'
        path.write_text(tables + path.read_text("utf-8"), encoding="utf-8")
        result = run("check", "--config", path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "warning" not in result.stdout


def test_check_reports_a_storage_that_fails(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    (tmp_path / "engage.db").mkdir()
    result = run("check", "--config", path)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    path.write_text(path.read_text().replace('path = "', 'path = "away/'))
    result = run("check", "--config", path)
    assert result.exit_code == 1
    assert result.stderr.endswith("away does not exist; create it\n")


# --------------------------------------------------------------------------------------- plugins
def test_plugins_lists_what_is_installed_and_used(stored: Path) -> None:
    result = run("plugins", "--config", stored)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    version = f"engage-server {engage.__version__}"
    assert ["storage", "sqlite", "sqlite", version, "used"] in rows
    assert ["storage", "mongo", "mongo", version, "-"] in rows


def test_plugins_lists_logs(stored: Path) -> None:
    log = Registered(name="queue", factory=object, schema={}, plugin="q", distribution="queue 1.0")
    tables = {**registry().tables, "log": {"queue": log, "tape": log}}
    plugins = Registry(Discovered(plugins=(), tables=tables, commands={}, command_plugins={}))
    stored.write_text('[log]\nbackend = "queue"\n' + stored.read_text())
    rows = run("plugins", "--config", stored, plugins=plugins).stdout.splitlines()
    assert "log\tqueue\tq\tqueue 1.0\tused" in rows
    assert "log\ttape\tq\tqueue 1.0\t-" in rows


def test_check_finds_a_log_that_is_not_installed(stored: Path) -> None:
    stored.write_text('[log]\nbackend = "tape"\n' + stored.read_text())
    result = run("check", "--config", stored)
    assert result.exit_code == 1
    assert f"{stored}: log.backend: no log 'tape' is installed" in result.stderr


def test_a_plugin_may_be_a_file_beside_the_config(stored: Path) -> None:
    (stored.parent / "drop.py").write_text(textwrap.dedent(DROP), "utf-8")
    stored.write_text(
        '[plugins]\nfiles = ["drop.py"]\n[[transforms]]\nname = "drop"\n' + stored.read_text()
    )
    path = stored.parent / "drop.py"
    rows = run("plugins", "--config", stored).stdout.splitlines()
    assert f"transform\tdrop\tdrop.py\t{path}\tused" in rows
    result = run("check", "--config", stored)
    assert result.exit_code == 0
    assert re.search(r"^plugins\t\d+ plugins installed, drop[.]py$", result.stdout, re.MULTILINE)
    path.write_text("import")
    result = run("check", "--config", stored)
    assert result.exit_code == 1
    assert re.match(
        rf"engage: plugin file {re.escape(str(path))}: cannot be imported: SyntaxError: .*line 1",
        result.stderr,
    )


def test_plugins_needs_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("plugins", "--config", tmp_path / "none.toml")
    assert result.exit_code == 0
    assert "does not exist" in result.stderr
    assert "storage\tsqlite" in result.stdout
    monkeypatch.chdir(tmp_path)
    result = run("plugins")
    assert (result.exit_code, result.stderr) == (0, "")
    Path("engage.toml").write_text("x", "utf-8")
    assert "is not valid TOML" in run("plugins").stderr


DROP = """
    from engage.api import DROP, hookimpl

    @hookimpl
    def engage_register_transform(register):
        register("drop", lambda options: lambda event: DROP)
"""

GREETER = """
    import click
    from engage.api import hookimpl

    @hookimpl
    def engage_register_commands(cli):
        @cli.command()
        def {name}():
            "Say hello."
            click.echo("hello")
"""


def test_a_plugin_brings_a_command(tmp_path: Path) -> None:
    folder = distribution(tmp_path, "greet", {"engage_greet": GREETER.format(name="greet")})
    assert process("greet", path=[folder]).stdout == "hello\n"
    assert re.search(
        "\nFrom plugins:\n  greet +Say hello[.]", process("--help", path=[folder]).stdout
    )
    assert "command\tgreet\tengage_greet\tgreet 1.0" in process("plugins", path=[folder]).stdout


def test_a_plugin_cannot_replace_a_command(tmp_path: Path) -> None:
    folder = distribution(tmp_path, "greet", {"engage_greet": GREETER.format(name="check")})
    done = process("check", "--config", config_file(tmp_path), path=[folder])
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        'engage: plugin "engage_greet" (engage_greet, distribution greet 1.0): the command name'
        " 'check' is already used by engage itself; use another name",
    )


def test_a_broken_plugin_is_one_line_and_help_still_works(tmp_path: Path) -> None:
    folder = distribution(tmp_path, "bad", {"bad": "import not_there"})
    line = (
        'engage: plugin "bad" (bad, distribution bad 1.0): cannot be imported:'
        " ModuleNotFoundError: No module named 'not_there'; install what it needs, or remove it"
        " with pip uninstall bad\n"
    )
    done = process("plugins", path=[folder])
    assert done.returncode == 1
    assert done.stderr.endswith(line)
    done = process("--help", path=[folder])
    assert (done.returncode, done.stderr) == (0, line)
    assert "serve" in done.stdout


# ---------------------------------------------------------------------------------------- export
def exported(*arguments: object) -> list[dict[str, Any]]:
    """Return the lines of an export."""
    result = run("export", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_export_writes_events(stored: Path) -> None:
    def ids(*arguments: object) -> list[str]:
        return [line["messageId"] for line in exported("events", "--config", stored, *arguments)]

    assert ids() == ["m1", "m2", "m3", "m4", "m5"]
    assert ids("--limit", 2) == ["m1", "m2"]
    assert ids("--workspace", "other") == ["m4"]
    assert ids("--user", "ann", "--type", "track") == ["m2"]
    assert ids("--since", "2025-01-01T00:00:00.004Z") == ["m4", "m5"]
    assert ids("--since", "2025-01-01T01:00:00.005+01:00") == ["m5"]
    assert ids("--since", "2025-01-02") == []


def test_export_writes_the_other_kinds(stored: Path) -> None:
    assert len(exported("users", "--config", stored)) == 1
    assert exported("groups", "--config", stored) == [
        {"workspaceId": "acme", "groupId": "g", "traits": {}}
    ]
    assert exported("subscriptions", "--config", stored) == []
    assert exported("dead-letters", "--config", stored)[0]["id"] == "d1"


def test_export_reports_an_unknown_workspace(stored: Path) -> None:
    result = run("export", "events", "--config", stored, "--workspace", "nobody")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert result.stderr == f"engage: {stored} does not contain a workspace 'nobody'\n"


def test_export_leaves_out_a_record_that_cannot_be_json(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    deep = dataclasses.replace(event("deep"), body=b'{"a":' * 900 + b"1" + b"}" * 900)
    fill(path, event("m1"), deep, event("m2"))
    odd = [letter("odd", received_at=9 * 10**15), letter("d2")]
    on_store(path, lambda store: store.put(odd))
    for kind, name, good, bad in (
        ("events", "messageId", ["m1", "m2"], "message_id deep"),
        ("dead-letters", "id", ["d1", "d2"], "id odd"),
    ):
        result = run("export", kind, "--config", path)
        assert result.exit_code == 1
        assert [json.loads(line)[name] for line in result.stdout.splitlines()] == good
        (named,) = result.stderr.splitlines()
        assert named.startswith("engage: left out: workspace_id acme")
        assert bad in named


def test_an_interrupted_export_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config_file(tmp_path)
    fill(path, *(event(f"m{n}", at=n) for n in range(1203)))
    monkeypatch.setattr("engage.reading.scans.PAUSE", 0.0)
    scan = SqliteStorage.scan

    async def busy(self: SqliteStorage, wanted: EventFilter, **page: Any) -> Any:
        if page["after"] is not None:
            raise StorageUnavailable("busy")
        return await scan(self, wanted, **page)

    with monkeypatch.context() as patched:
        patched.setattr(SqliteStorage, "scan", busy)
        first = run("export", "events", "--config", path)
    assert first.exit_code == 1
    match = re.fullmatch(r"engage: busy; read up to (\S+)\n", first.stderr)
    assert match is not None
    (cursor,) = shlex.split(match[1])
    rest = exported("events", "--config", path, "--after", cursor)
    ids = [json.loads(line)["messageId"] for line in first.stdout.splitlines()]
    assert ids + [line["messageId"] for line in rest] == [f"m{n}" for n in range(1203)]
    wrong = run("export", "events", "--config", path, "--after", "?")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "--after: " in wrong.stderr


def test_export_ends_when_its_reader_has_gone(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    fill(path, *(event(f"m{n}", properties={"x": "y" * 500}) for n in range(1000)))
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m engage export events --config {path} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def on_terminal(*arguments: object) -> tuple[int, str]:
    """Run ``engage`` with standard output and error on a terminal.

    :return: the exit status, and what the terminal showed.
    """
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "engage", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
    ) as running:
        os.close(follower)
        seen = b""
        # Linux raises EIO when the last writer of a terminal has gone.
        while data := _read(leader):
            seen += data
        os.close(leader)
        status = running.wait(280)
    return status, seen.decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def test_json_on_a_terminal_is_escaped_and_means_the_same(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    name = "\x1b]0;owned\x07 \x9b31m \u202eabc\u2069 é"
    fill(path, event("m", user_id="u", event=name))
    status, seen = on_terminal("export", "events", "--config", path)
    assert status == 0
    assert json.loads(seen)["event"] == name
    assert not re.search("[\x1b\x07\x9b\u202e\u2069]", seen)
    assert "é" in seen
    assert name.encode()[-2:] in process("export", "events", "--config", path).stdout.encode()


def test_check_and_plugins_escape_values_on_a_terminal(stored: Path) -> None:
    status, seen = on_terminal("check", "--config", stored)
    assert status == 0
    assert "Everything is fine." in seen
    status, seen = on_terminal("plugins", "--config", stored)
    assert status == 0
    assert "KIND" in seen
    assert "\t" not in seen


# ------------------------------------------------------------------------------------------ copy
def test_a_command_other_than_serve_does_not_import_the_server() -> None:
    """Importing it would take half of the time of a command."""
    code = "import sys, engage.cli; print(*sorted({'tornado', 'engage.app'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout.strip() == b""


def test_copy_copies_a_store(stored: Path, tmp_path: Path) -> None:
    target = config_file(tmp_path, "other")
    for copied, duplicate in ((5, 0), (0, 5)):
        result = run("copy", "--from", stored, "--to", target)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.splitlines() == [
            f"events\tcopied={copied}\tduplicate={duplicate}\tconflicting=0\trefused=0",
            "subscription changes\tcopied=0\tduplicate=0\tconflicting=0\trefused=0",
            "suppressions\tcopied=0\tduplicate=0\tconflicting=0\trefused=0",
            f"dead letters\tcopied={copied // 5}\tduplicate={duplicate // 5}\tconflicting=0"
            "\trefused=0",
            "write keys\tcopied=0\tduplicate=0\tconflicting=0\trefused=0",
            "audit records\tcopied=0\tduplicate=0\tconflicting=0\trefused=0",
            "counters\tcopied=0\tduplicate=0\tconflicting=0\trefused=0",
            "profiles\tthe same=1\tduplicate=0\tconflicting=0\trefused=0",
        ]
    both = [run("export", "events", "--config", path).stdout for path in (stored, target)]
    assert both[0] == both[1] != ""


def test_copy_reports_what_was_not_copied(stored: Path, tmp_path: Path) -> None:
    target = config_file(tmp_path, "other")
    fill(target, event("m2", user_id="somebody else"))
    result = run("copy", "--from", stored, "--to", target)
    assert result.exit_code == 1
    assert "events\tcopied=4\tduplicate=0\tconflicting=1\trefused=0" in result.stdout
    assert result.stderr == (
        "engage: events: the target has another event with the same message id\n"
        "engage: some records were not copied\n"
    )


def test_copy_creates_no_source(tmp_path: Path) -> None:
    source, target = config_file(tmp_path, "a"), config_file(tmp_path, "b")
    result = run("copy", "--from", source, "--to", target)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "a.db").exists()


# ------------------------------------------------------------------------- what a check finds
def test_check_warns_of_a_removed_key(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    config.write_text(config.read_text() + "[limits]\nuser_links = 5\n")
    result = run("check", "--config", config)
    assert result.exit_code == 0, result.stderr
    warning = "limits.user_links has no effect: a user has at most 1000 anonymous ids."
    assert f"warning\t{warning}\n" in result.stdout


@pytest.mark.parametrize(
    ("lines", "warning"),
    [
        ('[console]\nhost = "0.0.0.0"', "console.host: 0.0.0.0 serves the console without TLS"),
        ('[console]\nhost = "127.0.0.1"', ""),
        ('[console]\nhost = "0.0.0.0"\npublic_url = "https://ops.example.com"', ""),
        ('[server]\npublic_url = "http://events.example.com"', "server.public_url: links to the"),
        ('[server]\npublic_url = "https://events.example.com"', ""),
        ('[server]\npublic_url = "http://127.0.0.1:8080"', ""),
    ],
)
def test_check_warns_of_what_others_can_read(tmp_path: Path, lines: str, warning: str) -> None:
    config = tmp_path / "engage.toml"
    config.write_text(
        f'{lines}\n[storage]\nbackend = "sqlite"\n[[workspaces]]\nid = "acme"\n'
        'subscription_secret = "a-secret-of-the-links"\n'
    )
    result = run("check", "--config", config)
    assert result.exit_code == 0, result.stderr
    found = [line for line in result.stdout.splitlines() if "_url" in line or "console." in line]
    assert len(found) == bool(warning)
    assert all(line.startswith(f"warning\t{warning}") for line in found)


def test_check_says_before_the_first_start_that_the_disk_is_too_small(tmp_path: Path) -> None:
    """A server would start, and answer 503."""
    config = tmp_path / "engage.toml"
    text = '[storage]\nbackend = "sqlite"\n[storage.sqlite]\n%s\n[[workspaces]]\nid = "acme"\n'
    config.write_text(text % "min_free_bytes = 0")
    assert "free on the disk" not in run("check", "--config", config).stdout
    config.write_text(text % "min_free_bytes = 9000000000000000")
    result = run("check", "--config", config)
    assert result.exit_code == 0
    assert "`engage serve` creates one, but " in result.stdout
    assert "less than storage.sqlite.min_free_bytes (9,000,000,000,000,000)" in result.stdout
