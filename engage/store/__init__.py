# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: what engage keeps, and the seam at which a storage keeps it.

Each file has the tables, the rules and the methods of a storage for one thing. The rules are
functions without IO, written once for all storages. They say what is read and written
in *steps* over *tables*, and a storage executes these: see ``tables.py``.

====================  ==============================================================
``tables.py``         the seam: tables, steps, plans, and what an executor guarantees
``pages.py``          pages of a table, and deleting its oldest rows
``records.py``        records, such as write keys, with their versions
``counts.py``         counters per minute, hour and day
``erasures.py``       the erasures that a store knows, and what they cover
``suppressions.py``   addresses to which nothing must be sent
``events.py``         events, each identity once, and the marks of erased ones
``letters.py``        dead letters, within their budgets
``choices.py``        subscription choices, and the history of their changes
``changes.py``        what events change in users, visitors and groups, and their limits
``profiles.py``       users, visitors and groups as they are stored, and who belongs to whom
``people.py``         users with their visitors, merged when they are read; erasing
``remembered.py``     what a process that writes remembers between its plans
``keys.py``           which strings can be stored, and keys that stand for several of them
``identifiers.py``    users and visitors, found by their identifiers
``facade.py``         the base class of a storage
``memory.py``         an executor in memory
====================  ==============================================================

MongoDB executes the plans of records, suppressions and dead letters, those that read choices and
people, and the one that applies the changes of events. It has its own way to store events, choices
and counters, and to delete people: each is one document, or several without a transaction.
"""
