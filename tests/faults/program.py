# SPDX-License-Identifier: Apache-2.0
"""What the programs share: a seed that repeats a run, and failures that are kept in files."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

#: Where failing inputs and the files of a failed run are kept.
KEPT = Path(__file__).resolve().parents[2] / ".cache" / "faults"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with ``--seed``."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--seed", type=int, default=random.randrange(10**9), help="repeats the run that printed it"
    )
    return made


class Report:
    """Prints what happens, and notes what is wrong."""

    def __init__(self, name: str, seed: int) -> None:
        self.failures: list[str] = []
        self._name = name
        self._began = time.monotonic()
        self.say(f"{name}: --seed {seed}")

    @property
    def seconds(self) -> float:
        """Seconds since the begin."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"[{self.seconds:7.1f} s] {text}", flush=True)

    def fail(self, what: str, data: bytes = b"") -> None:
        """Note a failure, and keep the bytes that provoked it."""
        if data:
            KEPT.mkdir(parents=True, exist_ok=True)
            path = KEPT / f"{self._name}-{len(self.failures)}.bin"
            path.write_bytes(data)
            what += f" ({path})"
        self.failures.append(what)
        if len(self.failures) <= 50:
            self.say(f"FAILED: {what}")

    def finish(self) -> None:
        """Exit with 1 if something is wrong."""
        self.say(f"{self._name}: {len(self.failures)} failures")
        sys.exit(1 if self.failures else 0)
