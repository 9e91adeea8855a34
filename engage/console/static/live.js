// SPDX-License-Identifier: Apache-2.0
// Rows that come while one looks. A row is a clone of <template id="row">; all text is set by textContent.

const table = document.getElementById("live");
const body = table.tBodies[0];
const byId = (id) => document.getElementById(id);
const clone = (id) => byId(id).content.firstElementChild.cloneNode(true);
const ring = Number(table.dataset.ring);
const url = new URL(table.dataset.url, location.href);
const workspace = table.dataset.workspace;
const short = "short" in table.dataset;
let after = Number(table.dataset.after);
let paused = false;
let over = false;
let waiting = [];
let quiet = 0;
let timer = 0;
let problem = null;

function link(route, query) {
  return `${route}?${new URLSearchParams({ workspace, ...query })}`;
}

function make(data) {
  const row = clone("row");
  const [time, status, type, name, user, key, preview] = row.cells;
  row.dataset.at = data.at;
  row.dataset.n = data.n;
  time.firstChild.dateTime = new Date(data.at).toISOString();
  status.firstChild.classList.add(data.status);
  status.firstChild.textContent = data.status;
  type.textContent = data.type;
  name.firstChild.textContent = data.name || data.type || "?";
  name.firstChild.classList.toggle("muted", !data.name);
  name.firstChild.href =
    data.status === "rejected" ? link("letter", { id: data.id }) : link("event", { origin: data.origin, id: data.id });
  user.textContent = data.user;
  key.textContent = data.key;
  preview.textContent = data.preview;
  return row;
}

/** Whether rows must not move: one reads, selects, has scrolled, or has pressed Pause. */
function held() {
  if (paused || over || (!short && table.getBoundingClientRect().top < 0)) return true;
  const selection = getSelection();
  return !selection.isCollapsed && table.contains(selection.anchorNode);
}

function insert(data) {
  if (data.gap) {
    const row = clone("gap");
    row.dataset.at = 0; // Later rows stay above it.
    row.cells[0].textContent = data.gap;
    body.prepend(row);
    return;
  }
  // A row that was stored late goes where its time is, among the first ones.
  let before = body.firstElementChild;
  for (let i = 0; before && i < 50 && Number(before.dataset.at ?? Infinity) > data.at; i++) before = before.nextElementSibling;
  const row = make(data);
  body.insertBefore(row, before);
  row.dispatchEvent(new Event("times", { bubbles: true }));
}

function flush() {
  // The overview of a workspace without events: the first one that is stored replaces the card.
  if (waiting.length && byId("waiting")) {
    byId("first").hidden = false;
    const stored = waiting.some((data) => data.status === "stored");
    if (stored && !byId("waiting").hidden) setTimeout(() => location.replace(location.href), 4000);
    if (stored) byId("waiting").hidden = true;
  }
  for (const data of waiting) insert(data);
  waiting = [];
  let last = body.lastElementChild;
  while (body.rows.length > ring && last) {
    const previous = last.previousElementSibling;
    if (!last.classList.contains("detail") && !last.classList.contains("open")) last.remove();
    last = previous;
  }
  show();
}

function show() {
  const rows = waiting.filter((data) => !data.gap).length;
  const pill = byId("pill");
  if (pill) {
    pill.hidden = !rows;
    pill.textContent = `${rows} new ▲`;
  }
  byId("nothing")?.toggleAttribute("hidden", body.rows.length > 0);
  const state = byId("state");
  if (!state) return;
  state.className = `status ${problem ? "bad" : paused ? "warn" : "ok"}`;
  const word = problem ?? (paused ? "paused" : byId("waiting") ? "listening" : "live");
  if (state.textContent !== word) state.textContent = word;
}

function showRefused(list) {
  const box = byId("refused");
  if (!box) return;
  box.hidden = !list.length;
  if (!list.length) return;
  const first = list[0];
  const last = byId("refused-last");
  if (last) last.textContent = `${first.request} ${first.status}: ${first.message || first.code}`;
  box.querySelector("tbody").replaceChildren(
    ...list.slice(0, short ? 5 : 50).map((data) => {
      const row = clone("refused-row");
      const [time, request, status, why, key, times] = row.cells;
      time.firstChild.dateTime = new Date(data.at).toISOString();
      request.textContent = data.request;
      status.firstChild.textContent = data.status;
      why.textContent = data.message || data.code;
      key.textContent = data.key;
      times.textContent = data.count;
      return row;
    }),
  );
  box.dispatchEvent(new Event("times", { bubbles: true }));
}

async function poll() {
  url.searchParams.set("after", after);
  try {
    const answer = await fetch(url, { cache: "no-store" });
    if (answer.status === 401) return location.reload();
    if (!answer.ok) throw new Error(String(answer.status));
    const news = await answer.json();
    const outage = byId("outage");
    outage.hidden = !news.outage;
    if (news.outage) {
      const last = document.createElement("time");
      if (news.last) last.dateTime = new Date(news.last).toISOString();
      last.dataset.clock = "";
      outage.firstElementChild.replaceChildren(`The store does not answer: ${news.outage}`, news.last ? " · last good answer " : "", last);
      last.dispatchEvent(new Event("times", { bubbles: true }));
    }
    // A smaller number is that of another process: it counts from 1 again, and sends all it has.
    if (news.after < after) body.replaceChildren();
    quiet = news.after > after ? 0 : quiet + 1;
    after = news.after;
    if (news.gap) waiting.push({ gap: "More came at the same time than is shown" });
    waiting.push(...news.rows.reverse());
    if (waiting.length > 2 * ring) waiting = waiting.slice(-2 * ring);
    url.searchParams.set("refused", news.refusedVersion);
    if (news.refused) showRefused(news.refused);
    problem = news.outage ? "waiting for the store" : null;
    if (held()) show();
    else flush();
  } catch {
    problem = "no connection to the console";
    show();
  }
  plan();
}

function plan() {
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(poll, quiet > 60 ? 3000 : 1000);
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) poll();
});

function pause(on) {
  paused = on;
  const button = byId("pause");
  button.setAttribute("aria-pressed", String(on));
  button.lastElementChild.textContent = on ? "Resume" : "Pause";
  button.querySelector("use").setAttribute("href", on ? "#i-play" : "#i-pause");
  if (on) show();
  else flush();
}

byId("refresh")?.remove();
byId("pause")?.addEventListener("click", () => pause(!paused));
byId("pill")?.addEventListener("click", () => {
  table.scrollIntoView({ block: "nearest" });
  scrollTo(0, 0);
  flush();
});
document.addEventListener("keydown", (event) => {
  if (event.key === " " && byId("pause") && !event.target.closest("input, select, textarea, button, a, summary, pre")) {
    event.preventDefault();
    pause(!paused);
  }
});
body.addEventListener("pointerenter", (event) => (over = event.pointerType === "mouse"));
body.addEventListener("pointerleave", () => {
  over = false;
  if (!held()) flush();
});
show();
plan();
