# SPDX-License-Identifier: Apache-2.0
"""What the server reports about itself.

=================  ===================================================================
``logs.py``        the log: a line for each request, and other lines
``metrics.py``     what is counted
``prometheus.py``  the same numbers for Prometheus
``history.py``     the counters per minute and hour, for the console
``refusals.py``    the latest requests that were refused as a whole, for the console
``recorder.py``    writes both to the store, in the background
=================  ===================================================================
"""
