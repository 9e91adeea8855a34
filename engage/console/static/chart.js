// SPDX-License-Identifier: Apache-2.0
// The plots of the overview, drawn by uPlot from overview.json. All share the cursor; dragging zooms.

const plots = document.getElementById("plots");
const root = document.documentElement;
const probe = document.createElement("i");
let data = null;
let drawn = [];

/** Return a custom property as a colour that a canvas understands. */
function color(name) {
  probe.style.color = `var(--${name})`;
  root.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const utc = () => root.hasAttribute("data-utc");
const when = (seconds) =>
  new Intl.DateTimeFormat("en-GB", {
    day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone: utc() ? "UTC" : undefined,
  }).format(seconds * 1000);

/** Hatch the steps after the first start in which nothing was running. */
function hatch(u) {
  const { ctx } = u;
  const line = color("line");
  const { left, top, width, height } = u.bbox;
  ctx.save();
  ctx.beginPath();
  data.running.forEach((up, i) => {
    if (up || data.at[i] < data.started) return;
    const from = u.valToPos(data.at[i] / 1000, "x", true);
    const to = u.valToPos(data.at[i] / 1000 + data.step, "x", true);
    ctx.rect(Math.max(left, from), top, Math.max(0, Math.min(to, left + width) - Math.max(left, from)), height);
  });
  ctx.clip();
  ctx.beginPath();
  for (let x = left - height; x < left + width; x += 9 * devicePixelRatio) {
    ctx.moveTo(x, top + height);
    ctx.lineTo(x + height, top);
  }
  ctx.strokeStyle = line;
  ctx.lineWidth = devicePixelRatio;
  ctx.stroke();
  ctx.restore();
}

function chart(id, series, values, read, more = {}) {
  const box = document.getElementById(id);
  const out = box.nextElementSibling;
  const ink = color("ink3");
  const axis = { stroke: ink, grid: { stroke: color("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui", size: more.size ?? 44 };
  const options = {
    width: box.clientWidth,
    height: box.clientHeight,
    legend: { show: false },
    padding: [8, 20, 0, 0],
    tzDate: (seconds) => (utc() ? window.uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC") : new Date(seconds * 1000)),
    // Until the end of the current step, whose value is drawn up to there.
    scales: { x: { range: (_, low, high) => [low, high === data.at.at(-1) / 1000 ? high + data.step : high] }, y: { range: (_, low, high) => [0, Math.max(more.least ?? 1, high * 1.08)] } },
    axes: [{ ...axis, size: 28, values: [[86400, "{D} {MMM}", null, null, null, null, null, null, 0], [3600, "{HH}:{mm}", "\n{D} {MMM}", null, null, null, null, null, 1], [60, "{HH}:{mm}", "\n{D} {MMM}", null, null, null, null, null, 1]], size: 34 },
      { ...axis, incrs: [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6].map((e) => n * 10 ** e)).sort((a, b) => a - b), values: more.values ?? ((_, ticks) => ticks.map((v) => (v >= 1000 ? `${v / 1000}k` : v))) }],
    series: [{}, ...series],
    cursor: { y: false, sync: { key: "overview" }, drag: { x: true, y: false }, points: { size: 6 } },
    hooks: {
      drawClear: [hatch],
      setCursor: [(u) => {
        const i = u.cursor.idx;
        out.textContent = i == null ? "" : `${when(data.at[i] / 1000)} · ${data.running[i] ? read(i) : data.at[i] < data.started ? "before the first start" : "not running"}`;
      }],
    },
  };
  box.replaceChildren();
  const u = new window.uPlot(options, [data.at.map((at) => at / 1000), ...values], box);
  box.onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (!by) return;
    event.preventDefault();
    const last = data.at.length - 1;
    const i = Math.min(last, Math.max(0, (u.cursor.idx ?? last + 1) + by));
    u.setCursor({ left: u.valToPos(data.at[i] / 1000, "x"), top: 10 });
  };
  drawn.push(u);
  return u;
}

function draw() {
  for (const u of drawn) u.destroy();
  drawn = [];
  if (!data || !window.uPlot) return;
  document.getElementById("events-title").textContent = data.title;
  const names = ["stored", "duplicate", "rejected", "refused"];
  const stepped = window.uPlot.paths.stepped({ align: 1, alignGaps: 1, extend: true });
  const sums = data.at.map(() => 0);
  const stacked = names.map((name) => data.outcomes[name].map((value, i) => (sums[i] += value)));
  const gaps = (values) => values.map((value, i) => (data.running[i] || value ? value : null));
  const filled = (name) => ({ stroke: color(name), fill: color(name), width: 0, paths: stepped, points: { show: false } });
  const u = chart("events-plot", names.map(filled).reverse(), stacked.map(gaps).reverse(),
    (i) => names.map((name) => `${name} ${data.outcomes[name][i]}`).join(" · "), { least: 4 });
  let down = 0;
  u.over.addEventListener("mousedown", (event) => (down = event.clientX));
  u.over.addEventListener("click", (event) => {
    const i = u.cursor.idx;
    if (i == null || Math.abs(event.clientX - down) > 3 || !sums[i]) return;
    const time = (at) => new Date(at).toISOString().slice(0, 16);
    location.href = `${plots.dataset.events}&since=${time(data.at[i])}&until=${time(data.at[i] + data.step * 1000)}`;
  });
  // A value between two gaps has no line to be seen by.
  const alone = (u, s) => u.data[s].flatMap((v, i, all) => (v != null && (data.at.length < 100 || (all[i - 1] == null && all[i + 1] == null)) ? [i] : []));
  const line = (name, width, alpha) => ({ stroke: color(name), width, alpha, spanGaps: false, points: { filter: alone, size: 4 } });
  const ms = (v) => (v == null ? "–" : v === 0 ? "0" : v >= 1000 ? `${(v / 1000).toFixed(1)} s` : `${v < 10 ? v.toFixed(1) : Math.round(v)} ms`);
  const kinds = ["p50", "p95", "p99"];
  chart("latency-plot", [line("accent", 1.5, 0.5), line("accent", 2, 1), { ...line("ink3", 1.25, 1), dash: [3, 3] }], kinds.map((kind) => data.latency[kind]),
    (i) => kinds.map((kind) => `${kind} ${ms(data.latency[kind][i])}`).join(" · "), { least: 2, size: 58, values: (_, ticks) => ticks.map(ms) });
  chart("queue-plot", [{ ...line("accent", 1.5, 1), fill: color("tint"), paths: stepped, points: { show: false } }], [data.queue],
    (i) => `at most ${data.queue[i] ?? 0} of ${data.limit}`, { least: 10 });
}

async function load() {
  if (document.hidden) return;
  // At most one for each pixel beside the axis: a narrower bar would be lost.
  const bars = Math.min(...[...document.querySelectorAll(".canvas")].map((box) => box.clientWidth)) - 78;
  const answer = await fetch(`${plots.dataset.url}&bars=${bars}`, { cache: "no-store" }).catch(() => null);
  plots.toggleAttribute("data-stale", !answer?.ok);
  if (!answer?.ok) return;
  data = await answer.json();
  for (const total of document.querySelectorAll("[data-total]")) {
    const sum = data.outcomes[total.dataset.total].reduce((a, b) => a + b, 0);
    total.textContent = sum.toLocaleString("en").replaceAll(",", "\u202f");
  }
  draw();
}

let width = 0;
let later = 0;
new ResizeObserver(() => {
  if (plots.clientWidth !== width && data) {
    draw();
    clearTimeout(later);
    later = setTimeout(load, 300);
  }
  width = plots.clientWidth;
}).observe(plots);
document.addEventListener("theme", draw);
document.addEventListener("zone", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
setInterval(load, 30_000);
load();
