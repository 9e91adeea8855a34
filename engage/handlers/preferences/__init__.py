# SPDX-License-Identifier: Apache-2.0
"""The page on which people choose what they receive, and one-click unsubscription (RFC 8058).

==============  ================================================================
``handler.py``  answers: the page, the form, one click, the errors as pages
``looks.py``    the looks of each workspace's page: texts, languages, colours, logo
==============  ================================================================

``page.html`` and ``style.css`` are the page, ``<language>.json`` its texts. There is no script.
"""
