# SPDX-License-Identifier: Apache-2.0
"""The errors of engage; their tree stands in :mod:`engage.api`."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EngageError",
    "NothingSigned",
    "PayloadInvalid",
    "SignatureMismatch",
    "StorageError",
    "StorageIncompatible",
    "StorageMissing",
    "StorageUnavailable",
    "WebhookError",
]


class EngageError(Exception):
    """Base of every error that engage or a plugin raises on purpose."""


class ConfigError(EngageError):
    """An option of a plugin is wrong. The message is ``<option>: <rule>``, and has no secret; the
    core says before it where in the config that is."""


class StorageError(EngageError):
    """Base of what a storage raises."""


class StorageUnavailable(StorageError):
    """The storage cannot answer now; the same call may succeed later. The cause is the driver's."""


class StorageMissing(StorageError):
    """There is no store at the configured place, and the caller did not allow to create one."""


class StorageIncompatible(StorageError):
    """The store was made by a newer version (``min_reader`` is above ours), or is not a store."""


class WebhookError(EngageError):
    """Base of what a webhook provider raises."""


class SignatureMismatch(WebhookError):
    """The delivery does not verify. The message is logged, never sent."""


class NothingSigned(SignatureMismatch):
    """The delivery holds nothing that the provider's scheme could have signed (400)."""


class PayloadInvalid(WebhookError):
    """A verified delivery cannot be translated. It is kept as a dead letter."""
