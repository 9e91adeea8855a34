# SPDX-License-Identifier: Apache-2.0
"""The pages of the console, one file each.

A page is a :class:`~engage.console.base.ConsoleHandler`, or a
:class:`~engage.console.listing.ListPage`, with a template of the same name. Its route is a line in
:mod:`engage.console.application`.
"""
