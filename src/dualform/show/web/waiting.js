// What takes long is started, stopped and followed here, on pages that show work and on the page that is shown while
// the explorer is being opened. Without this script such pages reload themselves.
"use strict";

(() => {
  const headers = { "X-Dualform": "1" }, pause = 400;
  const later = () => new Promise(done => setTimeout(done, pause));

  // Show the page that was waited for.
  const arrive = () => typeof show === "function" ? show(location.href, { push: false }) : location.reload();

  function draw(part, state) {
    const isUnderWay = state.state === "queued" || state.state === "running";
    part.dataset.state = state.state;
    part.querySelector("progress").value = state.share || 0;
    part.querySelector("[data-start]").hidden = isUnderWay;
    part.querySelector("[data-stop]").hidden = !isUnderWay;
    const left = part.querySelector("[data-left]");
    left.textContent = state.says || "";
    left.classList.toggle("error", state.state === "failed");
    return isUnderWay;
  }

  async function ask(path, method = "GET") {
    const response = await fetch(path, { method, headers });
    return response.ok ? response.json() : { state: "done" };
  }

  async function follow(part) {
    if (part.dataset.followed) return;
    part.dataset.followed = "yes";
    try {
      while (document.contains(part)) {
        const state = await ask("/work/" + part.dataset.pending + ".json");
        if (!document.contains(part)) return;
        if (state.state === "done") { arrive(); return; }
        if (!draw(part, state)) return;
        await later();
      }
    } catch (error) {
      part.querySelector("[data-left]").textContent = "The explorer does not answer. Is it still running?";
    } finally {
      delete part.dataset.followed;
    }
  }

  document.addEventListener("click", async event => {
    const button = event.target.closest("[data-pending] [data-start], [data-pending] [data-stop]");
    if (!button) return;
    const part = button.closest("[data-pending]");
    const state = await ask("/work/" + part.dataset.pending + ("stop" in button.dataset ? "/stop" : ""), "POST");
    if (state.state === "done") arrive();
    else if (draw(part, state)) follow(part);
  });

  function followAll() {
    for (const part of document.querySelectorAll("[data-pending]")) if (part.dataset.state === "queued" || part.dataset.state === "running") follow(part);
  }

  async function open(main) {
    const says = main.querySelector("[data-says]"), bar = main.querySelector("progress");
    try {
      while (main.dataset.state !== "failed") {
        const response = await fetch(main.dataset.opening, { headers });
        const state = await response.json();
        if (state.state === "done") { location.reload(); return; }
        says.textContent = state.says;
        bar.value = state.share;
        main.dataset.state = state.state;
        await later();
      }
      main.querySelector("[data-heading]").textContent = "This memory cannot be opened";
      main.querySelector("[data-next]").textContent = "The terminal says the same; the explorer has ended.";
      bar.closest("section").hidden = true;
      says.classList.add("error");
    } catch (error) {
      says.textContent = "The explorer does not answer any more. Its terminal says why.";
    }
  }

  const opening = document.querySelector("[data-opening]");
  if (opening) { open(opening); return; }
  followAll();
  new MutationObserver(followAll).observe(document.body, { childList: true, subtree: true });
})();
