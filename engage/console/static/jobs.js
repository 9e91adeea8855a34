// SPDX-License-Identifier: Apache-2.0
// The progress of a replay. When it ends, the page is loaded once more.

async function poll() {
  const answer = await fetch("jobs", { headers: { Accept: "application/json" }, cache: "no-store" }).catch(() => null);
  const job = answer?.ok ? await answer.json() : null;
  const progress = document.getElementById("progress");
  if (answer?.status === 401 || (job && (!job.running || (job.total && !progress)))) return location.reload();
  if (job) {
    if (progress) progress.value = job.done;
    document.getElementById("counts").textContent = job.counts;
  }
  setTimeout(poll, 1000);
}

poll();
