# SPDX-License-Identifier: Apache-2.0
"""How the pages show values.

================  ===============================================================
``formats.py``    text of strangers, times, numbers
``json_text.py``  JSON on several lines, unchanged; the lines of JSON pointers
``snippets.py``   the lines that send a first event
``parts.py``      pieces of HTML that many templates have
================  ===============================================================
"""
