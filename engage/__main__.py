# SPDX-License-Identifier: Apache-2.0
"""``python -m engage``: the same as the command ``engage``."""

from engage.cli import main

if __name__ == "__main__":
    main(prog_name="engage")
