# SPDX-License-Identifier: Apache-2.0
"""The rules of what engage keeps, on any storage.

They are in ``engage/store``, so a storage need not be tested for them: the conformance suite
compares it with the storage in memory. These tests run on that, on SQLite, and on MongoDB, which
has some rules of its own.
"""

from .counts import CountTests
from .dead_letters import DeadLetterTests
from .erasures import ErasureTests
from .identifiers import IdentifierTests
from .profiles import ProfileTests
from .records import RecordTests
from .scans import ScanTests
from .subscriptions import SubscriptionTests
from .suppressions import SuppressionTests
from .users import UserTests
from .verification import VerificationTests
from .visitor_limits import VisitorLimitTests
from .visitors import VisitorTests


class RuleTests(
    ScanTests,
    ProfileTests,
    UserTests,
    VisitorTests,
    VisitorLimitTests,
    IdentifierTests,
    SubscriptionTests,
    SuppressionTests,
    DeadLetterTests,
    RecordTests,
    CountTests,
    ErasureTests,
    VerificationTests,
):
    """All of them, beside a :class:`~engage.testing.storage.harness.Subject`."""
