# SPDX-License-Identifier: Apache-2.0
"""The processes that ``engage serve`` starts, watches and stops.

=======================  ===========================================================
``serve.py``             opens the socket, and runs one worker or a supervisor
``supervisor.py``        starts the workers and replaces those that die
``child.py``             the main program of a supervised worker
``console.py``            the console without a server beside it
``worker.py``            one process: opens the store, serves, drains, closes
``metrics_endpoint.py``  serves ``/metrics`` for Prometheus on a separate port
=======================  ===========================================================
"""
