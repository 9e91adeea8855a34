# SPDX-License-Identifier: Apache-2.0
"""Write keys: who may write events.

=================  ================================================================
``auth.py``        finds the workspace of a write key
``rules.py``       what a key may not do: origins, operations, secrets
``guards.py``      how fast a key may send, and how many refusals an address gets
``buckets.py``     token buckets in memory that the workers share
``quotas.py``      what keys and workspaces may store in a day
``table.py``       keeps the table of write keys up to date
``effective.py``   the write keys of the config and of the store
``changes.py``     creates, disables, enables and archives write keys
=================  ================================================================
"""
