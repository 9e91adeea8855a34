# SPDX-License-Identifier: Apache-2.0
"""The way of a webhook delivery, from a provider's request to events in the pipeline.

==================  ================================================================
``receive.py``      the steps in their order: verify, translate, store, answer
``delivery.py``     a request to a webhook URL, and the dead letter that keeps one
``fetcher.py``      fetches what a signature needs, such as a certificate
``recipients.py``   finds the user whom a recipient's address belongs to
``dry_run.py``      runs a recorded delivery without storing anything
==================  ================================================================
"""
