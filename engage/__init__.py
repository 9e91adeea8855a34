# SPDX-License-Identifier: Apache-2.0
"""engage: a self-hosted event-ingestion server for customer-engagement data."""

__version__ = "0.1.0"
