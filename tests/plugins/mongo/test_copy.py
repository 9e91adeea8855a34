# SPDX-License-Identifier: Apache-2.0
"""``engage copy`` from SQLite to MongoDB and back copies everything exactly."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engage.api import SubscriptionChange
from engage.config import load
from engage.registry import load_plugins
from engage.testing import WORKSPACE, event, identify, letter
from engage.upkeep.export import KINDS, Selection, export
from support import mongo
from support.server_process import config_text

pytestmark = [pytest.mark.mongo, pytest.mark.slow]

VALUES = {"z": -0.0, "big": 2**63 - 1, "": {"$a.b": "\x00"}, "a.b": [], "email": "A@b.c "}


def config(tmp_path: Path, name: str, storage: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    path = folder / "engage.toml"
    path.write_text(config_text(storage=storage))
    return path


SQLITE = '[storage]\nbackend = "sqlite"\n[storage.sqlite]\npath = "e.db"\nmin_free_bytes = 0\n'


def run_copy(source: Path, target: Path) -> str:
    command = [sys.executable, "-m", "engage", "copy", "--from", str(source), "--to", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def fill(path: Path) -> None:
    store: Any = load_plugins().make_storage(load(path))
    await store.open(create=True)
    try:
        await store.write([event(f"m{n}", user_id=f"u{n % 7}", at=n) for n in range(300)])
        await store.write(
            [
                identify("i1", "ann", 1, traits=VALUES, anonymous_id="v"),
                event("g1", type="group", user_id="ann", groupId="g.$", traits=VALUES),
                event("m1", origin="twilio", user_id="ann", properties=VALUES),
            ]
        )
        for number, wanted in enumerate((True, False, True)):
            change = SubscriptionChange(
                id=f"c{number}",
                workspace_id=WORKSPACE,
                user_id="ann",
                choices={"news": wanted, "sms": True},
                at=number,
                how="api",
            )
            await store.apply(change)
        await store.put([letter(f"d{n}", item=bytes(range(256))) for n in range(3)])
    finally:
        await store.close()


def everything(path: Path) -> dict[str, list[bytes]]:
    async def read() -> dict[str, list[bytes]]:
        store: Any = load_plugins().make_storage(load(path))
        await store.open(create=False)
        try:
            return {
                kind: sorted([record.json async for record in export(store, kind, Selection())])
                for kind in KINDS
            }
        finally:
            await store.close()

    return asyncio.run(read())


def test_a_copy_to_mongodb_and_back_is_exact(tmp_path: Path) -> None:
    url = mongo.shared(mongo.kinds()[-1]).url()
    there = f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n'
    first = config(tmp_path, "first", SQLITE)
    middle = config(tmp_path, "middle", there)
    last = config(tmp_path, "last", SQLITE)
    asyncio.run(fill(first))
    before = everything(first)
    assert "copied=303" in run_copy(first, middle)
    assert everything(middle) == before
    # Nothing is copied twice.
    again = run_copy(first, middle)
    assert "copied=0\tduplicate=303" in again
    assert everything(middle) == before
    assert "copied=303" in run_copy(middle, last)
    assert everything(last) == before
