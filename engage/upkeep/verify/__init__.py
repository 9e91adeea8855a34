# SPDX-License-Identifier: Apache-2.0
"""Prove that a store is what its events say, while it is in use.

==============  ====================================================================
``run.py``      reads everything once, and hands it to the others
``notes.py``    keeps what was read, in a temporary database
``folds.py``    merges the events of a user, visitor or group
``compare.py``  compares a profile with what the events make of it
``people.py``   compares all profiles and links
``choices.py``  compares subscription choices with their history
``letters.py``  compares dead letters with their budgets and with the stored events
``report.py``   what was found
==============  ====================================================================
"""

from engage.upkeep.verify.report import Report
from engage.upkeep.verify.run import Settings, verify

__all__ = ["Report", "Settings", "verify"]
