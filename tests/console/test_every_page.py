# SPDX-License-Identifier: Apache-2.0
"""Every page of an installed engage opens, with its files, where nothing else is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from support import console_data
from support.console import signed_in
from support.server_process import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server that finds no other program: neither Node nor a shell."""
    folder: Path = tmp_path_factory.mktemp("console")
    with console_data.start(folder, environment={"PATH": ""}) as started:
        console_data.fill(started)
        yield started


def test_every_page_and_every_file_of_it(server: Server) -> None:
    letter = console_data.letters(server)[0]
    with signed_in(server) as client:
        seen: set[str] = set()
        for name, path in console_data.pages(letter).items():
            answer = client.get(path)
            assert answer.status_code == 200, name
            linked = re.findall(r'(?:src|href)="(?:\.\./)?(static/[^"]+)"', answer.text)
            assert len(linked) >= 3, name
            seen.update(linked)
        for file in seen:
            assert client.get(file).status_code == 200, file
        assert any("uPlot" in file for file in seen)


def test_the_licence_of_each_vendored_file_is_installed() -> None:
    vendor = files("engage.console").joinpath("static/vendor")
    packages = list(vendor.iterdir())
    assert packages
    for package in packages:
        text = package.joinpath("LICENSE").read_text("utf-8")
        assert "Permission is hereby granted" in text
