# SPDX-License-Identifier: Apache-2.0
"""The data that the pages read from the store, and the erasure that runs.

==============  ==================================================================
``reader.py``   calls of the store, a few at a time and each within a time limit
``history.py``  the numbers of the overview: the counters, summed
``badge.py``    the number of rejected events, and how much room is left for them
``names.py``    the names of the newest events, counted
``erasing.py``  an erasure that runs in the background
``seen.py``     names and ids that were seen lately, as suggestions
==============  ==================================================================
"""
