# SPDX-License-Identifier: Apache-2.0
"""The architecture: which module may import which, what is packaged, what is declared."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from support.each import each

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]
ENGAGE = ROOT / "engage"
PLUGINS = ROOT / "plugins"
TESTS = ROOT / "tests"

#: From the inside to the outside: a module may import from the lines above its own, and never from
#: its own line or from one below. A folder is one name; inside it modules may import each other.
LAYERS = (
    "api",
    "store",
    "hookspecs webhooks testing monitoring errors",
    "durable ids times",
    "reading audit",
    "config",
    "registry upkeep copy http1",
    "keys subscriptions",
    "pipeline",
    "people",
    "log verify",
    "deliveries",
    "handlers",
    "app",
    "console",
    "server",
    "cli",
)
LEVEL = {name: level for level, line in enumerate(LAYERS) for name in line.split()}

#: The packages of engage that a plugin may import.
PUBLIC = ("engage.api", "engage.store", "engage.webhooks", "engage.testing")


def sources(*folders: str) -> list[Path]:
    """Return the Python files under folders of the checkout."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"))


def for_type_checkers(node: ast.AST) -> bool:
    """Return whether this is ``if TYPE_CHECKING:``."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def statements(tree: ast.AST, *, executed: bool = False) -> Iterator[ast.AST]:
    """Yield every statement; those that are executed are not only read by a type checker."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for node in getattr(tree, field, ()):
            if not (executed and for_type_checkers(node)):
                yield node
                yield from statements(node, executed=executed)


def absolute(path: Path, node: ast.ImportFrom) -> str:
    """Return the full name of what a file imports from."""
    if not node.level:
        return node.module or ""
    folder = path.relative_to(ROOT).parts[: -node.level]
    return ".".join((*folder, *filter(None, [node.module])))


@functools.cache
def imports(path: Path) -> list[str]:
    """Return every module that a file imports when it runs."""
    names = []
    for node in statements(parsed(path), executed=True):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = absolute(path, node)
            inner = [f"engage.{alias.name}" for alias in node.names]
            names += inner if module == "engage" else [module]
    return names


def part(path: Path) -> str:
    """Return the name in :data:`LEVEL` that a file of ``engage/`` belongs to."""
    name = path.relative_to(ENGAGE).parts[0].removesuffix(".py")
    return "cli" if name == "__main__" else name


def test_every_module_has_a_layer() -> None:
    assert {part(path) for path in sources("engage")} - {"__init__"} == set(LEVEL)
    assert not imports(ENGAGE / "__init__.py")


@each("path", [path for path in sources("engage") if part(path) != "__init__"])
def test_no_module_imports_upwards(path: Path) -> None:
    mine = part(path)
    parts = {name: name.split(".")[1] for name in imports(path) if name.startswith("engage.")}
    others = {name: LEVEL[part] for name, part in parts.items() if part in LEVEL and part != mine}
    assert not [name for name, level in others.items() if level >= LEVEL[mine]]


@each("path", sources("engage/cli"))
def test_no_command_imports_the_console(path: Path) -> None:
    assert not [name for name in imports(path) if name.startswith("engage.console")]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not even for a type checker."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources("engage")
    }
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = set()
        for node in statements(parsed(path)):
            if isinstance(node, ast.ImportFrom):
                source = absolute(path, node)
                imported |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
        graph[name] = (imported & modules.keys()) - {name}
    graphlib.TopologicalSorter(graph).prepare()  # Raises CycleError.


# The docstrings of testing have examples.
@each("path", [path for path in sources("engage") if part(path) != "testing"])
def test_the_core_names_no_plugin(path: Path) -> None:
    assert "engage_plugins" not in path.read_text("utf-8")


@each("path", sources("plugins"))
def test_a_plugin_imports_only_what_is_public(path: Path) -> None:
    own = ".".join(path.relative_to(ROOT).parts[:2]).removesuffix(".py")
    ours = re.compile(r"(engage|engage_plugins|plugins|engage_schemas)(\.|\Z)")
    names = [name.replace("engage_plugins", "plugins", 1) for name in imports(path)]
    inner = [name for name in names if ours.match(name) and name != "engage_schemas"]
    assert not [name for name in inner if not name.startswith((*PUBLIC, own))]


def project() -> dict[str, Any]:
    """Return the contents of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_plugin_file_has_an_entry_point() -> None:
    declared = project()["project"]["entry-points"]["engage"]
    files = {
        f"engage_plugins.{path.name.removesuffix('.py')}"
        for path in PLUGINS.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and path.stem != "__init__"
    }
    assert set(declared.values()) == files
    for name, module in declared.items():
        assert module == "engage_plugins." + name.replace("-", "_")


def test_the_declared_entry_points_are_installed() -> None:
    distribution = metadata.distribution("engage-server")
    installed = {
        point.name: point.value for point in distribution.entry_points if point.group == "engage"
    }
    declared = project()["project"]["entry-points"]["engage"]
    assert installed == declared, "run: pip install -e . --no-deps"


def test_every_package_is_packaged() -> None:
    settings = project()["tool"]["setuptools"]
    names = {"engage": "engage", "plugins": "engage_plugins", "schemas": "engage_schemas"}
    folders = set()
    for folder, name in names.items():
        # For setuptools a folder of data is a package, too.
        files = [
            file
            for kind in ("py", "json", "js", "html", "css", "svg")
            for file in (ROOT / folder).rglob(f"*.{kind}")
        ]
        for inner in {file.parent.relative_to(ROOT / folder).parts for file in files}:
            if "vendor" in inner:
                # What is below has a pattern of its own in package-data.
                inner = inner[: inner.index("vendor") + 1]
            folders.add(".".join((name, *inner)))
            if inner and folder == "plugins":
                path = "/".join((folder, *inner))
                assert settings["package-dir"][".".join((name, *inner))] == path
    assert set(settings["packages"]) == folders


@each("folder", ["engage", "plugins", "schemas"])
def test_every_data_file_is_packaged(folder: str) -> None:
    patterns = project()["tool"]["setuptools"]["package-data"]["*"]
    packaged = {path for pattern in patterns for path in (ROOT / folder).rglob(pattern)}
    files = {path for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert not {path for path in files - packaged if path.suffix not in (".py", ".pyc")}


@each("path", sources("engage", "plugins", "tests", "benchmarks"))
def test_every_file_names_its_licence(path: Path) -> None:
    text = path.read_text("utf-8")
    if text.strip() and path.name != "__init__.py":
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")


@each("path", sources("tests"))
def test_every_test_file_is_described(path: Path) -> None:
    # The examples are printed in docs/, without docstrings.
    is_example = path.relative_to(TESTS).parts[0].startswith("example_")
    assert is_example or ast.get_docstring(parsed(path))


@each("path", sources("tests"))
def test_no_test_module_imports_another(path: Path) -> None:
    """What several need is in ``tests/support``."""
    assert not [name for name in imports(path) if name.rpartition(".")[2].startswith("test_")]


def test_the_map_of_the_test_helpers_names_every_module() -> None:
    described = ast.get_docstring(parsed(TESTS / "support/__init__.py")) or ""
    names = {path.stem for path in sources("tests/support")} - {"__init__"}
    assert not {name for name in names if f"``{name}``" not in described}


@each("path", sources("engage", "plugins"))
def test_every_public_name_is_documented(path: Path) -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    names = {
        getattr(node, "name", "the module"): ast.get_docstring(node)
        for tree in [parsed(path)]
        for node in (tree, *tree.body)
        if isinstance(node, kinds)
    }
    assert not [name for name, text in names.items() if not text and not name.startswith("_")]


def file_map(package: Path) -> list[str]:
    """Return the names that the table in a package's docstring describes."""
    docstring = ast.get_docstring(parsed(package / "__init__.py")) or ""
    return re.findall(r"^``([\w/.]+(?:\.py|/))``", docstring, re.MULTILINE)


@each("package", [path.parent for path in sources("engage", "plugins") if path.stem == "__init__"])
def test_a_package_map_describes_every_file(package: Path) -> None:
    names = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in package.iterdir()
        if path.suffix == ".py" or path.is_dir()
    }
    if file_map(package) or package == ENGAGE:
        assert sorted(file_map(package)) == sorted(names - {"__init__.py", "__pycache__/"})


#: How many lines a file and a function of the product may have, and how many modules a folder.
FILE_LINES, FUNCTION_LINES, MODULES = 600, 80, 20
#: Fewer modules where more will come.
FEWER_MODULES = {"plugins/mongo": 18}


@each("path", sources("engage", "plugins"))
def test_no_file_or_function_is_too_large(path: Path) -> None:
    lines = len(path.read_text("utf-8").splitlines())
    assert lines <= FILE_LINES, "divide it by idea"
    assert not [
        node.name
        for node in statements(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES
    ], "divide it by idea"


@each("folder, files", Counter(path.parent for path in sources("engage", "plugins")).items())
def test_no_folder_has_too_many_modules(folder: Path, files: int) -> None:
    most = FEWER_MODULES.get(str(folder.relative_to(ROOT)), MODULES)
    assert files - (folder / "__init__.py").exists() <= most, "divide it by idea"
