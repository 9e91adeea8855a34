# SPDX-License-Identifier: Apache-2.0
"""From a request to a call of the pipeline, and from its result to an answer.

====================  ==============================================================
``operations.py``     the table: paths, methods and documentation of each operation
``routes.py``         which handler serves which operation, and the router
``base.py``           the work that all handlers share: check, answer, errors, CORS
``calls.py``          identify, track, page, screen, group, alias, batch
``subscriptions.py``  a user's subscriptions, for programs
``preferences/``      the page on which people choose what they receive
``webhook.py``        deliveries of webhook providers
``settings.py``       settings for the browser SDKs of Segment and RudderStack
``files.py``          the snippet's script, the API's description and its page, the page at ``/``
``static/``           the script and the pages that ``files.py`` serves
``health.py``         ``/healthz`` and ``/readyz``
``missing.py``        404, and the page at ``/``
``cors.py``           the CORS headers
``openapi.py``        makes the description of the API
====================  ==============================================================
"""
