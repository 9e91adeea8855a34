# SPDX-License-Identifier: Apache-2.0
"""A webhook delivery, from the provider's request to events in the pipeline.

===============  =============================================================
``receive.py``   the steps in their order: verify, translate, store, answer
``delivery.py``  a delivery, its destination, and the dead letter that keeps one
``fetcher.py``   fetches documents that a signature needs, such as a certificate
``dry_run.py``   runs a recorded delivery without storing anything
===============  =============================================================
"""
