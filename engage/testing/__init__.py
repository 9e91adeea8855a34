# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: the conformance suites that every storage, log and webhook provider must pass.

They need pytest and hypothesis (``pip install engage-server[testing]``), and no pytest plugin.

A class of a few lines tests a storage::

    from engage.testing import StorageConformance

    class TestMyStorage(StorageConformance):
        plugin = "my_plugin"

        def options(self, tmp_path):
            return {"path": str(tmp_path / "events")}

        def break_store(self, options): ...
        def mend_store(self, options): ...

``options`` returns the options of a different store for each test. ``break_store`` makes what is
under the store fail (it stops the server, or puts a folder in the place of the file), and
``mend_store`` makes it work again; without these two, the tests of failures fail.

For a log in front of the storage see :class:`LogConformance`, which is used in the same way
(:class:`LogSubject` has what a subclass defines).

For a webhook provider see :class:`ProviderConformance` (:mod:`engage.testing.providers`).

:class:`MemoryStore` is a storage in memory, for tests of your own code.

======================  ===============================================================
``storage/``            the tests of a storage
``log/``                the tests of a log
``providers/``          the tests of webhook providers
``harness.py``          opens what a plugin registers, and closes it after each test
``factories.py``        events, dead letters, records and counters for the tests
``memory_store.py``     a storage in memory
``processes.py``        child processes of the tests
======================  ===============================================================
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "engage.testing.log",
    "engage.testing.processes",
    "engage.testing.providers",
    "engage.testing.storage",
)

from .factories import WORKSPACE, event, identify, letter  # noqa: E402
from .log.appending import LogAppendTests  # noqa: E402
from .log.failures import LogFailureTests, LogProcessTests  # noqa: E402
from .log.groups import LogGroupTests  # noqa: E402
from .log.harness import LogBench, LogSubject, on_log  # noqa: E402
from .log.reading import LogReadTests  # noqa: E402
from .memory_store import MemoryStore  # noqa: E402
from .providers import ProviderConformance  # noqa: E402
from .storage.backups import BackupTests  # noqa: E402
from .storage.failures import FailureTests  # noqa: E402
from .storage.follows import FollowTests  # noqa: E402
from .storage.harness import Bench, Subject, on_store  # noqa: E402
from .storage.histories import HistoryTests  # noqa: E402
from .storage.processes import ProcessTests  # noqa: E402
from .storage.steps import StepTests  # noqa: E402
from .storage.stored_events import EventTests  # noqa: E402

__all__ = [
    "WORKSPACE",
    "Bench",
    "LogBench",
    "LogConformance",
    "LogSubject",
    "MemoryStore",
    "ProviderConformance",
    "StorageConformance",
    "Subject",
    "event",
    "identify",
    "letter",
    "on_log",
    "on_store",
]


class StorageConformance(
    HistoryTests,
    EventTests,
    FollowTests,
    FailureTests,
    ProcessTests,
    BackupTests,
    StepTests,
    Subject,
):
    """The tests of a storage. Subclass it: :class:`Subject` has what a subclass defines."""


class LogConformance(
    LogAppendTests,
    LogReadTests,
    LogGroupTests,
    LogFailureTests,
    LogProcessTests,
    LogSubject,
):
    """The tests of a log. Subclass it: :class:`LogSubject` has what a subclass defines."""
