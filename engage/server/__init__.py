# SPDX-License-Identifier: Apache-2.0
"""The processes that ``engage serve`` and ``engage load`` start, watch and stop.

=======================  ===========================================================
``serve.py``             opens the socket, and runs the supervisor
``supervisor.py``        starts the workers and replaces those that die
``announcement.py``      reports where the console is and how to sign in
``console_keeper.py``    starts the console and replaces it when it dies
``children.py``          starts a child process and reads what it reports
``child.py``             the main program of a child process
``console.py``           the console without a server beside it
``worker.py``            one process: opens the store, serves, drains, closes
``load.py``              runs the supervisor of the loaders
``load_supervisor.py``   starts the loaders, and answers whether they are ready
``load_endpoints.py``    serves ``/readyz`` and ``/metrics`` of the loaders
``loader.py``            one process that loads: opens log and store, loads, drains
``reload.py``            reads a part of the log again
``metrics_endpoint.py``  serves ``/metrics`` for Prometheus on a separate port
=======================  ===========================================================
"""
