# SPDX-License-Identifier: Apache-2.0
"""Read the config file into the dataclasses of :mod:`engage.config.sections`.

:func:`load` reads the file once and reports errors by dotted key. ``schemas/config.json`` defines
the keys and their values. The options of plugins (``[storage.<name>]``, ``[log.<name>]``,
``[workspaces.webhooks.<name>]``, ``[observers.<name>]``, and ``options`` of ``[[transforms]]``)
have schemas of the plugins: :mod:`engage.registry` checks them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from engage.api import ConfigError
from engage.config.colors import READABLE, contrast
from engage.config.interpolation import MAX_BYTES, resolve
from engage.config.removed import without_removed
from engage.config.schema_check import Path as KeyPath
from engage.config.schema_check import SettingsError, dotted, doubts, problems
from engage.config.secrets import stain
from engage.config.sections import Config, Workspace, config_schema, default
from engage.errors import quote
from engage.store.keys import fingerprint

__all__ = ["ERASURES_SUFFIX", "key_problem", "load"]

#: What the name of the file of erasures has after that of the config.
ERASURES_SUFFIX: Final = ".erasures"
#: The sections, and the keys of workspaces, that concern the server and not the store.
_NOT_READ: Final = {
    *("server", "console", "log", "erasures", "cors", "logging", "transforms", "observers"),
    *("write_keys", "subscription_secret", "identity_secret", "webhooks"),
}
#: A table, or a key with its equals sign.
_STATEMENT: Final = re.compile(r"\[[\w. \-\[]*\]*|\s*[\w.\-]+\s*=", re.ASCII)
#: The rule for the port of a URL.
_NO_PORT: Final = "must name a host, and a port from 1 to 65535 if any"
#: What to do about an error of tomllib, by how its message begins.
_HINTS: Final = {
    "Invalid value (at line": "write a text in quotation marks, and true or false in lower case",
    "Illegal character '\\n'": "end a text with a quotation mark in its own line",
    "Unescaped": "write a text with backslashes in single quotation marks",
    "Expected newline": "write each key in a line of its own, and a text in quotation marks",
    "Cannot overwrite": "the key or the table is there twice",
    "Cannot declare": "the table is there twice; write [[name]] if there may be several",
}


def load(
    path: str | Path,
    environ: Mapping[str, str] | None = None,
    *,
    reads_with: Collection[str] | None = None,
) -> Config:
    """Read a config file.

    The options of plugins are not checked here, because this module does not know the plugins: see
    :meth:`engage.registry.Registry.check`.

    :param path: a TOML file.
    :param environ: the variables for ``${NAME}``; the environment of the process by default.
    :param reads_with: for a command that only reads the store: the names of those of
        :data:`_NOT_READ` that it needs. The references in the others are left out, so the variables
        and files of other secrets need not be there.
    :raises ConfigError: if the file cannot be read, or if a setting is wrong. The message names the
        file, the key and the rule, never a secret. A :class:`SettingsError` lists all problems.
    """
    path = Path(path)
    base_dir = path.absolute().parent
    schema = config_schema()
    written, warnings = without_removed(schema, _read(path))
    skipped: list[str] = []

    def left_out(at: KeyPath) -> bool:
        unread = reads_with is not None and _is_unread(at, reads_with)
        skipped.extend([dotted(at)] * unread)
        return unread

    environ = os.environ if environ is None else environ
    document, mistakes = resolve(written, base_dir, environ, left_out)
    # What is found in a value that could not be resolved is only a consequence.
    keys = (*skipped, *(line.partition(": ")[0] for line in mistakes))
    consequences = tuple(f"{key}: " for key in keys)

    def others(lines: Iterable[str]) -> list[str]:
        return [line for line in lines if not line.startswith(consequences)]

    in_use = _keys_in_use(path, document)
    mistakes += others(problems(schema, document, written=written, in_use=in_use))
    if not mistakes:
        warnings += doubts(schema, document)
        about = {"path": path, "base_dir": base_dir, "written": written, "warnings": warnings}
        # Not strict, because JSON Schema accepts 8080.0 as an integer.
        config = msgspec.convert(_arranged(document) | about, Config, strict=False)
        wrong_keys = [
            f"workspaces[{w}].write_keys[{k}].{problem[0]}: {problem[1]}"
            for w, workspace in enumerate(document["workspaces"])
            for k, key in enumerate(workspace.get("write_keys", ()))
            if (problem := key_problem(key)) is not None
        ]
        mistakes += others([*wrong_keys, *_contradictions(config)])
    if mistakes:
        raise SettingsError([f"{path}: {_named(problem, document)}" for problem in mistakes])
    return config


def _named(problem: str, document: Mapping[str, Any]) -> str:
    """Return a problem with the ids of what its key counts, from the third one on."""
    ids, place = [], document
    for name, number in re.findall(r"(\w+)\[(\d+)\]", problem.partition(":")[0]):
        entries = place.get(name)
        if not isinstance(entries, list) or not isinstance(entries[int(number)], Mapping):
            break
        place = entries[int(number)]
        if int(number) > 1 and isinstance(place.get("id"), str):
            ids.append(quote(place["id"]))
    return f"{problem} (of {', '.join(ids)})" if ids else problem


def _is_unread(path: KeyPath, needed: Collection[str]) -> bool:
    """Return whether no command needs a value that only reads the store, except one that needs
    parts of the config.

    :param needed: these parts.
    """
    part = path[2] if path[0] == "workspaces" and len(path) > 2 else path[0]
    return part in _NOT_READ and part not in needed and path[-1] not in ("id", "name")


def _keys_in_use(path: Path, document: Mapping[str, Any]) -> Collection[str]:
    """Return the key for erasures if the file of erasures has hashes of it: it must not change."""
    erasures = document.get("erasures")
    key = erasures.get("key") if isinstance(erasures, Mapping) else None
    if not isinstance(key, str) or stain(key) is None:
        return ()
    try:
        data = path.with_name(path.name + ERASURES_SUFFIX).read_bytes()
    except OSError:
        return ()
    return (key,) if f'"key":"{fingerprint(key)}"'.encode() in data else ()


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # The path may name a device without an end.
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES // 1024} KiB")
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; run `engage init` to create it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (at byte {error.start})") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}{_hint(text, error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply") from error
    except (ValueError, OverflowError) as error:  # a number of thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _hint(text: str, error: tomllib.TOMLDecodeError) -> str:
    """Return what stands in the line of an error, without a value, which may be secret."""
    message, hint = str(error), ""
    if place := re.search(r"at line (\d+)", message):
        line = text.split("\n")[int(place[1]) - 1]
        if shown := _STATEMENT.match(line):
            hint = f": {shown[0].strip()}" + ("" if shown[0].startswith("[") else " …")
    return hint + next((f"; {_HINTS[key]}" for key in _HINTS if message.startswith(key)), "")


def _arranged(document: dict[str, Any]) -> dict[str, Any]:
    """Give a document the form of :class:`Config`, which is not always that of the file."""
    for name in ("server", "console"):
        table = document.get(name, {})
        if "public_url" in table:
            table["public_url"] = table["public_url"].rstrip("/")
    for name in ("storage", "log"):
        if name in document:
            tables = {key: v for key, v in document[name].items() if isinstance(v, Mapping)}
            chosen = document[name].get("backend", default(f"{name}.backend"))
            document[name] |= {"tables": tables, "options": tables.get(chosen, {})}
    # In the file, 0 means "never".
    retention = document.get("retention", {})
    document["retention"] = {key: days or None for key, days in retention.items()}
    observers = document.get("observers", {}).items()
    document["observers"] = [{"name": name, "options": options} for name, options in observers]
    for workspace in document["workspaces"]:
        for item in (workspace, *workspace.get("subscription_groups", ())):
            if isinstance(names := item.setdefault("name", item["id"]), Mapping):
                item |= {"names": names, "name": names.get("en", next(iter(names.values())))}
        for name in ("subscription_secret", "identity_secret"):
            secrets = workspace.pop(name, [])
            workspace[f"{name}s"] = secrets if isinstance(secrets, list) else [secrets]
    return document


def _duplicates(values: Iterable[tuple[str, str]], what: str) -> list[str]:
    """Return a line for each value that an earlier key has too.

    :param values: (dotted key, value); the lines do not contain the values, which may be secret.
    """
    first: dict[str, str] = {}
    repeated = []
    for key, value in values:
        if value in first:
            repeated.append(f"{key}: is the same {what} as {first[value]}; use a different one")
        else:
            first[value] = key
    return repeated


def key_problem(key: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what is wrong with a write key beyond its schema: a name and the rule.

    :param key: as in the file or the store; valid by its schema.
    """
    kind = key.get("kind", "public")
    if kind == "server" and "key" in key:
        return "key", "a server key is a secret; write its sha256 instead"
    if kind == "public" and "sha256" in key:
        return "sha256", 'only a key with kind = "server" has it'
    if not key.keys() & {"key", "sha256"}:
        return "sha256" if kind == "server" else "key", "is missing"
    if kind == "server" and "origins" in key:
        return "origins", "every web page is refused with a server key"
    for number, origin in enumerate(key.get("origins", ())):
        if _no_port(origin):
            return f"origins[{number}]", _NO_PORT
        if re.fullmatch(r"http://.*:80|https://.*:443", origin):
            return f"origins[{number}]", "leave out the port, as browsers do"
    return None


def _no_port(url: str) -> bool:
    """Return whether a URL names no host, or a port that cannot be."""
    try:
        return urlsplit(url).port == 0
    except ValueError:
        return True


def _shared_secrets(config: Config) -> list[str]:
    """Return a line for each secret by which a hash of a user id would be valid elsewhere too: in
    another workspace, or as a signed link."""
    links = {
        secret: f"workspaces[{w}].subscription_secret[{s}]"
        for w, workspace in enumerate(config.workspaces)
        for s, secret in enumerate(workspace.subscription_secrets)
    }
    identities = (
        (f"workspaces[{w}].identity_secret[{s}]", secret)
        for w, workspace in enumerate(config.workspaces)
        for s, secret in enumerate(workspace.identity_secrets)
    )
    signing = ((key, secret) for secret, key in links.items())
    return _duplicates(itertools.chain(signing, identities), "secret")


def _urls(config: Config) -> Iterator[tuple[str, str | None]]:
    """Yield the key of each URL, and the URL if it is set."""
    yield "server.public_url", config.server.public_url
    if config.console is not None:
        yield "console.public_url", config.console.public_url
    for w, workspace in enumerate(config.workspaces):
        for name in ("imprint", "privacy"):
            key = f"workspaces[{w}].preferences_page.{name}"
            yield key, getattr(workspace.preferences_page, name)
    for n, origin in enumerate(config.cors.origins):
        yield f"cors.origins[{n}]", origin


def _unsubscribe_problems(workspace: Workspace, at: str) -> list[str]:
    """Return what is wrong with ``unsubscribes``; :mod:`engage.registry` checks the providers."""
    mistakes = []
    groups = {group.id for group in workspace.subscription_groups}
    for name, rule in workspace.unsubscribes.items():
        if rule.action == "groups" and not rule.groups:
            mistakes.append(f'{at}.{name}.groups: is missing; action = "groups" needs it')
        elif rule.action != "groups" and rule.groups:
            mistakes.append(f'{at}.{name}.groups: has no effect unless action = "groups"')
        mistakes += [
            f"{at}.{name}.groups.{json.dumps(theirs)}: there is no subscription group"
            f" {json.dumps(ours)} in the workspace"
            for theirs, ours in rule.groups.items()
            if ours not in groups
        ]
    return mistakes


def _useless_bursts(config: Config) -> list[str]:
    """Return a problem for each burst that has no rate."""
    if config.limits.rate.events_per_second:
        return []
    places = ["limits.rate"] if config.limits.rate.burst else []
    places += [
        f"workspaces[{w}].write_keys[{k}].rate"
        for w, workspace in enumerate(config.workspaces)
        for k, key in enumerate(workspace.write_keys)
        if key.rate.get("burst") and not key.rate.get("events_per_second")
    ]
    return [f"{at}.burst: has no effect without events_per_second" for at in places]


def _contradictions(config: Config) -> list[str]:
    """Return the problems that a JSON Schema cannot express."""
    mistakes = _duplicates(
        ((f"workspaces[{w}].id", workspace.id) for w, workspace in enumerate(config.workspaces)),
        "workspace id",
    )
    mistakes += _duplicates(
        (
            (f"workspaces[{w}].write_keys[{k}].{'key' if key.key else 'sha256'}", key.sha256)
            for w, workspace in enumerate(config.workspaces)
            for k, key in enumerate(workspace.write_keys)
            if key.sha256
        ),
        "write key",
    )
    mistakes += [
        f"workspaces[{w}].write_keys[{k}].{problem}"
        for w, workspace in enumerate(config.workspaces)
        for k, key in enumerate(workspace.write_keys)
        for problem in config.cors.missing(key.origins)
    ]
    mistakes += _useless_bursts(config)
    for w, workspace in enumerate(config.workspaces):
        keys = enumerate(workspace.write_keys)
        mistakes += _duplicates(
            ((f"workspaces[{w}].write_keys[{k}].id", key.id) for k, key in keys), "id"
        )
        groups = enumerate(workspace.subscription_groups)
        mistakes += _duplicates(
            ((f"workspaces[{w}].subscription_groups[{g}].id", group.id) for g, group in groups),
            "id",
        )
        secrets = enumerate(workspace.subscription_secrets)
        mistakes += _duplicates(
            ((f"workspaces[{w}].subscription_secret[{s}]", secret) for s, secret in secrets),
            "secret",
        )
        mistakes += _unsubscribe_problems(workspace, f"workspaces[{w}].unsubscribes")
        if workspace.verify_identity == "required" and not workspace.identity_secrets:
            mistakes.append(
                f"workspaces[{w}].identity_secret: is missing; verify_identity needs it"
            )
    mistakes += _shared_secrets(config)
    mistakes += [
        f"workspaces[{w}].preferences_page.color: its contrast to white is {ratio:.2f}:1;"
        f" use a darker colour, of at least {READABLE}:1"
        for w, workspace in enumerate(config.workspaces)
        if (ratio := contrast(workspace.preferences_page.color, "#ffffff")) < READABLE
    ]
    server = config.server
    if server.shutdown_delay >= server.shutdown_grace:
        mistakes.append(
            "server.shutdown_delay: must be less than server.shutdown_grace, which includes it"
            f" ({server.shutdown_delay:g} >= {server.shutdown_grace:g})"
        )
    for number, network in enumerate(server.trusted_proxies):
        try:
            ipaddress.ip_network(network)
        except ValueError:
            rule = "must be an IP address or a network, such as 10.0.0.0/8"
            with contextlib.suppress(ValueError):
                meant = ipaddress.ip_network(network, strict=False)
                rule = f"{network} is an address within a network; write {meant} for all of it"
            mistakes.append(f"server.trusted_proxies[{number}]: {rule}")
    mistakes += [f"{key}: {_NO_PORT}" for key, url in _urls(config) if url and _no_port(url)]
    limits = config.limits
    for small, large in (
        ("event_bytes", "decompressed_bytes"),
        ("event_bytes", "queue_bytes"),
        ("body_bytes", "inflight_bytes"),
        ("batch_events", "queue_events"),
    ):
        if getattr(limits, small) > getattr(limits, large):
            mistakes.append(
                f"limits.{small}: must be at most limits.{large}"
                f" ({getattr(limits, small)} > {getattr(limits, large)})"
            )
    return mistakes
