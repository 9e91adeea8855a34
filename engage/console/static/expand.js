// SPDX-License-Identifier: Apache-2.0
// A row of #live or of a table with data-expand opens in place: it shows the stored event, or why it was rejected.

const detail = document.getElementById("detail");

function element(name, text, kind) {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function pretty(lines) {
  return lines.flatMap((line) => {
    const parts = line.tokens.map(([kind, text]) => (kind ? element("span", text, kind) : text));
    if (!line.marked) return [...parts, "\n"];
    const mark = document.createElement("mark");
    mark.append(...parts);
    return [mark, "\n"];
  });
}

function fill(row, view) {
  const pre = row.querySelector("pre");
  const shown = { pretty: () => pre.replaceChildren(...pretty(view.lines)), raw: () => (pre.textContent = view.raw), curl: () => (pre.textContent = view.curl) };
  shown.pretty();
  for (const button of row.querySelectorAll("[data-show]")) {
    button.hidden = !view[button.dataset.show === "pretty" ? "lines" : button.dataset.show];
    button.addEventListener("click", () => {
      shown[button.dataset.show]();
      for (const other of row.querySelectorAll("[data-show]")) other.setAttribute("aria-pressed", String(other === button));
    });
  }
  row.querySelector(".reasons").append(...view.reasons.map((reason) => element("li", reason)));
  const facts = row.querySelector(".facts");
  const time = (at) => {
    const made = element("time", at);
    made.dateTime = at;
    made.dataset.full = "";
    return made;
  };
  const all = [...view.facts, ["Received", time(view.received)], ["Size", view.size]];
  if (view.timestamp) all.splice(-1, 0, ["Happened", time(view.timestamp)]);
  for (const [name, value] of all) {
    const definition = element("dd", "");
    definition.append(value);
    facts.append(element("dt", name), definition);
  }
  const words = { event: "Open the event", letter: "Fix and replay", user: "Show the user", visitor: "Show the visitor" };
  for (const [kind, href] of Object.entries(view.links)) {
    const link = element("a", words[kind], "button small");
    link.href = href;
    row.querySelector(".actions").append(link);
  }
}

async function toggle(row) {
  const link = row.querySelector("a");
  const open = row.classList.toggle("open");
  link.setAttribute("aria-expanded", String(open));
  if (!open) {
    if (row.nextElementSibling?.classList.contains("detail")) row.nextElementSibling.remove();
    return;
  }
  const target = new URL(link.href);
  const query = target.searchParams;
  if (target.pathname.endsWith("letter")) {
    query.set("letter", query.get("id"));
    query.delete("id");
  }
  const answer = await fetch(`event.json?${query}`, { cache: "no-store" }).catch(() => null);
  if (!row.classList.contains("open")) return;
  const added = detail.content.firstElementChild.cloneNode(true);
  if (answer?.ok) fill(added, await answer.json());
  else added.cells[0].textContent = answer?.status === 404 ? "It is no longer stored." : "The console did not answer.";
  row.after(added);
  added.dispatchEvent(new Event("times", { bubbles: true }));
}

document.addEventListener("click", (event) => {
  const row = event.target.closest?.("tr.row");
  if (!row || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  const link = event.target.closest("a");
  if (link) event.preventDefault();
  else if (!getSelection().isCollapsed) return;
  toggle(row);
});
