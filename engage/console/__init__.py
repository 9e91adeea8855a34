# SPDX-License-Identifier: Apache-2.0
"""The console: web pages for the people who run the server.

It is a separate process (:mod:`engage.console.process`), and talks to the store through the
interfaces of :mod:`engage.api`. Nothing that answers clients imports it.

===================  ===============================================================================
``process.py``       the program: opens the store, listens, serves, drains
``application.py``   the paths and their handlers; the bounds of the HTTP server
``base.py``          what every page does: Host, methods, foreign forms, session, headers, errors
``headers.py``       the headers of every answer
``housekeeping.py``  deletes records of the console when they are old
``files.py``         the static files, and the answer to a path that is not a page
``services.py``      what the pages use: the store, the config and the parts below
``reader.py``        calls of the store, a few at a time and each within a time limit
``addresses.py``     the console's URL, the hosts and origins it accepts, the address of a client
``formats.py``       how templates show text of strangers, times, numbers
``sessions.py``      who is signed in: cookies, and the secret that signs them
``links.py``         one-time links for signing in
``passwords.py``     hashes of passwords; how many guesses there may be
``jobs.py``          replays of many dead letters, in the background
``job_records.py``   the state of these replays, and where all processes find it
``sign_in.py``       the pages ``link``, ``login`` and ``logout``, and ``healthz``
``sparks.py``        small curves as SVG
``budgets.py``       how much room is left for dead letters
``pretty.py``        JSON on several lines, unchanged
``pointers.py``      finds the values of JSON pointers in a text
``source_lines.py``  the lines of a text that JSON pointers name
``badge.py``          the number of rejected events in the navigation
``live.py``          the newest events and dead letters, read once a second for all tabs
``refused.py``       requests that were refused as a whole
``snippets.py``      the lines that send a first event
``history.py``       the numbers of the overview: the counters, summed
``pages/``           the pages, one file each
``templates/``       their HTML
``static/``          style sheets and scripts
===================  ===============================================================================
"""
