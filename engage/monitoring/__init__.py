# SPDX-License-Identifier: Apache-2.0
"""The log, the metrics and the history of the server.

=================  ========================================================================
``logs.py``        the log: a line for each request, and other lines
``metrics.py``     the table of everything that is counted
``prometheus.py``  reads the table for Prometheus
``history.py``     reads it into counters per minute and hour; writes these to the store
``sampler.py``     the latest requests that were refused as a whole; how often a line is logged
``visible.py``     escapes text of strangers, for people who read it
=================  ========================================================================
"""
