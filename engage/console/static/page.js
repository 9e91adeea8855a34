// SPDX-License-Identifier: Apache-2.0
// Shared by all pages: times, copy buttons, the theme, UTC or local time. Without it the pages work, in UTC.
// Attributes: <time datetime> (data-ago: as "12 s"; data-clock: the time of day; data-full: all of it), data-copy="#id" or "text:…",
// An element with new times below it dispatches "times" (bubbles); document gets "zone" and "theme" after a switch.
// data-line="3" (a link to a text area, of which it selects a line; the first one does so at once),
// <input type="datetime-local" value="in UTC">, <span data-zone>UTC</span> (the zone of these fields),
// data-submit (a select that sends its form), data-given (a .fold that phones do not fold).

const root = document.documentElement;
root.classList.add("js");

// On phones, filters unfold when they are wanted.
if (matchMedia("(max-width: 40rem)").matches)
  for (const one of document.querySelectorAll(".fold:not([data-given])")) one.open = false;

const DAY = 86_400_000;
const day = { year: "numeric", month: "short", day: "numeric" };
const month = { month: "short", day: "numeric" };
const second = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
const exact = { ...day, ...second, fractionalSecondDigits: 3, timeZoneName: "shortOffset" };
let formats = {};

/** Whether times are shown in UTC. */
const utc = () => root.hasAttribute("data-utc");

function format(name, options) {
  const key = name + utc();
  // The offset of UTC would be shown as "GMT+0".
  const zone = utc() ? { timeZone: "UTC", ...(options.timeZoneName && { timeZoneName: "short" }) } : {};
  formats[key] ??= new Intl.DateTimeFormat("en-GB", { ...options, ...zone });
  return formats[key];
}

/** Return a time as text: the time of day today, the date and the time otherwise. */
function clock(at, withDay = Date.now() - at > DAY / 2) {
  const text = format("second", second).format(at) + (utc() ? " UTC" : "");
  return withDay ? `${format("day", day).format(at)}, ${text}` : text;
}

/** Return a time for a list: the time of day today, with the day before it otherwise. */
function short(at) {
  const text = clock(at, false);
  const on = format("month", month).format(at);
  return on === format("month", month).format(Date.now()) ? text : `${on} ${text}`;
}

/** Return how long ago a time is: "12 s", "5 min", "3 h", "4 d". */
function ago(at, now = Date.now()) {
  const seconds = Math.max(0, Math.round((now - at) / 1000));
  if (seconds < 60) return `${seconds} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86_400)} d ago`;
}

/** Write the times below an element. */
function showTimes(from = document) {
  const found = from.querySelectorAll("time[datetime]");
  for (const time of from.matches?.("time[datetime]") ? [from, ...found] : found) {
    const at = Date.parse(time.dateTime);
    if (Number.isNaN(at)) continue;
    if ("ago" in time.dataset) time.textContent = ago(at);
    else if ("full" in time.dataset) time.textContent = format("exact", exact).format(at);
    else if ("clock" in time.dataset) time.textContent = short(at);
    else time.textContent = clock(at);
    time.title = `${time.dateTime}\n${clock(at, true)}`;
  }
}

/** Remember a choice for a year, so that the server renders the next page with it. */
function remember(name, value) {
  const path = new URL(document.querySelector(".brand")?.getAttribute("href") ?? "./", location.href).pathname;
  document.cookie = `engage-${name}=${value}; path=${path}; max-age=31536000; samesite=strict`;
}

document.getElementById("utc")?.addEventListener("click", (event) => {
  const on = root.toggleAttribute("data-utc");
  event.currentTarget.setAttribute("aria-pressed", String(on));
  remember("times", on ? "utc" : "local");
  showTimes();
  document.dispatchEvent(new Event("zone"));
});

document.getElementById("theme")?.addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const order = dark ? ["", "light", "dark"] : ["", "dark", "light"];
  const next = order[(order.indexOf(root.dataset.theme ?? "") + 1) % 3];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  remember("theme", next || "system");
  document.dispatchEvent(new Event("theme"));
});

/** Copy a text; without the clipboard API (plain http on a LAN) by a text area. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Select the line of a text area that a link with data-line names, and return the area. */
function selectLine(link) {
  const area = document.querySelector(link.getAttribute("href"));
  const before = area.value.split("\n", Number(link.dataset.line));
  const length = before.pop().length;
  const start = before.reduce((sum, line) => sum + line.length + 1, 0);
  area.setSelectionRange(start, start + length);
  area.scrollTop = (area.scrollHeight * before.length) / area.value.split("\n").length - area.clientHeight / 2;
  return area;
}

const wrong = document.querySelector("[data-line]");
if (wrong) {
  const area = selectLine(wrong);
  // A check has just failed. Otherwise the line is selected when the operator comes to the text.
  if (wrong.closest("[role=alert]")) area.focus();
}

document.addEventListener("click", async (event) => {
  const place = event.target.closest?.("[data-line]");
  if (place) {
    event.preventDefault();
    return selectLine(place).focus();
  }
  const button = event.target.closest?.("[data-copy]");
  if (!button) return;
  const what = button.dataset.copy;
  const text = what.startsWith("text:")
    ? what.slice(5)
    : (what ? document.querySelector(what) : button.parentElement.querySelector("pre, code")).textContent;
  await copy(text);
  const before = button.textContent;
  if (before !== "Copied") {
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = before), 1200);
  }
});

/** Return the cell, line or heading where an event is, if it does not show all of its text. */
function cutCell(event) {
  const cell = event.target.closest?.("td, .clip, h1");
  return cell && (cell.scrollWidth > cell.clientWidth || cell.scrollHeight > cell.clientHeight) ? cell : null;
}
document.addEventListener("pointerover", (event) => {
  const cell = cutCell(event);
  if (cell) cell.title = cell.innerText;
});
document.addEventListener("click", (event) => {
  if (!event.target.closest?.("a, button, tr.row")) cutCell(event)?.classList.add("whole");
});

document.addEventListener("change", (event) => {
  if (event.target.matches?.("[data-submit]")) event.target.form.requestSubmit();
});

document.addEventListener("keydown", (event) => {
  const command = event.ctrlKey || event.metaKey;
  if (!(event.key === "/" && !command) && !(event.key === "k" && command)) return;
  if (event.target.closest("input, textarea, select")) return;
  const search = document.querySelector(".search input[type=search]");
  search?.focus();
  search?.select();
  event.preventDefault();
});

// The times of filters are those of the page's zone; addresses have UTC.
const moments = [...document.querySelectorAll("input[type=datetime-local]")];

/** Return minutes as a field has them, in another zone; "" if they are no time. */
function moved(text, zone, forward) {
  const at = new Date(text + zone);
  if (Number.isNaN(at.valueOf())) return "";
  return new Date(at - (forward ? at.getTimezoneOffset() * 60_000 : 0)).toISOString().slice(0, 16);
}

function showMoments() {
  for (const field of moments) field.value = moved(field.dataset.utc, "Z", !utc());
  for (const zone of document.querySelectorAll("[data-zone]")) zone.textContent = utc() ? "UTC" : "local time";
}

for (const field of moments) {
  field.dataset.utc = moved(field.defaultValue, "Z", false);
  field.addEventListener("change", () => (field.dataset.utc = moved(field.value, utc() ? "Z" : "", false)));
  field.form.addEventListener("formdata", (event) => event.formData.set(field.name, field.dataset.utc));
}
document.addEventListener("zone", showMoments);
showMoments();

document.addEventListener("times", (event) => showTimes(event.target));
showTimes();
setInterval(() => {
  for (const time of document.querySelectorAll("time[data-ago]")) time.textContent = ago(Date.parse(time.dateTime));
}, 5000);
