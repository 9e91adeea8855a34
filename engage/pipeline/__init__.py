# SPDX-License-Identifier: Apache-2.0
"""The steps of an event, from raw bytes to the storage.

=====================  ==============================================================
``pipeline.py``        the steps in their order, for one event, a batch, a delivery
``admission.py``       decides which request may be decoded next
``decode.py``          decompresses and parses a body, within the limits
``validate.py``        checks an item against the schema of its type
``clock.py``           the time that is stamped on events when they arrive
``normalise.py``       turns a valid item into the event that is stored
``items.py``           prepares items for a write, and adds up their outcomes
``transforms.py``      runs the transforms and checks their results
``ingest.py``          writes events and dead letters to the storage
``group_commit.py``    combines waiting requests, of all write keys in rotation, into one write
``observers.py``       passes stored events to the observers
``dead_letters.py``    makes the records of refused items and conflicts
``conflicts.py``       keeps events whose message id another event has
``explain.py``         explains the outcome of an event, with nothing stored
``replay.py``          sends dead letters through the steps again
``bulk_replay.py``     replays all dead letters that match a filter
``operator.py``        changes that only an operator can make to users and visitors
``results.py``         the results that the pipeline returns
=====================  ==============================================================
"""
