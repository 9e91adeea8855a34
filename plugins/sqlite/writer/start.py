# SPDX-License-Identifier: Apache-2.0
"""Starting a writer process, as the client that holds the lock does it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

from .lock import WriterLock, read_note

_log = logging.getLogger("engage.storage.sqlite")


class StartedProcess:
    """A process that was started; it outlives this object."""

    def __init__(self, process: subprocess.Popen[bytes], store: str) -> None:
        self._process = process
        self._store = store
        #: Why it could not start, as soon as that is known.
        self.failure: str | None = None
        # A daemon thread, which does nothing but wait: without it, the process would remain as a
        # zombie when it has ended.
        threading.Thread(target=self._wait, name="engage-sqlite-process", daemon=True).start()

    def _wait(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            # It is closed when the process listens.
            errors = stream.read().decode(errors="replace").strip()
        status = self._process.wait()
        if status < 0:
            # Another one is started. If it happens often, the system may be out of memory.
            _log.warning("SQLite: the writer process was killed by signal %d", -status)
        elif status > 0:
            note = read_note(self._store)
            reason = note.failure if note is not None and note.pid == self._process.pid else ""
            lines = errors.splitlines() or [reason or f"it ended with status {status}"]
            self.failure = lines[-1]


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
                *(sys.executable, "-P", "-m", "engage_plugins.sqlite.writer.process"),
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
    return StartedProcess(process, lock.store)
