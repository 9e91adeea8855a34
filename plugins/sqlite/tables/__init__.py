# SPDX-License-Identifier: Apache-2.0
"""The rows of each table: reading and writing them, in a transaction of the caller.

====================  =================================================================
``events.py``         events
``profiles.py``       users, visitors and groups: applying the changes of a write
``people.py``         users with their visitors, merged when they are read
``identifiers.py``    the values by which users and visitors are looked up
``changes.py``        the profile changes of one write, folded
``subscriptions.py``  subscription choices and their history
``paging.py``         pages of a table
====================  =================================================================
"""
