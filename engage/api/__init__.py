# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: everything that a plugin imports.

A plugin is a module named by an entry point of the group ``engage``. It implements hooks of
:mod:`engage.hookspecs`, marked with :data:`hookimpl`, and registers a storage, a log, a webhook
provider, a transform, an observer or a command.

The errors of engage, with the code that raises each, and its effect::

    EngageError
    ├── ConfigError             a plugin's factory: an option is wrong (start-up stops, exit 1)
    ├── StorageError
    │   ├── StorageUnavailable  a storage, a log: not now (503, Retry-After, nothing acknowledged)
    │   ├── StorageMissing      a storage, a log: there is none, and ``create`` is false
    │   ├── StorageIncompatible a storage: the store was made by a version that this one cannot read
    │   │   │                   a log: its settings allow it to lose acknowledged records
    │   │   └── StorageOutdated a storage: an earlier version made it, and ``create`` is false
    │   └── ForeignCursor       a storage: the cursor belongs to another (or a restored) store
    └── WebhookError
        ├── SignatureMismatch   a provider's ``verify``: not sent by the provider (401)
        │   └── NothingSigned   a provider's ``verify``: nothing that could be signed (400)
        └── PayloadInvalid      a provider's ``translate``: not understood (dead letter, 200)

=====================  =====================================================================
``errors.py``          the errors above
``events.py``          an event, and the changes that it makes to profiles
``storage.py``         which events are read, choices and their changes, and what a storage is told
``dead_letters.py``    dead letters, and their budgets
``records.py``         small records, such as write keys
``counts.py``          counters per minute and hour
``backups.py``         the interface of a storage that a command backs up into one file
``log.py``             the interface of a log in front of the storage
``log_records.py``     the format of the records of a log
``pages.py``           a page of a scan
``people.py``          a user and its visitors, merged into one person
``profiles.py``        users, visitors and groups
``providers.py``       the interface of a webhook provider
``transforms.py``      the interfaces of transforms and observers
``suppressions.py``    suppressed addresses
``registration.py``    the type of ``register``, the argument of a hook
``times.py``           the form and the range of stored times, and the other forms that are read
``json_values.py``     JSON with values that cannot be stored as they were sent
``verification.py``    what ``engage verify`` learns of a store
=====================  =====================================================================

A plugin imports all names from here. These files import nothing of engage except each other.
"""

from __future__ import annotations

from typing import Final

import pluggy

from engage.api.backups import *
from engage.api.counts import *
from engage.api.dead_letters import *
from engage.api.errors import *
from engage.api.events import *
from engage.api.log import *
from engage.api.log_records import *
from engage.api.pages import *
from engage.api.people import *
from engage.api.profiles import *
from engage.api.providers import *
from engage.api.records import *
from engage.api.registration import *
from engage.api.storage import *
from engage.api.suppressions import *
from engage.api.times import *
from engage.api.transforms import *
from engage.api.verification import *

#: Marks a function of a plugin as the implementation of a hook.
hookimpl: Final = pluggy.HookimplMarker("engage")
