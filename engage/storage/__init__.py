# SPDX-License-Identifier: Apache-2.0
"""What the core does with any storage; the storages themselves are plugins.

==================  ============================================================
``time_limit.py``   limits how long a call of the storage may take
``readiness.py``    whether the storage answers (``/readyz``)
``retention.py``    deletes what is older than the config allows
``export.py``       the records of a store, one after another
``copy.py``         all records of one store into another
==================  ============================================================
"""
