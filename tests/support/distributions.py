# SPDX-License-Identifier: Apache-2.0
"""Plugin packages as if installed with pip: real metadata and modules in a folder on the path."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path


def distribution(
    folder: Path, name: str, modules: Mapping[str, str], *, version: str = "1.0"
) -> Path:
    """Lay out an installed distribution whose modules are plugins.

    :param folder: put it on ``sys.path`` or ``PYTHONPATH`` to install the distribution.
    :param modules: ``entry point = module`` → the source of the module. Without ``=`` both names
        are the same.
    :return: the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    lines = ["[engage]"]
    for entry, source in modules.items():
        entry_point, _, module = (part.strip() for part in entry.partition("="))
        module = module or entry_point
        lines.append(f"{entry_point} = {module}")
        (folder / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
