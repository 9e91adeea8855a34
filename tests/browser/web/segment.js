// SPDX-License-Identifier: Apache-2.0
import { AnalyticsBrowser } from "@segment/analytics-next";
window.AnalyticsBrowser = AnalyticsBrowser;
