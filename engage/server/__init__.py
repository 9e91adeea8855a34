# SPDX-License-Identifier: Apache-2.0
"""The processes that ``engage serve`` and ``engage load`` start, watch and stop.

=======================  ===========================================================
``serve.py``             opens the socket, and runs the supervisor
``supervisor.py``        starts the workers and replaces those that die
``announcement.py``      reports where the console is and how to sign in
``keepers.py``           the console and the helper process of the storage
``children.py``          starts a child process, and kills one that hangs
``child.py``             the main program of a child process
``console.py``           the console without a server beside it
``worker.py``            one process: opens the store, serves, drains, closes
``load/``                the processes of ``engage load``
``metrics_endpoint.py``  serves ``/metrics`` for Prometheus on a separate port
=======================  ===========================================================
"""
