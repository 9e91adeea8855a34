# SPDX-License-Identifier: Apache-2.0
"""Who receives what: signed links, and the choices of users and visitors.

=================  ================================================================
``links.py``       finds the person for whom a link was signed
``choices.py``     reads and changes choices, authorised by a link
``opt_outs.py``    applies what providers report about subscriptions
``recipients.py``  finds the user of an event by an address or another trait
=================  ================================================================

The page on which people choose is in :mod:`engage.handlers.preferences`.
"""
