# SPDX-License-Identifier: Apache-2.0
"""What a server does by itself with any store.

======================  ============================================================
``readiness.py``        checks whether the storage answers (``/readyz``)
``retention.py``        deletes records that are older than the config allows
``budgets.py``          computes how full the budgets of dead letters are
``dropped_changes.py``  reports the changes of profiles that a limit dropped
======================  ============================================================
"""
