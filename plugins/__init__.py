# SPDX-License-Identifier: Apache-2.0
"""The plugins that come with engage; each is found through an entry point, as others are."""
