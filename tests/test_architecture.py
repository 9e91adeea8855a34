# SPDX-License-Identifier: Apache-2.0
"""The architecture: which module may import which, what is packaged, what is declared."""

from __future__ import annotations

import ast
import graphlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]
ENGAGE = ROOT / "engage"
PLUGINS = ROOT / "plugins"
TESTS = ROOT / "tests"

#: From the inside to the outside: a module may import from the lines above its own, and never from
#: its own line or from one below. A folder is one name; inside it modules may import each other.
LAYERS = (
    "api",
    "hookspecs webhooks testing monitoring errors",
    "config",
    "registry upkeep http1",
    "keys",
    "pipeline",
    "erasure",
    "log",
    "deliveries",
    "handlers",
    "app",
    "console",
    "server",
    "cli",
)
LEVEL = {name: level for level, line in enumerate(LAYERS) for name in line.split()}

#: The packages of engage that a plugin may import.
PUBLIC = ("engage.api", "engage.webhooks", "engage.testing")


def sources(folder: Path) -> list[Path]:
    """Return the Python files under a folder."""
    return sorted(folder.rglob("*.py"))


def for_type_checkers(node: ast.AST) -> bool:
    """Return whether this is ``if TYPE_CHECKING:``."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node except those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if not for_type_checkers(node):
            yield node
            yield from executed(node)


def absolute(path: Path, node: ast.ImportFrom) -> str:
    """Return the full name of what a file imports from."""
    if not node.level:
        return node.module or ""
    folder = path.relative_to(ROOT).parts[: -node.level]
    return ".".join((*folder, *filter(None, [node.module])))


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports when it runs."""
    for node in executed(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(path, node)
            if module == "engage":
                yield from (f"engage.{alias.name}" for alias in node.names)
            else:
                yield module


def part(path: Path) -> str:
    """Return the name in :data:`LEVEL` that a file of ``engage/`` belongs to."""
    name = path.relative_to(ENGAGE).parts[0].removesuffix(".py")
    return "cli" if name == "__main__" else name


def test_every_module_has_a_layer() -> None:
    here = {part(path) for path in sources(ENGAGE)} - {"__init__"}
    assert here == set(LEVEL)


@pytest.mark.parametrize("path", sources(ENGAGE), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_imports_upwards(path: Path) -> None:
    mine = part(path)
    if mine == "__init__":
        assert not list(imports(path))
        return
    for name in imports(path):
        if name.startswith("engage."):
            other = name.split(".")[1]
            if other in LEVEL and other != mine:
                assert LEVEL[other] < LEVEL[mine], f"{mine} must not import {name}"


def test_no_command_imports_the_console() -> None:
    for path in sources(ENGAGE / "cli"):
        assert not any(name.startswith("engage.console") for name in imports(path)), path


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not even for a type checker."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources(ENGAGE)
    }
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                source = absolute(path, node)
                imported |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
        graph[name] = (imported & modules.keys()) - {name}
    graphlib.TopologicalSorter(graph).prepare()  # Raises CycleError.


def test_the_core_names_no_plugin() -> None:
    for path in sources(ENGAGE):
        if part(path) == "testing":
            continue  # its docstrings have examples
        assert "engage_plugins" not in path.read_text("utf-8"), path


@pytest.mark.parametrize("path", sources(PLUGINS), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_plugin_imports_only_what_is_public(path: Path) -> None:
    own = ".".join(path.relative_to(ROOT).parts[:2]).removesuffix(".py")
    for name in imports(path):
        if name.split(".")[0] in ("engage", "engage_plugins", "plugins", "engage_schemas"):
            public = name.startswith(PUBLIC) or name == "engage_schemas"
            within = name.replace("engage_plugins", "plugins", 1).startswith(own)
            assert public or within, f"{name} is not for plugins"


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


def test_every_data_file_is_packaged() -> None:
    patterns = project()["tool"]["setuptools"]["package-data"]["*"]
    for folder in ("engage", "plugins", "schemas"):
        packaged = {path for pattern in patterns for path in (ROOT / folder).rglob(pattern)}
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert path in packaged, path


@pytest.mark.parametrize("folder", ["engage", "plugins", "tests", "benchmarks"])
def test_every_file_names_its_licence(folder: str) -> None:
    for path in sources(ROOT / folder):
        text = path.read_text("utf-8")
        if text.strip() and path.name != "__init__.py":
            assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path


def test_every_test_file_is_described() -> None:
    for path in sources(TESTS):
        # The examples are printed in docs/, without docstrings.
        if not path.relative_to(TESTS).parts[0].startswith("example_"):
            assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), path


def test_no_test_module_imports_another() -> None:
    """What several need is in ``tests/support``."""
    for path in sources(TESTS):
        for name in imports(path):
            assert not name.rpartition(".")[2].startswith("test_"), f"{path} imports {name}"


def test_the_map_of_the_test_helpers_names_every_module() -> None:
    described = ast.get_docstring(ast.parse((TESTS / "support/__init__.py").read_text("utf-8")))
    assert described is not None
    for path in sources(TESTS / "support"):
        assert path.stem == "__init__" or f"``{path.stem}``" in described, path


def test_every_public_name_is_documented() -> None:
    for path in (*sources(ENGAGE), *sources(PLUGINS)):
        tree = ast.parse(path.read_text("utf-8"))
        assert ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                public = not node.name.startswith("_")
                assert not public or ast.get_docstring(node), f"{path}: {node.name}"


def file_map(package: Path) -> list[str]:
    """Return the names that the table in a package's docstring describes."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""
    return re.findall(r"^``([\w/.]+(?:\.py|/))``", docstring, re.MULTILINE)


@pytest.mark.parametrize(
    "package",
    [
        path.parent
        for path in (*sources(ENGAGE), *sources(PLUGINS))
        if path.name == "__init__.py" and (path.parent == ENGAGE or file_map(path.parent))
    ],
    ids=lambda path: path.name,
)
def test_a_package_map_describes_every_file(package: Path) -> None:
    there = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in package.iterdir()
        if path.suffix == ".py" or path.is_dir()
    }
    assert sorted(file_map(package)) == sorted(there - {"__init__.py", "__pycache__/"})


#: How many lines a file and a function of the product may have, and how many modules a folder.
FILE_LINES, FUNCTION_LINES, MODULES = 600, 80, 20
#: Fewer modules where more will come.
FEWER_MODULES = {"plugins/mongo": 18}


def test_no_file_function_or_folder_is_too_large() -> None:
    found = set()
    for path in (*sources(ENGAGE), *sources(PLUGINS)):
        text = path.read_text("utf-8")
        name = str(path.relative_to(ROOT))
        if text.count("\n") > FILE_LINES:
            found.add(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= FUNCTION_LINES:
                    found.add(f"{name}: {node.name}")
    folders = Counter(path.parent for path in (*sources(ENGAGE), *sources(PLUGINS)))
    for folder, files in folders.items():
        name = str(folder.relative_to(ROOT))
        if files - (folder / "__init__.py").exists() > FEWER_MODULES.get(name, MODULES):
            found.add(name)
    assert not found, "divide it by idea"
