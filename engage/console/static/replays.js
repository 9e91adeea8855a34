// SPDX-License-Identifier: Apache-2.0
// The progress of a replay. When it ends, the page is loaded once more.

async function poll() {
  const answer = await fetch("replays", { headers: { Accept: "application/json" }, cache: "no-store" }).catch(() => null);
  const replay = answer?.ok ? await answer.json() : null;
  const progress = document.getElementById("progress");
  if (answer?.status === 401 || (replay && (!replay.running || (replay.total && !progress)))) return location.reload();
  if (replay) {
    if (progress) progress.value = replay.done;
    document.getElementById("counts").textContent = replay.counts;
  }
  setTimeout(poll, 1000);
}

poll();
