# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: the conformance suites that any storage or webhook provider must pass.

They need pytest and hypothesis (``pip install engage-server[testing]``) and no pytest plugin.

A storage is shown to keep its promises by a class of a few lines::

    from engage.testing import StorageConformance

    class TestMyStorage(StorageConformance):
        plugin = "my_plugin"

        def options(self, tmp_path):
            return {"path": str(tmp_path / "events")}

        def break_store(self, options): ...
        def mend_store(self, options): ...

``options`` gives a store of its own to each test. ``break_store`` makes the real thing fail (stop
the server, put a folder in the file's place) and ``mend_store`` lets it work again; without them
the tests of failure fail. What a storage is not (a :class:`~engage.api.ProfileStore` …) is skipped.

For a webhook provider see :class:`ProviderConformance` (:mod:`engage.testing.providers`).
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "engage.testing.events",
    "engage.testing.failures",
    "engage.testing.dead_letters",
    "engage.testing.processes",
    "engage.testing.profiles",
    "engage.testing.providers",
    "engage.testing.scans",
    "engage.testing.subscriptions",
    "engage.testing.users",
)

from .dead_letters import LetterTests  # noqa: E402
from .events import EventTests  # noqa: E402
from .factories import WORKSPACE, event, identify, letter  # noqa: E402
from .failures import FailureTests  # noqa: E402
from .harness import Bench, Subject, on_store  # noqa: E402
from .processes import ProcessTests  # noqa: E402
from .profiles import ProfileTests  # noqa: E402
from .providers import ProviderConformance  # noqa: E402
from .scans import ScanTests  # noqa: E402
from .subscriptions import SubscriptionTests  # noqa: E402
from .users import UserTests  # noqa: E402

__all__ = [
    "WORKSPACE",
    "Bench",
    "ProviderConformance",
    "StorageConformance",
    "Subject",
    "event",
    "identify",
    "letter",
    "on_store",
]


class StorageConformance(
    EventTests,
    ScanTests,
    FailureTests,
    ProcessTests,
    ProfileTests,
    UserTests,
    SubscriptionTests,
    LetterTests,
    Subject,
):
    """What every storage promises. Subclass it; see the module, and :class:`Subject` for what a
    subclass says about its storage.
    """
