# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/size.py``: counts the lines, the numbers and the config keys of a checkout.

*Code* is neither blank nor a comment nor a docstring. The *numbers* of ``engage/`` and ``plugins/``
are the decisions that a reader has to understand:

- *named*: a module gives a number, or a sum of numbers, a name;
- *fields*: the same in a class;
- *defaults*: the default of a parameter;
- *unnamed*: every other number in the code.

-1, 0, 1 and 2 count only if a module names them, because elsewhere they rarely decide anything.

``--root`` counts another checkout.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: What every reader needs; ``keys`` was once a part of ``pipeline``.
CORE = [
    "api",
    "config",
    "registry",
    "http1",
    "handlers",
    "pipeline",
    "keys",
    "app.py",
    "errors.py",
    "hookspecs.py",
]
#: Names that begin with ``_`` and are public.
PUBLIC = {"_exit", "_replace", "_asdict", "_fields", "_make"}


class Lines(NamedTuple):
    """The lines of one file or of several."""

    files: int
    all: int
    code: int
    #: Comments and docstrings.
    prose: int


def python_files(*folders: Path) -> list[Path]:
    """Return the Python files in or below folders; a folder may also be a file."""
    return sorted(
        path
        for folder in folders
        for path in ([folder] if folder.is_file() else folder.rglob("*.py"))
        if not {".venv", "node_modules", ".cache"} & set(path.parts)
    )


def count_lines(paths: Iterable[Path]) -> Lines:
    """Count the lines of files."""
    files = lines = code = prose = 0
    for path in paths:
        text = path.read_text("utf-8")
        docstrings = _docstring_lines(ast.parse(text))
        comments, code_lines = set(), set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments.add(token.start[0])
            elif token.string.strip() and token.type != tokenize.ENDMARKER:
                code_lines |= set(range(token.start[0], token.end[0] + 1))
        code_lines -= docstrings
        files += 1
        lines += text.count("\n")
        code += len(code_lines)
        prose += len((comments | docstrings) - code_lines)
    return Lines(files, lines, code, prose)


def _docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                assert first.end_lineno is not None
                found |= set(range(first.lineno, first.end_lineno + 1))
    return found


def is_number(node: ast.AST) -> bool:
    """Return whether this is a number, such as ``5``, ``-1`` or ``64 * 1024``."""
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    if isinstance(node, ast.BinOp):
        parts = node.left, node.right
        return any(map(is_number, parts)) and all(
            is_number(part) or isinstance(part, ast.Name) for part in parts
        )
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def decides(node: ast.AST) -> bool:
    """Return whether this is a number other than -1, 0, 1 and 2."""
    return is_number(node) and ast.unparse(node) not in ("-1", "0", "1", "2", "0.0", "1.0", "2.0")


def _assigned(body: Iterable[ast.stmt]) -> Iterator[ast.expr]:
    """Yield the values that statements assign, including those below ``if`` and ``try``."""
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from node.value.elts
            else:
                yield node.value
        elif isinstance(node, ast.If | ast.Try):
            yield from _assigned([*node.body, *node.orelse])


def numbers(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the numbers in a file with their kind, such as ``defaults``."""
    kinds: dict[ast.expr, str] = {v: "named" for v in _assigned(tree.body) if is_number(v)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            kinds |= {value: "fields" for value in _assigned(node.body) if decides(value)}
        elif isinstance(node, ast.arguments):
            defaults = [*node.defaults, *filter(None, node.kw_defaults)]
            kinds |= {value: "defaults" for value in defaults if decides(value)}
    yield from ((kind, value) for value, kind in kinds.items())
    counted = {inner for value in kinds for inner in ast.walk(value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in counted and decides(node):
            yield "unnamed", node


def count_numbers(root: Path = ROOT) -> Counter[str]:
    """Count the numbers of the product by their kind."""
    return Counter(
        kind
        for path in python_files(root / "engage", root / "plugins")
        for kind, _ in numbers(ast.parse(path.read_text("utf-8")))
    )


def count_config_keys(schema: Any) -> int:
    """Count the keys of a config that are no tables themselves."""
    if isinstance(schema, dict):
        inner = schema.get("properties") or schema.get("items", {}).get("properties")
        if inner:
            return sum(map(count_config_keys, inner.values()))
    return 1


def private_uses(root: Path = ROOT) -> Counter[str]:
    """Count in which test files attributes that begin with ``_`` are used, except on ``self``."""
    found: Counter[str] = Counter()
    for path in python_files(root / "tests"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if not own and not node.attr.startswith("__") and node.attr not in PUBLIC:
                    found[str(path.relative_to(root / "tests"))] += 1
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count")
    root: Path = parser.parse_args().root
    product = python_files(root / "engage", root / "plugins")
    rows = {
        "product": product,
        "core": python_files(
            *(path for name in CORE if (path := root / "engage" / name).exists()),
        ),
        "tests": python_files(root / "tests"),
    }
    for folder in sorted({path.parent for path in product}):
        rows[str(folder.relative_to(root))] = sorted(folder.glob("*.py"))
    print(f"{'':28} modules  lines   code  prose  per line of code")
    for name, paths in rows.items():
        lines = count_lines(paths)
        modules = sum(path.name != "__init__.py" for path in paths)
        share = lines.prose / max(lines.code, 1)
        print(f"{name:28} {modules:7} {lines.all:6} {lines.code:6} {lines.prose:6} {share:6.2f}")
    counted = count_numbers(root)
    print("\nnumbers", counted.total(), dict(counted))
    schema = json.loads((root / "schemas/config.json").read_text("utf-8"))
    print("config keys", count_config_keys(schema))
    private = private_uses(root)
    print("private attributes in tests", private.total(), dict(private.most_common(12)))


if __name__ == "__main__":
    main()
