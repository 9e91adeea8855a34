# SPDX-License-Identifier: Apache-2.0
"""Starting a writer process, as the client that holds the lock does it."""

from __future__ import annotations

import subprocess
import sys
import threading

from .lock import WriterLock


class StartedProcess:
    """A process that was started; it outlives this object."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        #: Why it could not start, when that is known.
        self.failure: str | None = None
        # A daemon thread, which does nothing but wait: without it, the process would remain as a
        # zombie when it has ended.
        threading.Thread(target=self._wait, name="engage-sqlite-process", daemon=True).start()

    def _wait(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            # It is closed when the process listens.
            errors = stream.read().decode(errors="replace").strip()
        # A process that was killed by a signal is simply started again.
        if (status := self._process.wait()) > 0:
            self.failure = (errors.splitlines() or [f"it ended with status {status}"])[-1]


def start_process(lock: WriterLock) -> StartedProcess:
    """Start a process that inherits the lock, and release it here.

    The process has a session of its own: it goes on when the terminal or the service that started
    it ends, as long as other processes use the store.

    :raises OSError: if the system allows no further process.
    """
    try:
        process = subprocess.Popen(
            [
                # -P: the process must not import modules from the current folder.
                *(sys.executable, "-P", "-m", "engage_plugins.sqlite.writer_process"),
                *(lock.store, str(lock.descriptor)),
            ],
            pass_fds=[lock.descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    finally:
        lock.release()
    return StartedProcess(process)
