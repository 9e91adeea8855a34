# SPDX-License-Identifier: Apache-2.0
"""The errors of engage; :mod:`engage.api` shows them as a tree."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EngageError",
    "ForeignCursor",
    "NothingSigned",
    "PayloadInvalid",
    "SignatureMismatch",
    "StorageError",
    "StorageIncompatible",
    "StorageMissing",
    "StorageOutdated",
    "StorageUnavailable",
    "WebhookError",
]


class EngageError(Exception):
    """Base of every error that engage or a plugin raises on purpose."""


class ConfigError(EngageError):
    """An option of a plugin is wrong.

    The message is ``<option>: <rule>`` and contains no secret. The core prepends the place of the
    option in the config.
    """


class StorageError(EngageError):
    """Base of the errors that a storage raises."""


class StorageUnavailable(StorageError):
    """The storage cannot answer now; the same call may succeed later.

    Its cause is the driver's error.
    """


class StorageMissing(StorageError):
    """There is no store at the configured place, and the caller did not allow creating one."""


class StorageIncompatible(StorageError):
    """The store needs a newer version of engage (``min_reader``), or it is not a store."""


class StorageOutdated(StorageIncompatible):
    """An earlier version of engage made the store, and the caller did not allow bringing it up to
    date: a server does."""


class ForeignCursor(StorageError):
    """The cursor belongs to another store, or to this one before it was restored. So this store
    cannot tell which events follow it."""


class WebhookError(EngageError):
    """Base of the errors that a webhook provider raises."""


class SignatureMismatch(WebhookError):
    """The provider did not sign the delivery. The message is logged, and never sent."""


class NothingSigned(SignatureMismatch):
    """The delivery has nothing that the provider's scheme could have signed (400)."""


class PayloadInvalid(WebhookError):
    """A verified delivery cannot be translated. It is kept as a dead letter.

    :param kind: what the service calls the delivery, if that is read; for the log.
    """

    def __init__(self, *args: object, kind: str = "") -> None:
        super().__init__(*args)
        self.kind = kind
