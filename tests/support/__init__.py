# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests. Test modules import from here and never from each other.

Tests are in the folder of the code they test: ``engage/pipeline/decode.py`` has
``tests/pipeline/test_decode.py``. ``tests/contract`` tests the HTTP API of a whole server,
``tests/sdks``, ``tests/clients`` and ``tests/browser`` what published clients send to it.
``tests/faults`` has the programs of ``make chaos``, ``make fuzz`` and ``make soak``.

A storage or a pipeline, without HTTP:

- ``rules``: the tests of what engage keeps, for any storage: ``scans`` of events, ``profiles``,
  ``users``, ``visitors``, ``visitor_limits`` and ``identifiers``; ``subscriptions`` and
  ``suppressions``; ``dead_letters``, ``records`` and ``counts``; ``erasures`` and ``verification``
- ``people``: a store with a person in every part of it
- ``memory_store``: a storage in memory that refuses, fails or waits as a test wants
- ``memory_log``: a log in memory, whose partitions lose their leader, are slow or delete records;
  ``loaders`` runs loaders on it, ``log_loading`` loads what is in it into a store
- ``pipeline``: the pipeline on that storage
- ``group_commits``: a group commit whose calls a test records, holds and fails
- ``replay``: the pipeline on a real store, and what checks and replays dead letters
- ``sqlite``: SQLite stores, also on a disk that is full; ``sqlite_keys``: SQLite engines that merge
  their keys after a few events
- ``power_cuts``: clients of an SQLite store whose disk fails; ``recorded_disk`` lets it fail, and
  builds what it may hold after a power cut; ``sitecustomize`` makes the limits of a store small
- ``writer``: SQLite stores that a process writes; ``writer_loop``: the loop of such a process in a
  thread of the test
- ``mongo``: servers that speak MongoDB's protocol; ``mongo_proxy`` makes one misbehave,
  ``mongo_conformance`` is the conformance suite on one
- ``postgres``: a PostgreSQL server that a test may kill, stop and configure
- ``executors``: plans of all steps over some tables, for comparing executors
- ``kafka``: three Kafka nodes that a test may kill, and brokers without Java; ``tcp_proxy`` cuts
  and holds connections, ``kafka_log`` makes logs on them, and writers and readers
- ``hosts``: hosts of their own on this machine, which a test cuts off
- ``distributions``: installed plugin packages; ``examples``: those that the pages of docs/ build
- ``exports``: the store of a config file: opened for a call, or what ``engage export`` would write
- ``flaws``: storages, logs and readers with one flaw, which the conformance suites must find
- ``exactly_once``: whether each acknowledged event is stored, once

A server and clients:

- ``server_process``: ``engage serve`` as a process; start here to test a whole server;
  ``nursery`` forks it, and ``made_up_version`` makes it one of the next version
- ``preferences``: links to the preferences page of such a server, and groups to choose from
- ``identity``: such a server that verifies users, and their hashes
- ``senders``: threads that send events to it while a test breaks what is behind it
- ``loader_process``: ``engage load`` as a process beside it, and how its store is judged
- ``console``: the console of such a server, and a client that is signed in to it
- ``connections``: connections of which it is known which worker has them
- ``operator``: a person who uses the console in a browser
- ``console_data``: a server with something to see on every page of its console
- ``server_inprocess``: the whole server in the test's event loop, which is faster and lets a test
  make its storage fail
- ``http_echo``: the HTTP connection with a small application behind it
- ``http_client``: a client that sends any bytes and reads answers strictly
- ``http_corpus``, ``http_playing``: raw requests of all kinds, and what a server does with each
- ``http_errors``: checks that every error answer has the same shape
- ``reverse_proxy``: a reverse proxy that counts requests and loses answers
- ``overload``: clients that send more than a server can store
- ``traffic``: random requests to a server that is killed, and what the store must have afterwards

Webhook providers:

- ``providers``: makes a provider and requests to it; recorded signatures and translations
- ``provider_cases``: the conformance case of each provider
- ``provider_static``: providers that send a static credential
- ``provider_sns``: signs messages as Amazon SNS does
- ``provider_senders``: genuine deliveries of each provider, as a forger changes them
- ``provider_http``: config lines of webhooks, and deliveries over HTTP

Programs and files:

- ``each``: one test for many cases, which names every case that fails
- ``verifying``: stores that are verified, and a server whose store is
- ``commands``: commands of ``engage`` in the process of the test
- ``times``: clocks that a test sets; ``system_clock``: that of the machine; ``virtual_time``: time
  that passes only while a test waits
- ``waiting``: waits until a condition is true; ``loop_time``: how long the event loop is held
- ``processes``: the processes that another one started
- ``png``: small picture files
- ``nginx``: nginx with the configs of docs/
- ``cache``: keeps what was installed or built once; ``prepare`` fills it before the tests run
- ``venv``, ``node``, ``go``, ``browser``: virtual environments, Node, Go, Chromium; ``axe`` finds
  what is not accessible on a page
- ``config_page``, ``provider_page``, ``clients_page``: the tables of docs/configuration.md and
  docs/write-a-provider.md, and the examples of docs/clients.md
- ``dittofeed_page``: the examples of docs/from-dittofeed.md, and a server with its config
"""
