// SPDX-License-Identifier: Apache-2.0
import { DittofeedSdk } from "@dittofeed/sdk-web";
window.DittofeedSdk = DittofeedSdk;
