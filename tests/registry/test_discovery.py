# SPDX-License-Identifier: Apache-2.0
"""Discovery of plugins: an error is one line with the plugin, the distribution and the remedy."""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from engage.config.schema_check import problems
from engage.registry.discovery import GROUP, Discovered, PluginError, discover
from support.distributions import distribution

Install = Callable[..., None]
_numbers = itertools.count()

STORAGE = """
    from engage.api import hookimpl

    @hookimpl
    def engage_register_storage(register):
        register("{name}", object, {{"type": "object"}})
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a distribution whose modules have new names."""

    def _install(name: str, modules: dict[str, str]) -> None:
        unique = {f"{key} = engage_test_{next(_numbers)}": value for key, value in modules.items()}
        monkeypatch.syspath_prepend(distribution(tmp_path / name, name, unique))

    return _install


def found() -> Discovered:
    """Return what is discovered besides the built-in plugins."""
    ours = metadata.distribution("engage-server").name
    points = [
        point
        for point in metadata.entry_points(group=GROUP)
        if point.dist is not None and point.dist.name != ours
    ]
    return discover(reserved_commands={"serve"}, entry_points=points)


def broken(plugin: str, distribution: str) -> str:
    """Return the error about a broken plugin."""
    with pytest.raises(PluginError) as caught:
        found()
    line = str(caught.value)
    match = re.fullmatch(
        rf'plugin "{plugin}" \(engage_test_[0-9]+, distribution {re.escape(distribution)}\): (.+)',
        line,
    )
    assert match, line
    assert "; " in line, "names a cure"
    return match[1]


def test_installed_plugins_are_discovered(install: Install) -> None:
    install("one", {"b": STORAGE.format(name="bee"), "a": STORAGE.format(name="ay")})
    install("two", {"c": STORAGE.format(name="cee")})
    everything = found()
    assert [plugin.name for plugin in everything.plugins] == ["a", "b", "c"]
    storages = everything.tables["storage"]
    assert list(storages) == ["ay", "bee", "cee"]
    assert storages["cee"].distribution == "two 1.0"
    assert storages["cee"].plugin == "c"
    assert storages["cee"].factory is object
    assert storages["cee"].schema == {"type": "object"}


def test_the_built_in_plugins_are_discovered_like_others() -> None:
    storages = discover().tables["storage"]
    assert {"mongo", "sqlite"} <= storages.keys()
    assert storages["sqlite"].distribution.startswith("engage-server ")


def test_every_hook_is_called(install: Install) -> None:
    kinds = ("storage", "log", "transform", "observer")
    hooks = [
        f"""
                @hookimpl
                def engage_register_{kind}(register):
                    register("{kind[0]}", object, {{}})
        """
        for kind in kinds
    ]
    install(
        "all",
        {
            "all": f"""
                import click
                from engage.api import hookimpl
                {"".join(hooks)}
                @hookimpl(specname="engage_register_webhook")
                def another_name(register):
                    register("w", object, {{}})

                @hookimpl
                def engage_register_commands(cli):
                    @cli.command()
                    def hello():
                        pass
            """
        },
    )
    everything = found()
    assert {kind: list(table) for kind, table in everything.tables.items()} == {
        kind: [kind[0]] for kind in (*kinds, "webhook")
    }
    assert list(everything.commands) == ["hello"]
    assert everything.command_plugins["hello"].distribution == "all 1.0"


def test_two_plugins_of_one_name_are_an_error(install: Install) -> None:
    install("one", {"same": STORAGE.format(name="x")})
    install("two", {"same": STORAGE.format(name="y")})
    with pytest.raises(PluginError) as caught:
        found()
    said = str(caught.value)
    assert re.search(
        r'^plugin "same" .* distribution (one|two) 1.0\): the distribution (one|two) 1.0 has a'
        r" plugin with the same name; uninstall one of them: pip uninstall (one|two)$",
        said,
    )
    assert "one 1.0" in said
    assert "two 1.0" in said


def test_two_storages_of_one_name_are_an_error(install: Install) -> None:
    install("one", {"first": STORAGE.format(name="same")})
    install("two", {"second": STORAGE.format(name="same")})
    with pytest.raises(PluginError, match=r"the storage 'same' is already registered") as caught:
        found()
    for part in ("first", "second", "one 1.0", "two 1.0", "use another name"):
        assert part in str(caught.value)


def hook(kind: str, call: str, argument: str = "register") -> str:
    """Return a plugin that implements one hook."""
    return f"""
        from engage.api import hookimpl

        @hookimpl
        def engage_register_{kind}({argument}):
            {call}
    """


def storage(*arguments: str) -> str:
    """Return a plugin that registers a storage with these arguments."""
    return hook("storage", f"register({', '.join(arguments)})")


def named(kind: str, name: str) -> str:
    """Return a plugin that registers something under a name."""
    return hook(kind, f"register({name!r}, object, {{}})")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import a_module_that_is_not_there",
            "cannot be imported: ModuleNotFoundError: No module named 'a_module_that_is_not_there';"
            " install what it needs, or remove it with pip uninstall bad",
        ),
        ("def", "cannot be imported: SyntaxError: "),
        (
            hook("storge", "pass"),
            "there is no hook named engage_register_storge; did you mean engage_register_storage?",
        ),
        (
            hook("storage", "pass", "registry"),
            "Argument(s) {'registry'} are declared in the hookimpl",
        ),
        (
            "def engage_register_storage(register): pass",
            "engage_register_storage is not marked as a hook; decorate it with"
            " @engage.api.hookimpl",
        ),
        ("import json", "it does not implement a hook; the hooks are engage_register_"),
        (storage("'x'"), "engage_register_storage failed: TypeError: "),
        (
            hook("storage", "1 / 0"),
            "engage_register_storage failed: ZeroDivisionError: division by zero; ",
        ),
        (named("storage", "Bad Name"), "'Bad Name' is not a valid name of a storage; use 1 to"),
        (storage("5", "object", "{}"), "5 is not a valid name of a storage; "),
        (storage("'x'", "5", "{}"), "the factory of 'x' is not callable; "),
        (storage("'x'", "object", "[]"), "the options schema of 'x' is not an object; "),
        (
            storage("'x'", "object", "{'type': 'strnig'}"),
            "the options schema of 'x' is not a valid JSON Schema: ",
        ),
        (
            named("storage", "backend"),
            "'backend' is a key of the section [storage]; use another",
        ),
        *(
            (named("log", name), f"'{name}' is a key of the section [log]; use another")
            for name in ("backend", "group", "loaders")
        ),
        *(
            (named("webhook", name), f"'{name}' is the origin of other events; use another")
            for name in ("api", "operator")
        ),
    ],
)
def test_a_broken_plugin_is_an_error(install: Install, source: str, said: str) -> None:
    install("bad", {"p": source})
    assert said in broken("p", "bad 1.0")


def test_a_plugin_without_a_schema_has_no_options(install: Install) -> None:
    install("plain", {"p": storage("'x'", "object")})
    assert list(problems(found().tables["storage"]["x"].schema, {}, written={}, at=())) == []
    options = {"path": "x"}
    assert list(
        problems(
            found().tables["storage"]["x"].schema, options, written=options, at=("storage", "x")
        )
    ) == ["storage.x.path: unknown key; no key is valid"]


# ------------------------------------------------------------------------------------------- files
TRANSFORM = hook("transform", "register('same', object)")


def of_file(path: Path, *others: Path) -> str:
    """Return the error about a plugin file."""
    with pytest.raises(PluginError) as caught:
        discover(files=[path, *others])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_a_plugin(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(TRANSFORM), "utf-8")
    everything = discover(files=[path])
    registered = everything.tables["transform"]["same"]
    assert (registered.plugin, registered.distribution) == ("mine.py", str(path))
    assert everything.plugins[-1].name == "mine.py"
    assert sys.modules["engage_file_mine"].__file__ == str(path)
    assert list(tmp_path.iterdir()) == [path], "no cache is written beside it"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "def f():\n    x = = 1",
            "cannot be imported: SyntaxError: invalid syntax (bad.py, line 2); correct the file, or"
            " remove it from plugins.files",
        ),
        (
            "import json\n\njson.loads('{')\n",
            "cannot be imported: JSONDecodeError: Expecting property name enclosed in double"
            " quotes: line 1 column 2 (char 1) (line 3); correct the file",
        ),
        (
            "def f(x: unknown): pass",
            "cannot be imported: NameError: name 'unknown' is not defined (line 1); correct",
        ),
        ("raise SystemExit(0)", "cannot be imported: SystemExit: 0 (line 1); correct the file"),
        ("x = 1", "it does not implement a hook; the hooks are engage_register_"),
        (
            hook("transform", "1 / 0"),
            "engage_register_transform failed: ZeroDivisionError: division by zero (line 6); remove"
            " it from plugins.files",
        ),
        (
            hook("commands", "pass", "cli"),
            "a file cannot add commands; make a distribution of it",
        ),
    ],
)
def test_a_broken_file_is_an_error(tmp_path: Path, source: str, said: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(textwrap.dedent(source), "utf-8")
    assert of_file(path).startswith(f"plugin file {path}: {said}")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "none.py"
    assert of_file(path) == (
        f"plugin file {path}: cannot be imported: FileNotFoundError: [Errno 2] No such file or"
        f" directory: '{path}'; correct the file, or remove it from plugins.files"
    )
    path.mkdir()
    assert "IsADirectoryError: [Errno 21] Is a directory" in of_file(path)


def test_two_files_of_one_name_are_an_error(tmp_path: Path) -> None:
    first, second, third = tmp_path / "a/x.py", tmp_path / "b/x.py", tmp_path / "b/y.py"
    for path in (first, second, third):
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(TRANSFORM), "utf-8")
    said = f"plugin file {second}: {first} has the same name; rename one of them"
    assert of_file(first, second) == said
    assert of_file(first, third) == (
        f"plugin file {third}: the transform 'same' is already registered by the plugin 'x.py' of"
        f" {first}; uninstall one of them, or use another name"
    )


@pytest.mark.parametrize("name", ["serve", "hello"])
def test_a_command_that_exists_is_an_error(install: Install, name: str) -> None:
    source = """
        import click
        from engage.api import hookimpl

        @hookimpl
        def engage_register_commands(cli):
            cli.add_command(click.Command("{name}"))
    """
    install("one", {"one": source.format(name="hello")})
    install("two", {"two": source.format(name=name)})
    with pytest.raises(
        PluginError, match=rf"the command name '{name}' is already used by .*; use another"
    ):
        found()
