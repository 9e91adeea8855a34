# SPDX-License-Identifier: Apache-2.0
"""The process that makes all writes of a host, and its clients.

=================  ============================================================
``writer.py``      what the storage calls for all writes
``client.py``      finds or starts the process, and sends it requests
``link.py``        the client's connection to it
``start.py``       starting the process
``process.py``     the process: its signals, its user, its log
``server.py``      the loop of the process
``turns.py``       the requests of all clients, in turns
``peer.py``        a client, as the loop sees it
``listening.py``   its listening socket
``host.py``        runs operations on the engine, with the settings that apply
``thread.py``      a thread that writes instead of the process
``usage.py``       its memory and processor time, for the metrics
``lock.py``        the lock that makes one process the writer
``protocol.py``    the messages
``operations.py``  the requests: their names and types
=================  ============================================================
"""
