# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/write-a-provider.md, generated from the docstrings of engage.webhooks.

``python tests/support/provider_page.py`` writes them again; a test compares the two.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engage import webhooks

PAGE = Path(__file__).resolve().parents[2] / "docs/write-a-provider.md"
BEGIN = "<!-- generated from engage/webhooks by tests/support/provider_page.py -->\n"
END = "<!-- end -->\n"


def page(text: str) -> str:
    """Return a page with newly generated tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n".join(_tables())
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def _tables() -> Iterator[str]:
    """Yield a table for each group in the docstring of the package."""
    _, table, _ = re.split(r"^=+ +=+$", str(webhooks.__doc__), flags=re.MULTILINE)
    groups = re.findall(r"^(\w[\w ]*?)  +((?:.+\n(?: +:.*\n)*))", table, re.MULTILINE)
    for title, members in groups:
        names = re.findall(r":(?:func|class):`(\w+)`", members)
        rows = [_row(name, getattr(webhooks, name)) for name in names]
        yield (
            f"{title.capitalize()}:\n\n| Call | Returns | What it does |\n|---|---|---|\n"
            + "".join(rows)
        )


def _row(name: str, one: Any) -> str:
    signature = inspect.signature(one)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    call = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    result = "" if inspect.isclass(one) else f"`{signature.return_annotation}`"
    first = str(inspect.getdoc(one)).partition("\n\n")[0].replace("\n", " ")
    first = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", first).replace("``", "`")
    return f"| `{name}{call}` | {result} | {first} |\n".replace(" | None", " \\| None")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")
