// SPDX-License-Identifier: Apache-2.0
// engage.js: sends identify, track, page and group calls to engage. See docs/snippet.md.
(function () {
  "use strict";
  /** @typedef {{[key: string]: any}} Data */
  const script = /** @type {HTMLScriptElement} */ (document.currentScript);
  const options = script.dataset;
  const host = (options.host || new URL(script.src).origin).replace(/\/+$/, "");
  const key = options.writeKey || "";
  const early = /** @type {any} */ (window).engage;
  const signals = /** @type {any} */ (navigator);
  const silent =
    "respectPrivacy" in options &&
    (signals.globalPrivacyControl === true || [signals.doNotTrack, /** @type {any} */ (window).doNotTrack].includes("1"));
  const PIECE = 60000; // bytes; a browser sends at most 64 KiB while a page goes away
  const KEPT = 1000; // events that may wait

  /** @type {Data[]} */ let queue = [];
  /** @type {Data[]} */ let sending = [];
  /** @type {number | undefined} */ let timer;
  let failures = 0;
  /** @type {Data} */ const memory = {};

  /** @param {string} name @param {string | null} [value] null forgets @returns {string | null} */
  function keep(name, value) {
    const full = "engage_" + name;
    if (value !== undefined) memory[name] = value;
    try {
      if (value === null) localStorage.removeItem(full);
      else if (value !== undefined) localStorage.setItem(full, value);
      return localStorage.getItem(full);
    } catch {
      if (value !== undefined && name !== "queue") {
        document.cookie = `${full}=${encodeURIComponent(value || "")};path=/;samesite=lax;max-age=${value === null ? 0 : 31536000}${location.protocol === "https:" ? ";secure" : ""}`;
      }
      const found = document.cookie.match("(?:^|; )" + full + "=([^;]*)");
      try {
        if (found) return decodeURIComponent(found[1]);
      } catch {}
      return name in memory ? memory[name] : null;
    }
  }

  /** @returns {string} a UUIDv4; crypto.randomUUID is for secure pages only */
  function uuid() {
    return "10000000-1000-4000-8000-100000000000".replace(/[018]/g, (c) =>
      (+c ^ (crypto.getRandomValues(new Uint8Array(1))[0] & (15 >> (+c / 4)))).toString(16),
    );
  }

  /** @returns {string} */
  function anonymousId() {
    return keep("anonymous_id") || keep("anonymous_id", uuid()) || memory.anonymous_id;
  }

  /** @param {Data[]} batch @returns {string} */
  function body(batch) {
    return JSON.stringify({ writeKey: key, batch, sentAt: new Date().toISOString() });
  }

  /** @returns {Data[]} the next events from the queue that fit into one request */
  function piece() {
    let size = 200;
    let count = 0;
    while (count < queue.length && count < 100) {
      size += new Blob([JSON.stringify(queue[count])]).size + 1;
      if (count && size > PIECE) break;
      count++;
    }
    return queue.splice(0, count);
  }

  /** @param {number} wait milliseconds */
  function later(wait) {
    clearTimeout(timer);
    timer = setTimeout(send, wait);
  }

  async function send() {
    if (!queue.length) failures = 0;
    if (sending.length || !queue.length) return;
    sending = piece();
    let wait = 0;
    try {
      // text/plain and the key in the body: no preflight.
      const text = body(sending);
      const answer = await fetch(host + "/v1/batch", {
        method: "POST",
        headers: { "Content-Type": "text/plain" },
        body: text,
        credentials: "omit",
        keepalive: new Blob([text]).size < PIECE,
      });
      if (answer.status > 499 || answer.status === 429 || answer.status === 408) {
        wait = 1000 * Number(answer.headers.get("Retry-After")) || 1;
      }
    } catch {
      wait = 1;
    }
    if (wait) {
      queue = sending.concat(queue);
      wait = Math.max(wait, Math.min(60000, 1000 * 2 ** failures++) * (0.5 + Math.random() / 2));
    } else failures = 0;
    sending = [];
    if (queue.length) later(wait);
  }

  // What is on its way is sent again: the message id makes a second copy harmless.
  function leave() {
    queue = sending.concat(queue);
    sending = [];
    while (queue.length) {
      const part = piece();
      if (!navigator.sendBeacon(host + "/beacon/v1/batch?writeKey=" + encodeURIComponent(key), body(part))) {
        queue = part.concat(queue);
        break;
      }
    }
    keep("queue", queue.length ? JSON.stringify(queue) : null);
  }

  /** @param {string} type @param {Data} fields */
  function add(type, fields) {
    if (silent) return;
    queue.push({
      type,
      messageId: uuid(),
      timestamp: new Date().toISOString(),
      anonymousId: anonymousId(),
      userId: keep("user_id") || undefined,
      context: {
        library: { name: "engage.js", version: "1" },
        locale: navigator.language,
        userAgent: navigator.userAgent,
        page: place(),
      },
      ...fields,
    });
    queue.splice(0, queue.length - KEPT);
    if (!failures) later(50);
  }

  /** @returns {Data} */
  function place() {
    return {
      path: location.pathname,
      referrer: document.referrer,
      search: location.search,
      title: document.title,
      url: location.href,
    };
  }

  /** @param {any} value @returns {value is string | number} */
  const isId = (value) => typeof value === "string" || typeof value === "number";

  /** @type {{[name: string]: (...values: any[]) => void}} */
  const api = {
    /** @param {string | number | Data} [userId] @param {Data} [traits] */
    identify(userId, traits) {
      if (silent) return;
      if (isId(userId)) {
        const known = keep("user_id");
        if (known && known !== String(userId)) api.reset();
        keep("user_id", String(userId));
      } else traits = userId;
      add("identify", { traits });
    },
    /** @param {string} event @param {Data} [properties] */
    track(event, properties) {
      add("track", { event, properties });
    },
    /** @param {string | Data} [name] @param {Data} [properties] */
    page(name, properties) {
      if (!isId(name)) [name, properties] = [undefined, name];
      add("page", { name, properties: { ...place(), ...properties } });
    },
    /** @param {string | number} groupId @param {Data} [traits] */
    group(groupId, traits) {
      add("group", { groupId, traits });
    },
    /** Forget who this is: a new anonymous id, no user. */
    reset() {
      if (silent) return;
      keep("user_id", null);
      keep("anonymous_id", null);
    },
  };
  /** @type {any} */ (window).engage = api;
  if (silent) return;
  try {
    const left = JSON.parse(keep("queue") || "[]");
    if (Array.isArray(left)) queue = left.filter((event) => event && event.messageId).slice(-KEPT);
  } catch {}
  keep("queue", null);
  addEventListener("pagehide", leave);
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "hidden") leave();
  });
  if (Array.isArray(early)) for (const [name, values] of early) if (api[name]) api[name](...values);
  if (queue.length) later(50);
})();
