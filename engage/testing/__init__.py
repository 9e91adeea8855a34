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
``mend_store`` makes it work again; without these two, the tests of failures fail. The tests of an
interface that the storage does not have (:class:`~engage.api.ProfileStore` …) are skipped.

For a log in front of the storage see :class:`LogConformance`, which is used in the same way
(:class:`LogSubject` has what a subclass defines).

For a webhook provider see :class:`ProviderConformance` (:mod:`engage.testing.providers`).

====================  ==================================================================
``harness.py``        what a subclass defines (:class:`Subject`), and opening stores for it
``factories.py``      events, dead letters, records and counters for the tests
``events.py``         the tests of writing and finding events
``scans.py``          the tests of scanning and expiring events, and of the newest ones
``profiles.py``       the tests of merging events into profiles
``users.py``          the tests of links, limits and scans of profiles
``identifiers.py``    the tests of users that are looked up by an identifier
``subscriptions.py``  the tests of subscription choices
``dead_letters.py``   the tests of dead letters
``records.py``        the tests of records
``counts.py``         the tests of counters
``failures.py``       the tests of a store that is broken
``processes.py``      the tests of several processes, and of a killed one
``log_harness.py``    what a subclass defines (:class:`LogSubject`), and opening logs for it
``log_appending.py``  the tests of appending to a log
``log_reading.py``    the tests of one reader of a log: portions, places, what is left to read
``log_groups.py``     the tests of several readers of a log, which come and go
``log_failures.py``   the tests of a log that is broken, and of several processes
``providers.py``      the tests of webhook providers
``mutations.py``      changed deliveries, for the tests of providers
====================  ==================================================================
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "engage.testing.counts",
    "engage.testing.events",
    "engage.testing.failures",
    "engage.testing.dead_letters",
    "engage.testing.identifiers",
    "engage.testing.log_appending",
    "engage.testing.log_failures",
    "engage.testing.log_groups",
    "engage.testing.log_harness",
    "engage.testing.log_reading",
    "engage.testing.mutations",
    "engage.testing.processes",
    "engage.testing.profiles",
    "engage.testing.providers",
    "engage.testing.records",
    "engage.testing.scans",
    "engage.testing.subscriptions",
    "engage.testing.users",
)

from .counts import CountTests  # noqa: E402
from .dead_letters import DeadLetterTests  # noqa: E402
from .events import EventTests  # noqa: E402
from .factories import WORKSPACE, event, identify, letter  # noqa: E402
from .failures import FailureTests  # noqa: E402
from .harness import Bench, Subject, on_store  # noqa: E402
from .identifiers import IdentifierTests  # noqa: E402
from .log_appending import LogAppendTests  # noqa: E402
from .log_failures import LogFailureTests, LogProcessTests  # noqa: E402
from .log_groups import LogGroupTests  # noqa: E402
from .log_harness import LogBench, LogSubject, on_log  # noqa: E402
from .log_reading import LogReadTests  # noqa: E402
from .processes import ProcessTests  # noqa: E402
from .profiles import ProfileTests  # noqa: E402
from .providers import ProviderConformance  # noqa: E402
from .records import RecordTests  # noqa: E402
from .scans import ScanTests  # noqa: E402
from .subscriptions import SubscriptionTests  # noqa: E402
from .users import UserTests  # noqa: E402

__all__ = [
    "WORKSPACE",
    "Bench",
    "LogBench",
    "LogConformance",
    "LogSubject",
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
    EventTests,
    ScanTests,
    FailureTests,
    ProcessTests,
    ProfileTests,
    UserTests,
    IdentifierTests,
    SubscriptionTests,
    DeadLetterTests,
    RecordTests,
    CountTests,
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
