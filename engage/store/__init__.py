# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: what engage keeps, and the seam at which a storage keeps it.

The rules are functions without IO, written once for all storages. They say what is read and written
in *steps* over *tables*, and a storage executes these: see ``tables.py``.

====================  ==============================================================
``tables.py``         the seam: tables, steps, plans, and what an executor guarantees
``pages.py``          pages of a table, and deleting its oldest rows
``records.py``        records, such as write keys, with their versions
``counts.py``         counters per minute, hour and day
``suppressions.py``   addresses to which nothing must be sent
``letters.py``        dead letters, and their budgets
``facade.py``         the interfaces of :mod:`engage.api` that the rest of engage calls, as plans
``memory.py``         an executor in memory
====================  ==============================================================

A storage moves to the seam table by table: what is not in this list is still its own work.
"""
