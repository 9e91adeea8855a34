# SPDX-License-Identifier: Apache-2.0
"""The config file: TOML in, frozen dataclasses out.

====================  ============================================================
``config.py``         reads the file, and reports all errors in it
``sections.py``       the sections of the file
``interpolation.py``  replaces ``${VAR}`` and ``${file:PATH}`` in strings
``secrets.py``        which texts are no secret
``schema_check.py``   checks values against a JSON Schema; errors by dotted key
``colors.py``         the contrast of colours
``removed.py``        keys of earlier versions, which are read and reported
``erasures_file.py``  the file of erasures beside it
====================  ============================================================

A new key needs a field in ``sections.py`` and an entry with its default in ``schemas/config.json``,
from which the tables of ``docs/configuration.md`` are generated. A key that is removed moves to
``x-removed`` of its table there, with a sentence that says what decides now.
"""

from __future__ import annotations

from engage.config.config import *
from engage.config.sections import *
