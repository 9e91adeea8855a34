# SPDX-License-Identifier: Apache-2.0
"""A person: everything that a store has of one, and erasing it.

=================  ================================================================
``addresses.py``   the addresses that an operator names, and those in a delivery
``person.py``      finds what belongs to a person, and exports it
``own_events.py``  what the events of a user say of it, without its visitors
``erase.py``       erases a user, and carries out a file of erasures
``requests.py``    the requests to erase that providers reported
``tombstones.py``  the erasures that a store knows
=================  ================================================================

The file of erasures is :mod:`engage.config.erasures_file`.
"""
