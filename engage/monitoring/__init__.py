# SPDX-License-Identifier: Apache-2.0
"""What the server reports about itself.

==============  ===============================================================
``logs.py``     the log: a line for each request, and other lines
``metrics.py``  the Prometheus metrics
==============  ===============================================================
"""
