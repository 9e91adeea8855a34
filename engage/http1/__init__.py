# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1: from a listening socket to a request, and from an answer to bytes.

====================  ==============================================================
``sockets.py``        opens the listening socket
``listener.py``       all connections of a process: accept, limits, draining
``connection.py``     one connection: reads requests, keeps time and size limits
``exchange.py``       one request and its answer, as Tornado sees them
``head.py``           parses the head of a request
``chunked.py``        decodes a chunked body
``early_errors.py``   answers to requests that no handler sees
====================  ==============================================================
"""
