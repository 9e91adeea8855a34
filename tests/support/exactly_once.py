# SPDX-License-Identifier: Apache-2.0
"""The judgement of tests in which processes die: each acknowledged event is stored, once."""

from __future__ import annotations

import collections
from collections.abc import Collection, Hashable, Iterable


class NotExactlyOnce(AssertionError):
    """Events were lost, stored twice, or stored and never sent.

    Such a failure counts even if it happens once in a thousand runs: `make test` repeats a test
    that failed, but not after this error.
    """


def check_exactly_once(
    stored: Iterable[Hashable],
    acknowledged: Collection[Hashable],
    sent: Collection[Hashable] | None = None,
    *,
    once: bool = True,
) -> None:
    """Compare the ids that are stored with those that were sent.

    :param stored: the id of each stored event.
    :param acknowledged: ids of the events for which a client got a success.
    :param sent: ids of all events that were sent; without it, other events may be stored.
    :param once: whether each event may be there only once.
    :raises NotExactlyOnce: with the ids that are wrong.
    """
    __tracebackhide__ = True
    counts = collections.Counter(stored)
    wrong = {"lost": [one for one in acknowledged if one not in counts]}
    if once:
        wrong["stored twice"] = [one for one, count in counts.items() if count > 1]
    if sent is not None:
        wrong["stored, and never sent"] = list(counts.keys() - set(sent))
    if any(wrong.values()):
        found = "; ".join(f"{len(ids)} {what}: {ids[:10]}" for what, ids in wrong.items() if ids)
        raise NotExactlyOnce(found)
