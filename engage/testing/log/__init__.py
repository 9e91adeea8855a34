# SPDX-License-Identifier: Apache-2.0
"""The tests of a log.

================  ==================================================================
``harness.py``    the members that a subclass defines (:class:`LogSubject`), and opening logs for it
``appending.py``  the tests of appending to a log
``reading.py``    the tests of one reader: batches, offsets, the backlog
``groups.py``     the tests of several readers, which come and go
``failures.py``   the tests of a log that is broken, and of several processes
================  ==================================================================
"""
