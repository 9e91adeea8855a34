# SPDX-License-Identifier: Apache-2.0
"""The tests of a storage.

====================  ==================================================================
``harness.py``        the members of a subclass (:class:`Subject`), and opening stores for it
``histories.py``      any history leaves the same as in memory
``steps.py``          the tests of executing plans
``stored_events.py``  the tests of writing and finding events: values, identities, refusals
``follows.py``        the tests of following events
``backups.py``        the tests of backups, and of restoring them
``failures.py``       the tests of a store that is broken
``processes.py``      the tests of several processes, of a killed one, and of syncs
====================  ==================================================================
"""
