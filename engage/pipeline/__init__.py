# SPDX-License-Identifier: Apache-2.0
"""The way of an event, from raw bytes to the storage.

====================  ==============================================================
``pipeline.py``       the steps in their order, for one event, a batch, a delivery
``auth.py``           a write key → the workspace it belongs to
``decode.py``         decompresses and parses a body, within the limits
``validate.py``       checks an item against the schema of its type
``normalise.py``      a valid item → the event that is stored
``transforms.py``     the config's transforms, and the checks on what they return
``ingest.py``         writes events and dead letters to the storage
``group_commit.py``   gathers the events of concurrent requests into one write
``observers.py``      tells observers what was stored
``dead_letters.py``   what is kept of an item that was refused
``subscriptions.py``  changes a user's subscription choices
``results.py``        what the pipeline returns
====================  ==============================================================
"""
