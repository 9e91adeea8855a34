# SPDX-License-Identifier: Apache-2.0
"""Everything that exists only with ``[log]``: a replicated queue in front of the storage.

=================  ================================================================
``front.py``       the log in front of the storage, its lag and its state
``ingest.py``      appends events and dead letters where a server without a log stores them
``appending.py``   appends events to the log, a call for each request
``catch_up.py``    waits until the loaders have stored the events in the log
``loading.py``     reads the log, for the loaders: batches, offsets, pauses, gaps
``writing.py``     writes a batch to the storage, and keeps dead letters
``letters.py``     makes the dead letters of records that a loader cannot store
``retries.py``     calls the storage or the log again until it answers
``lag.py``         how far the storage is behind the log
``gaps.py``        the records that the log deleted before they were loaded
=================  ================================================================

Only these import it, each inside a function: ``engage.app.build``, the commands in ``engage/cli/``
and the console; and the processes that run it, in ``engage/server/load/``.

To be rid of the log, delete these two folders, the command (``engage/cli/load.py``), the interface
(``engage/api/log.py`` and ``log_records.py``), its suite (``engage/testing/log/``), the plugin
(``plugins/kafka/``) and ``[log]`` in the config. The type checker names the few lines that are
left.
"""
