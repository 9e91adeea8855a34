# SPDX-License-Identifier: Apache-2.0
"""The processes: what ``engage serve`` starts, watches and stops.

=======================  ===========================================================
``serve.py``             opens the socket; runs one worker, or a supervisor
``supervisor.py``        starts the workers and replaces those that die
``child.py``             the main program of a supervised worker
``worker.py``            one process: open the store, serve, drain, close
``metrics_endpoint.py``  ``/metrics`` for Prometheus
=======================  ===========================================================
"""
