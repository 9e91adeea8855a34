// SPDX-License-Identifier: Apache-2.0
// docs/snippet.md describes it.
(function () {
  "use strict";
  /** @typedef {{[key: string]: any}} Data */
  const page = /** @type {any} */ (window);
  const early = page.engage;
  if (early && early.identify && !early.push) return; // loaded twice
  const script = /** @type {HTMLScriptElement} */ (document.currentScript);
  const options = script.dataset;
  const host = (options.host || new URL(script.src).origin).replace(/\/+$/, "");
  const key = options.writeKey || "";
  const silent =
    "respectPrivacy" in options &&
    (page.navigator.globalPrivacyControl || [page.navigator.doNotTrack, page.doNotTrack].includes("1"));
  const PIECE = 60000; // bytes; beacons: 64 KiB
  const KEPT = 1000; // events

  /** @type {string[]} events as JSON, until answered */ let queue = [];
  let gone = ""; // last in a beacon
  /** @type {number | undefined} */ let timer;
  let busy = false;
  let most = 100; // events in a request
  let failures = 0;
  let refused = "";
  /** @type {Data} */ const memory = {};

  /** @param {string} name @param {?string} [value] */
  function keep(name, value) {
    const full = "engage_" + name;
    if (value !== undefined) {
      memory[name] = null;
      try {
        if (value) localStorage.setItem(full, value);
        else localStorage.removeItem(full);
      } catch {
        memory[name] = value;
      }
      try {
        if (name !== "queue" && (!value || memory[name])) {
          document.cookie = `${full}=${encodeURIComponent(value || "")};path=/;samesite=lax;max-age=${value ? 3e7 : 0}${location.protocol === "https:" ? ";secure" : ""}`;
        }
      } catch {}
    }
    try {
      const found = localStorage.getItem(full);
      if (found !== null) return found;
    } catch {}
    try {
      const found = document.cookie.match("(?:^|; )" + full + "=([^;]*)");
      if (found) return decodeURIComponent(found[1]);
    } catch {}
    return memory[name] || null;
  }

  // also without TLS
  function uuid() {
    return "10000000-1000-4000-8000-100000000000".replace(/[018]/g, (c) =>
      (+c ^ (crypto.getRandomValues(new Uint8Array(1))[0] & (15 >> (+c / 4)))).toString(16),
    );
  }

  /** @param {string[]} events */
  function body(events) {
    return `{"writeKey":${JSON.stringify(key)},"batch":[${events}],"sentAt":"${new Date().toISOString()}"}`;
  }

  /** @param {string[]} events */
  function piece(events) {
    let size = 200;
    let count = 0;
    while (count < events.length && count < most) {
      size += new Blob([events[count]]).size + 1;
      if (count && size > PIECE) break;
      count++;
    }
    return events.slice(0, count);
  }

  /** @returns {string[]} events of earlier pages, of a week */
  function stored() {
    try {
      /** @type {Data[]} */ const events = JSON.parse(keep("queue") || "");
      return events
        .filter((event) => event && Date.now() - Date.parse(event.timestamp) < 6048e5)
        .map((event) => JSON.stringify(event));
    } catch {
      return [];
    }
  }

  /** @param {string[]} some @param {string[]} others */
  const without = (some, others) => some.filter((event) => !others.includes(event));

  /** @param {number} wait */
  function later(wait) {
    timer ||= setTimeout(send, wait);
  }

  async function send() {
    clearTimeout(timer);
    timer = undefined;
    if (busy || !queue.length) return;
    busy = true;
    const part = piece(queue);
    let wait = 0;
    try {
      const text = body(part); // text/plain, the key in it: no preflight
      const answer = await fetch(host + "/v1/batch", {
        method: "POST",
        body: text,
        credentials: "omit",
        keepalive: new Blob([text]).size < PIECE,
      });
      const reply = await answer.json().catch(() => ""); // unread, it is in flight
      if (answer.status > 499 || [408, 429].includes(answer.status)) {
        wait = 1000 * Number(answer.headers.get("Retry-After")) || 1;
      } else if (part.length > 1 && [400, 413].includes(answer.status)) {
        most = part.length >> 1; // find the bad one
      } else {
        if (answer.ok) most = 100;
        else if ([401, 403].includes(answer.status) && !refused) {
          console.warn("engage:", (refused = reply.message || "refused"));
        }
        queue = without(queue, part);
        const rest = `${without(stored(), part)}`;
        keep("queue", rest && `[${rest}]`);
      }
    } catch {
      wait = 1;
    }
    busy = false;
    if (wait) wait = Math.max(wait, Math.min(60000, 1000 * 2 ** failures++) * (0.5 + Math.random() / 2));
    else failures = 0;
    if (queue.length) later(wait);
  }

  function leave() {
    if (!queue.length) return;
    let part;
    while ((part = piece(queue.slice(queue.indexOf(gone) + 1))).length) {
      if (!navigator.sendBeacon(host + "/beacon/v1/batch?writeKey=" + encodeURIComponent(key), body(part))) break;
      gone = part[part.length - 1];
    }
    keep("queue", `[${without(stored(), queue).concat(queue).slice(-KEPT)}]`);
  }

  /** @param {string} type @param {Data} fields */
  function add(type, fields) {
    if (silent) return;
    try {
      const event = JSON.stringify({
        type,
        messageId: uuid(),
        timestamp: new Date().toISOString(),
        anonymousId: keep("anonymous_id") || keep("anonymous_id", uuid()),
        userId: keep("user_id") || undefined,
        context: {
          library: { name: "engage.js", version: "1" },
          locale: navigator.language,
          userAgent: navigator.userAgent,
          page: place(),
          userHash: keep("user_hash") || undefined,
        },
        ...fields,
      });
      // Half an emoji is not Unicode.
      queue.push(event.replace(/\\(ud[89a-f]..|.)/g, (c) => (c[2] ? "\ufffd" : c)));
    } catch (error) {
      console.error("engage:", error);
    }
    queue.splice(0, queue.length - KEPT);
    if (!busy) later(50);
  }

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
        if (known && known !== `${userId}`) keep("anonymous_id", null);
        keep("user_id", `${userId}`);
      } else traits = userId || traits;
      add("identify", { traits });
    },
    /** @param {string} event @param {Data} [properties] */
    track(event, properties) {
      add("track", { event, properties });
    },
    /** @param {string | Data} [name] @param {Data} [properties] */
    page(name, properties) {
      if (!isId(name)) [name, properties] = [undefined, name || properties];
      add("page", { name, properties: { ...place(), ...properties } });
    },
    /** @param {string | number} groupId @param {Data} [traits] */
    group(groupId, traits) {
      add("group", { groupId, traits });
    },
    /** @param {string} hash */
    setUserHash(hash) {
      if (!silent) keep("user_hash", hash);
    },
    reset() {
      if (silent) return;
      keep("user_id", null);
      keep("user_hash", null);
      keep("anonymous_id", null);
    },
  };
  page.engage = api;
  const call = (/** @type {any} */ [name, values]) => api[name]?.(...values);
  if (early) early.push = call;
  if (silent) return;
  queue = stored();
  addEventListener("pagehide", leave);
  addEventListener("online", send);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) leave();
  });
  if (Array.isArray(early)) early.forEach(call);
  if (queue.length) later(50);
})();
