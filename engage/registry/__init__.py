# SPDX-License-Identifier: Apache-2.0
"""The installed plugins.

=================  ==================================================================
``discovery.py``   finds plugins through the entry-point group ``engage``
``registry.py``    checks the options in a config, and makes the selected plugins' objects
=================  ==================================================================
"""

from __future__ import annotations

from engage.registry.registry import *
