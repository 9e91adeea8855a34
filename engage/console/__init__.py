# SPDX-License-Identifier: Apache-2.0
"""The console: web pages for the people who run the server.

It is a separate process (:mod:`engage.console.process`), and talks to the store through the
methods of the storage. Nothing that answers clients imports it.

===================  ===============================================================================
``process.py``       the program: opens the store, listens, serves, drains
``application.py``   the paths and their handlers; the bounds of the HTTP server
``connections.py``   which connection gives way to another, and whose request is next
``base.py``          shared by all pages: Host, methods, foreign forms, session, headers, errors
``listing.py``       shared by the pages that list: filter, rows, cursors
``headers.py``       the headers of every answer
``files.py``         the static files, and the answer to a path that is not a page
``services.py``      the services of the pages: the store, the config and the parts below
``sign_in/``         who may see the pages: addresses, links, passwords, sessions
``data/``            the data that the pages read from the store
``display/``         how values become text, lines and curves
``pages/``           the pages, one file each
``templates/``       their HTML
``static/``          style sheets and scripts
===================  ===============================================================================
"""
