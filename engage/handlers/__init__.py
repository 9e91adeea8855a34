# SPDX-License-Identifier: Apache-2.0
"""HTTP in, HTTP out: from a request to a call of the pipeline, from its result to an answer.

No rule of the contract is in here; which path goes where is in :mod:`engage.handlers.routes`.
"""
