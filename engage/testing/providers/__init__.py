# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of webhook providers.

================  ==================================================================
``suite.py``      the tests, and what a subclass defines
``mutations.py``  changed deliveries
================  ==================================================================
"""

from __future__ import annotations

from .mutations import Part
from .suite import ProviderConformance

__all__ = ["Part", "ProviderConformance"]
