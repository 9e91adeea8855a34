# SPDX-License-Identifier: Apache-2.0
"""The tests of a storage.

=====================  ==================================================================
``harness.py``         the members of a subclass (:class:`Subject`), and opening stores for it
``events.py``          the tests of writing and finding events
``scans.py``           the tests of scanning and expiring events, and of the newest ones
``follows.py``         the tests of following events
``profiles.py``        the tests of merging events into profiles
``users.py``           the tests of links, limits and scans of profiles
``visitors.py``        the tests of visitors, and of people merged from them
``visitor_limits.py``  the tests of visitors that give way to new ones
``identifiers.py``     the tests of users that are looked up by an identifier
``subscriptions.py``   the tests of subscription choices
``suppressions.py``    the tests of suppressed addresses
``erasures.py``        the tests of erasing people
``dead_letters.py``    the tests of dead letters
``records.py``         the tests of records
``counts.py``          the tests of counters
``backups.py``         the tests of backups, and of restoring them
``verification.py``    the tests of what ``engage verify`` reads
``steps.py``           the tests of executing plans
``failures.py``        the tests of a store that is broken
``processes.py``       the tests of several processes, of a killed one, and of syncs
=====================  ==================================================================
"""
