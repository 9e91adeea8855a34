# SPDX-License-Identifier: Apache-2.0
"""Reading any store, for commands, the console and whatever runs by itself.

====================  ============================================================
``scans.py``          reads all that a scan finds, page by page
``time_limit.py``     limits how long a call of the storage may take
``export.py``         the records of a store as JSON
``cursor_file.py``    a file that says up to which event an export has written
``letter_groups.py``  groups dead letters by their cause
``live.py``           the newest events and dead letters, read once a second
``refused.py``        requests that were refused as a whole
====================  ============================================================
"""
