# SPDX-License-Identifier: Apache-2.0
"""The built-in providers pass the conformance suite; the cases are in ``support``."""

from __future__ import annotations

from support import provider_cases as cases


class TestStandardWebhooks(cases.StandardWebhooks): ...


class TestResend(cases.Resend): ...


class TestSegment(cases.Segment): ...


class TestSegmentBatch(cases.SegmentBatch): ...


class TestCustomerIo(cases.CustomerIo): ...


class TestStripe(cases.Stripe): ...


class TestShopify(cases.Shopify): ...


class TestShopifyCustomer(cases.ShopifyCustomer): ...


class TestMailchimp(cases.Mailchimp): ...


class TestTwilio(cases.Twilio): ...


class TestTwilioSharedKey(cases.TwilioSharedKey): ...


class TestTwilioJson(cases.TwilioJson): ...


class TestAmplitude(cases.Amplitude): ...


class TestMParticle(cases.MParticle): ...


class TestPostHog(cases.PostHog): ...


class TestPostHogGroup(cases.PostHogGroup): ...


class TestPostmark(cases.Postmark): ...


class TestRudderStack(cases.RudderStack): ...


class TestMixpanelCohort(cases.MixpanelCohort): ...


class TestMixpanelStream(cases.MixpanelStream): ...


class TestAmazonSes(cases.AmazonSes): ...


class TestSendGrid(cases.SendGrid): ...


def test_every_case_is_run() -> None:
    run = {base for case in globals().values() if isinstance(case, type) for base in case.__bases__}
    assert set(cases.CASES.values()) <= run
