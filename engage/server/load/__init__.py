# SPDX-License-Identifier: Apache-2.0
"""The processes of ``engage load``. They run :mod:`engage.log`.

=================  ================================================================
``command.py``     ``engage load``: the parent, or on Windows the only process
``supervisor.py``  the parent of the loaders: starts them, replaces those that die
``process.py``     one loader process: opens, loads, drains, closes
``reload.py``      ``engage load --from``: reads a part of the log again
``endpoints.py``   ``/readyz`` and ``/metrics`` of the loaders
=================  ================================================================
"""
