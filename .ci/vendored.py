# SPDX-License-Identifier: Apache-2.0
"""Compare the vendored files with the npm packages that they come from.

``vendored.py --check`` fails if a file differs from the one in the released package;
``vendored.py --update`` writes the files. The package is fetched with ``npm pack``, and its SHA-512
must be the one below.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

STATIC = Path(__file__).resolve().parents[1] / "engage/console/static/vendor"

#: Package, version, integrity as npm gives it, and the files: path in the package → name here.
VENDORED = (
    (
        "uplot",
        "1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {
            "dist/uPlot.iife.min.js": "uPlot.iife.min.js",
            "dist/uPlot.min.css": "uPlot.min.css",
            "LICENSE": "LICENSE",
        },
    ),
)


def released(name: str, version: str, integrity: str, folder: Path) -> tarfile.TarFile:
    """Fetch a package with npm, check it, and open it."""
    subprocess.run(  # noqa: S603 constant arguments
        ["npm", "pack", f"{name}@{version}", "--silent", "--ignore-scripts"],  # noqa: S607
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    path = folder / f"{name}-{version}.tgz"
    digest = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    if f"sha512-{digest}" != integrity:
        sys.exit(f"{path.name}: its SHA-512 is {digest}")
    return tarfile.open(path)


def main(mode: str) -> None:
    """Check or update all files."""
    wrong = []
    for name, version, integrity, files in VENDORED:
        target = STATIC / f"{name}-{version}"
        with (
            tempfile.TemporaryDirectory() as folder,
            released(name, version, integrity, Path(folder)) as package,
        ):
            for source, here in files.items():
                member = package.extractfile(f"package/{source}")
                content = b"" if member is None else member.read()
                if mode == "--update":
                    target.mkdir(parents=True, exist_ok=True)
                    (target / here).write_bytes(content)
                elif not (target / here).is_file() or (target / here).read_bytes() != content:
                    wrong.append(str(target / here))
    if wrong:
        sys.exit("differs from its release: " + ", ".join(wrong))


if __name__ == "__main__":
    if sys.argv[1:] not in (["--check"], ["--update"]):
        sys.exit("usage: vendored.py --check | --update")
    main(sys.argv[1])
