# SPDX-License-Identifier: Apache-2.0
"""The built-in providers pass the conformance suite; the cases are in ``support``."""

from __future__ import annotations

from support.provider_cases import CASES

for _case in CASES.values():
    globals()[f"Test{_case.__name__}"] = type(f"Test{_case.__name__}", (_case,), {})
