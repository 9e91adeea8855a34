# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1: from a listening socket to a request, and from an answer to bytes.

====================  ==============================================================
``sockets.py``        opens the listening socket, counts file descriptors
``listener.py``       all connections of a process: accept, limit, drain
``acceptor.py``       accepts the connections of a socket
``shares.py``         how many connections each worker has
``connection.py``     one connection: reads requests, enforces time and size limits
``capacity.py``       all connections and bytes of a process, and which one gives way
``shared.py``         shared by all connections: bounds, capacity, the date
``request.py``        the head of a request
``body.py``           takes a body out of the input, by length or chunks
``addresses.py``      from which address a client sends, also through proxies
``exchange.py``       one request and its answer, as handlers see them
``early_errors.py``   answers to requests that no handler sees
====================  ==============================================================
"""
