# SPDX-License-Identifier: Apache-2.0
"""What the core does with any storage; the storages themselves are plugins.

======================  ============================================================
``time_limit.py``       limits how long a call of the storage may take
``readiness.py``        checks whether the storage answers (``/readyz``)
``log_lag.py``          how far the storage is behind the log, if there is one
``log_progress.py``     the same for an operator, with what needs attention
``retention.py``        deletes records that are older than the config allows
``budgets.py``          computes how full the budgets of dead letters are
``dropped_changes.py``  reports the changes of profiles that a limit dropped
``export.py``           reads the records of a store as JSON
``copy.py``             copies everything in one store to another
``copy_records.py``     copies what the console keeps: keys, audit and counters
``copy_report.py``      what a copy reports, and how it compares
``keys.py``             the write keys of the config and of the store
``saved_keys.py``       saves the keys of the store beside the config, if there is a log
``key_changes.py``      creates, disables, enables and archives write keys
``audit.py``            records who changed what, for the operator
``letter_groups.py``    groups dead letters by what is wrong with them
======================  ============================================================

The interface of a storage is in :mod:`engage.api.storage`.
"""
