# SPDX-License-Identifier: Apache-2.0
"""Programs that disturb a real server for long. pytest does not run them: `make` does.

- ``chaos``: ``make chaos`` kills, stops, cuts and fills up while clients send events
- ``fuzz``: ``make fuzz`` sends inputs that ``inputs`` makes, valid and not
- ``soak``: ``make soak`` sends millions of valid events
- ``watch``: what the processes of a server need, and what is wrong in its log
- ``program``: what these programs share: their arguments, a folder, the failures
"""
