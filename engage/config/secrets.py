# SPDX-License-Identifier: Apache-2.0
"""Which texts are no secret, although they stand where a secret is expected.

Shells, ``docker run --env-file``, editors and spreadsheets leave line breaks, blanks, quotation
marks and names of variables in a value. No service issues such a secret. With it, each signature is
wrong, or anyone can make it.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

__all__ = ["doubt", "stain"]

_QUOTES: Final = "\"'`´‘’‚‛“”„‟«»"
#: What stands before the secret in a header, or in a secret of Standard Webhooks.
_SCHEME: Final = re.compile(r"^(?:(?:bearer|basic|token)\s+|whsec_)", re.IGNORECASE)
#: A variable, as shells, Windows and templates write it, or words in angle brackets.
_PLACEHOLDER: Final = re.compile(
    r"\$\{?[A-Za-z_]\w*\}?|\$\(.*\)|%\w+%|\{\{.*\}\}|<[^<>]*\s[^<>]*>", re.ASCII | re.DOTALL
)
#: The words of examples, without what separates them.
_EXAMPLE: Final = re.compile(
    r"(?:please)?(?:change|replace)(?:me|it|this)\d*|todo|fixme"
    r"|(?:enter|insert|put)?your\w*(?:secret|key|password|token)(?:here)?\d*"
)


def stain(secret: str) -> str | None:
    """Return why a text is refused as a secret, without the text; ``None`` if it is clean."""
    for index, character in enumerate(secret):
        kind = unicodedata.category(character)
        edge = index in (0, len(secret) - 1)
        hidden = kind in ("Cc", "Cs") or character == "\ufeff"
        if hidden or (edge and (kind == "Cf" or character.isspace())):
            where = "begins with" if index == 0 else "ends with" if edge else "contains"
            what = "white space" if character.isspace() else "a control or invisible character"
            if character.splitlines() == [""]:
                what = "a line break"
            return f"{where} {what} (U+{ord(character):04X})"
    bare = _SCHEME.sub("", secret.strip(_QUOTES))
    if _PLACEHOLDER.fullmatch(bare) or _EXAMPLE.fullmatch(re.sub(r"[\W_]", "", bare.lower())):
        return (
            "is a placeholder; write the secret itself, or ${NAME} for a variable of the"
            " environment"
        )
    return None


def doubt(secret: str, *, measured: bool = True) -> str | None:
    """Return why a clean secret is probably not the one that was meant; ``None``: no reason.

    :param measured: whether its length says something.
    """
    if len(secret) > 1 and secret[0] in _QUOTES and secret[-1] in _QUOTES:
        return "is in quotation marks, which are a part of the secret"
    if measured and len(secret) < 16:
        return "has fewer than 16 characters, so it can be guessed"
    return None
