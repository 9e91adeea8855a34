# SPDX-License-Identifier: Apache-2.0
"""Maintenance of any store: check it, read it, copy it, delete old data.

======================  ============================================================
``time_limit.py``       limits how long a call of the storage may take
``readiness.py``        checks whether the storage answers (``/readyz``)
``retention.py``        deletes records that are older than the config allows
``budgets.py``          computes how full the budgets of dead letters are
``dropped_changes.py``  reports the changes of profiles that a limit dropped
``export.py``           reads the records of a store as JSON
``cursor_file.py``      a file that says up to which event an export has written
``copy.py``             copies everything in one store to another
``copy_records.py``     copies the console's data: keys, audit and counters
``copy_report.py``      the report of a copy, and its comparison of records
``backups.py``          what a backup leaves out, and the record of the last one
``durable.py``          makes a change of a folder durable
``erasures.py``         the file of erasures beside the config
``tombstones.py``       the erasures that a store knows
``verify/``             proves that a store is what its events say
``audit.py``            records who changed what, for the operator
``letter_groups.py``    groups dead letters by their cause
``live.py``             the newest events and dead letters, read once a second
``refused.py``          requests that were refused as a whole
======================  ============================================================

The interface of a storage is in :mod:`engage.api.storage`.
"""
