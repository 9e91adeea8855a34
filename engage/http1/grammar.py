# SPDX-License-Identifier: Apache-2.0
"""The part of HTTP's grammar (RFC 9110) that several modules match."""

from __future__ import annotations

from typing import Final

__all__ = ["TCHAR"]

#: One character of a token, such as a method or the name of a header (section 5.6.2); for regular
#: expressions.
TCHAR: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"
