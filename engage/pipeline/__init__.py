# SPDX-License-Identifier: Apache-2.0
"""The steps of an event, from raw bytes to the storage.

=====================  ==============================================================
``pipeline.py``        the steps in their order, for one event, a batch, a delivery
``admission.py``       decides which request may be decoded next
``auth.py``            finds the workspace of a write key
``keys.py``            keeps the table of write keys up to date
``decode.py``          decompresses and parses a body, within the limits
``validate.py``        checks an item against the schema of its type
``clock.py``           the time that is stamped on what arrives
``normalise.py``       turns a valid item into the event that is stored
``items.py``           prepares items for a write, and settles what became of them
``ids.py``             makes the message ids of items that have none
``transforms.py``      runs the transforms and checks what they return
``ingest.py``          writes events and dead letters to the storage
``appending.py``       appends to a log instead, a call for each request
``group_commit.py``    combines the events of concurrent requests into one write
``write_queue.py``     what waits to be written, by write key
``observers.py``       passes stored events to the observers
``dead_letters.py``    makes the records of refused items and conflicts
``conflicts.py``       keeps events whose message id another event has
``explain.py``         what would become of an event, with nothing stored
``replay.py``          sends dead letters through the steps again
``log_front.py``       the log in front of the storage, its lag and its state
``catch_up.py``        waits until the loaders have stored what is in the log
``loading.py``         reads the log, for the loaders: portions, places, pauses, gaps
``portion_writer.py``  writes a portion to the storage, and keeps what it refuses
``kept_letters.py``    keeps the dead letters of a portion
``load_letters.py``    makes the dead letters of what a loader cannot store
``retries.py``         calls the storage or the log again until it answers
``shared_search.py``   finds the user of a signed link, for many requests at once
``subscriptions.py``   changes a user's subscription choices
``removal.py``         removes traits of a user, for the operator
``results.py``         the results that the pipeline returns
=====================  ==============================================================
"""
