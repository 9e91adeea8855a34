# SPDX-License-Identifier: Apache-2.0
"""engage: a self-hosted event-ingestion server for customer-engagement data.

The parts of the package, along the path of a request. Each folder's ``__init__.py`` describes its
files, and ``docs/architecture.md`` has the picture.

==================  ================================================================================
the path of a request
----------------------------------------------------------------------------------------------------
``cli/``            the commands: ``engage serve``, ``init``, ``check``, ``export``, …
``server/``         the processes: a supervisor, its workers, the console; serves ``/metrics``
``console/``        the web pages for the operators, in a separate process; no worker imports it
``app.py``          builds the server from a config, in one function
``http1/``          HTTP/1.1: connections, requests, limits of size and time
``handlers/``       the HTTP API: operations and their paths, answers, CORS, OpenAPI, pages
``deliveries/``     the steps of a webhook delivery: verify, translate, store, answer
``keys/``           write keys: the table of keys, who may write, creating and disabling them
``pipeline/``       the steps of an event: decode, validate, normalise, transform, store
``subscriptions/``  who receives what: signed links, choices, opt-outs
``log/``            all that exists only with ``[log]``: appending, loading, lag
------------------  --------------------------------------------------------------------------------
other work on a store
----------------------------------------------------------------------------------------------------
``people/``         everything that a store has of a person: exporting and erasing it
``verify/``         proves that a store is what its events say
``copy/``           copies of a whole store, and backups
``upkeep/``         what a server does by itself: readiness, retention, budgets
``reading/``        pages, time limits, exports, the newest events
``audit.py``        who changed what on this server
``durable.py``      makes a change of a folder durable
------------------  --------------------------------------------------------------------------------
what these parts use
----------------------------------------------------------------------------------------------------
``config/``         reads and checks the config file
``registry/``       finds the plugins, and makes those that the config selects
``errors.py``       the error codes with their statuses, and the body of an error
``ids.py``          makes the message ids of items that have none
``times.py``        the times in payloads
``monitoring/``     the log, the metrics and the history of the server
``__main__.py``     ``python -m engage``
------------------  --------------------------------------------------------------------------------
PUBLIC, for plugins
----------------------------------------------------------------------------------------------------
``api/``            all that a plugin imports: events, the interfaces of storages, logs, providers
``store/``          what is kept: the rules as plans over tables, which a storage executes
``hookspecs.py``    the hooks that a plugin implements
``webhooks/``       what webhook providers share: signatures, parsing, making events
``testing/``        the conformance suites for storages, logs and webhook providers
==================  ================================================================================

The storages, the logs and the webhook providers are plugins, in the folder ``plugins/`` beside this
one; the JSON Schemas of the config, the payloads and the answers are in ``schemas/``.

Where to add something:

- a field to the error body: ``errors.py``
- a rate limit: ``keys/limits.py``; its keys in ``config/``
- an endpoint: ``handlers/``
- a console page: a handler in ``console/pages/`` with its template, and its route in
  ``console/application.py``
- a method of storages: beside its rule in ``store/``; ``store/facade.py`` has the class
- a method of logs: ``api/log.py``, with its tests in ``testing/``, then ``plugins/kafka/``
- a webhook provider: one file in ``plugins/``, with the help of ``webhooks/``
- a key of the config: ``config/sections.py`` and ``schemas/config.json``
- a command: one file in ``cli/``
"""

__version__ = "0.3.0.dev0"
