# SPDX-License-Identifier: Apache-2.0
"""The one writer of a store, and its clients.

=================  ============================================================
``writer.py``      what the storage calls for all writes: a client
``channel.py``     the client's connection to the writer
``server.py``      the writer: its loop, in the helper process or in a thread
``scheduler.py``   the requests of all clients, in turns, on the engine
``session.py``     a client, as the writer sees it
``lock.py``        the lock that makes one process the writer
``sockets.py``     the socket of the writer, and who is at the other end
``protocol.py``    the messages
``operations.py``  the requests: their names and types
=================  ============================================================
"""
