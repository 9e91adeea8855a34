# SPDX-License-Identifier: Apache-2.0
"""Write keys: who may write events.

=================  ================================================================
``auth.py``        finds the workspace of a write key
``limits.py``      whether a key may send this now: its rules, rates and quotas
``table.py``       keeps the table of write keys up to date
``effective.py``   the write keys of the config and of the store
``changes.py``     creates, disables, enables and archives write keys
=================  ================================================================
"""
