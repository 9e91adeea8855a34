// SPDX-License-Identifier: Apache-2.0
import { RudderAnalytics } from "@rudderstack/analytics-js/bundled";
window.RudderAnalytics = RudderAnalytics;
