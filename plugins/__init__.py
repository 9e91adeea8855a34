# SPDX-License-Identifier: Apache-2.0
"""The plugins that come with engage. engage finds them by entry points, like any other plugin."""
