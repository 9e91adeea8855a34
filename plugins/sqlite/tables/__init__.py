# SPDX-License-Identifier: Apache-2.0
"""The rows of each table: reading and writing them, in a transaction of the caller.

====================  =================================================================
``events.py``         events
``identifiers.py``    the traits by which users and visitors are looked up
``paging.py``         pages of a table
====================  =================================================================
"""
