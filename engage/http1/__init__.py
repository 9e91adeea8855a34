# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1: from a listening socket to a request, and from an answer to bytes.

====================  ==============================================================
``sockets.py``        opens the listening socket, counts file descriptors
``listener.py``       all connections of a process: accept, limit, drain
``acceptor.py``       accepts the connections of a socket
``shares.py``         how many connections each worker has
``handover.py``       a queue by which workers hand connections to each other
``balancer.py``       chooses the connections that move to another worker
``connection.py``     one connection: reads requests, enforces time and size limits
``occupant.py``       what a connection holds in memory, without HTTP
``capacity.py``       all connections and bytes of a process, and which one is given up
``exchange.py``       one request and its answer, as handlers see them
``shared.py``         what all connections share: bounds, capacity, the date
``body.py``           takes a body out of the input, by length or chunks
``chunked.py``        decodes a chunked body
``head.py``           parses the head of a request
``headers.py``        the headers of a request
``early_errors.py``   answers to requests that no handler sees
``grammar.py``        the grammar that several of these match
====================  ==============================================================
"""
