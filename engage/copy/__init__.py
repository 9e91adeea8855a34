# SPDX-License-Identifier: Apache-2.0
"""Copies of a whole store: in another storage, and as a backup.

==============  ============================================================
``copy.py``     copies everything in one store to another
``records.py``  copies the console's data: keys, audit and counters
``report.py``   the report of a copy, and its comparison of records
``backups.py``  what a backup leaves out, and the record of the last one
==============  ============================================================
"""
