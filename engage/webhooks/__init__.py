# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: building blocks of webhook providers.

All functions are pure. Those that verify raise :class:`~engage.api.SignatureMismatch`, those that
translate raise :class:`~engage.api.PayloadInvalid`. Their messages contain no value of the
delivery.

=====================================  ============================================================
reading a request                      :func:`one_header` :func:`optional_header`
                                       :func:`form_values` :func:`form_fields`
                                       :func:`form_bytes`
                                       :func:`parse_json` :func:`parse_object`
                                       :func:`parse_envelope` :func:`body_members`
decoding a signature                   :func:`decode_hex` :func:`decode_base64`
checking a signature                   :func:`check_hmac` :func:`check_secret`
                                       :func:`check_timestamp` :func:`check_standard_webhook`
options                                :func:`secrets` :func:`standard_webhook_key`
                                       :func:`public_url` :func:`signed_url`
                                       :func:`options_schema` :func:`registration`
base classes                           :class:`SecretProvider` (signs with a secret)
                                       :class:`StaticCredentialProvider` (sends a secret)
making events                          :func:`track` :func:`message_id` :func:`event_id`
                                       :func:`content_id` :class:`ElementIds`
                                       :func:`unix_time` :func:`iso_time` :func:`at`
                                       :func:`merged` :func:`spread` :func:`text`
                                       :func:`user_id` :func:`own_user_id`
                                       :func:`user_id_notice` :func:`names_person`
                                       :func:`email_recipients` :func:`email_recipient`
                                       :func:`phone_recipient` :func:`email_opt_outs`
                                       :func:`email_event` :func:`translated`
=====================================  ============================================================
"""

from __future__ import annotations

from engage.webhooks.options import *
from engage.webhooks.requests import *
from engage.webhooks.translation import *
