# SPDX-License-Identifier: Apache-2.0
"""Which events are stored, by their keys, without a unique index.

=================  =================================================================
``event_keys.py``  keys in memory, in filters and in a table; which writer may write
``merge.py``       moves keys from memory into the table, in small steps
``parts.py``       the parts of the table, and the filters that recognise most new events
``saved.py``       the file that keeps keys and filters for the next start
=================  =================================================================
"""
