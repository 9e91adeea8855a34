// SPDX-License-Identifier: Apache-2.0
"use strict";
/**
 * Drives one Node SDK by a plan on standard input: {"sdk", "host", "key", "options", "example",
 * "pause", "calls": [{"call", "arguments"}]}; a timestamp is ISO 8601. "example" is code that makes
 * the client "analytics", in place of host, key and options. "pause" is the seconds from one call to
 * the next. Prints {"errors": [text, …]}.
 */
const plan = JSON.parse(require("fs").readFileSync(0, "utf8"));
/** @type {string[]} */ const errors = [];
const failed = (error) => error && errors.push(String((error && error.message) || error));
// What @dittofeed/sdk-node sends between two calls, it sends without a handler.
process.on("unhandledRejection", failed);
/** @param {() => any} make @returns {any} the client of the example, if there is one */
const made = (make) => (plan.example ? new Function("require", plan.example + "\nreturn analytics;")(require) : make());

/** Each opens a client and returns how to call it and how to end it. */
const sdks = {
  "@segment/analytics-node": () => {
    const { Analytics } = require("@segment/analytics-node");
    const client = made(() => new Analytics({ writeKey: plan.key, host: plan.host, ...plan.options }));
    client.on("error", (error) => failed(error.reason || error.code || error));
    return { client, end: () => client.closeAndFlush() };
  },
  "@rudderstack/rudder-sdk-node": () => {
    const RudderAnalytics = require("@rudderstack/rudder-sdk-node");
    const client = made(() => new RudderAnalytics(plan.key, { dataPlaneUrl: plan.host, ...plan.options }));
    client.errorHandler = failed;
    return { client, end: () => drained(client) };
  },
  "analytics-node": () => {
    const Analytics = require("analytics-node");
    const client = made(() => new Analytics(plan.key, { host: plan.host, ...plan.options }));
    client.errorHandler = failed;
    return { client, end: () => drained(client) };
  },
  "@dittofeed/sdk-node": async () => {
    const { DittofeedSdk } = require("@dittofeed/sdk-node");
    const authorization = "Basic " + Buffer.from(plan.key + ":").toString("base64");
    const client = await DittofeedSdk.init({ writeKey: authorization, host: plan.host, ...plan.options });
    return { client: DittofeedSdk, end: () => DittofeedSdk.flush().catch(failed) };
  },
};

/** Call flush until the queue is empty: it sends at most `flushAt` at a time. */
async function drained(client) {
  do {
    await new Promise((resolve) => client.flush(resolve));
  } while (client.queue.length);
}

// At the end of everything that is under way: a flush does not always wait for what was sent before.
process.on("exit", () => require("fs").writeSync(1, JSON.stringify({ errors })));

(async () => {
  const { client, end } = await sdks[plan.sdk]();
  const start = performance.now();
  for (const [number, { call, arguments: given }] of plan.calls.entries()) {
    const wait = start + 1000 * plan.pause * number - performance.now();
    if (plan.pause) await new Promise((go) => setTimeout(go, wait));
    const message = { ...given };
    if (message.timestamp) message.timestamp = new Date(message.timestamp);
    if (typeof client[call] !== "function") throw new Error(`${plan.sdk} has no ${call}`);
    client[call](message);
  }
  await end();
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
