# SPDX-License-Identifier: Apache-2.0
"""Prove that a store is what its events say, while it is in use.

==============  ===================================================================
``run.py``      reads everything once, and hands it to the others
``notes.py``    keeps what was read, in a temporary database
``people.py``   compares people, links and choices with what events and history make of them
``letters.py``  compares dead letters with their budgets and with the stored events
``report.py``   what was found
==============  ===================================================================
"""

from engage.verify.report import Report
from engage.verify.run import Settings, verify

__all__ = ["Report", "Settings", "verify"]
