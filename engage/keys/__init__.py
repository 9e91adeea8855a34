# SPDX-License-Identifier: Apache-2.0
"""Write keys and signed links: who may write events, and who may change choices.

=================  ================================================================
``auth.py``        finds the workspace of a write key
``rules.py``       what a key may not do: origins, operations, secrets
``table.py``       keeps the table of write keys up to date
``effective.py``   the write keys of the config and of the store
``links.py``       finds the person for whom a link was signed
``changes.py``     creates, disables, enables and archives write keys
=================  ================================================================
"""
