# SPDX-License-Identifier: Apache-2.0
"""Who may see the console, and from where.

===================  ===============================================================================
``addresses.py``     the console's URL, the hosts and origins it accepts, the address of a client
``links.py``         one-time links
``passwords.py``     hashes of passwords; how many guesses there may be
``guesses.py``       wrong passwords in the audit
``sessions.py``      cookies, and the secret that signs them
``housekeeping.py``  deletes links and ended sessions when they are old
===================  ===============================================================================
"""
