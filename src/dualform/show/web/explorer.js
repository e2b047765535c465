// Controls take effect at once, slow answers are waited for, and own inputs are uploaded. Pages work without this script.
"use strict";

const main = () => document.getElementById("main");
const headers = { "X-Dualform": "1" };
let latest = 0;

// Fetch a page and replace the content of this page with it.
async function show(address, { push = true } = {}) {
  const request = ++latest;
  const focused = document.activeElement && document.activeElement.id;
  main().setAttribute("aria-busy", "true");
  try {
    const response = await fetch(address, { headers });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    if (request !== latest) return;
    const newMain = page.getElementById("main");
    if (!newMain) { location.href = address; return; }
    document.title = page.title;
    for (const opened of document.querySelectorAll("details[id][open]")) { const again = page.getElementById(opened.id); if (again) again.open = true; }
    main().replaceWith(document.adoptNode(newMain));
    for (const part of ["header", "footer"]) document.querySelector(part).replaceWith(document.adoptNode(page.querySelector(part)));
    const moved = new URL(address, location.href).pathname !== location.pathname;
    if (push) history.pushState(null, "", address);
    if (moved) window.scrollTo(0, 0);
    if (focused && document.getElementById(focused)) document.getElementById(focused).focus({ preventScroll: true });
    begin();
    const verdict = document.querySelector(".verdict, h1");
    document.getElementById("announcement").textContent = verdict ? verdict.textContent : "";
  } catch (error) {
    if (request === latest) { main().removeAttribute("aria-busy"); problem("The explorer does not answer. Is it still running?"); }
  }
}

function problem(text) {
  const place = document.querySelector("[data-problem]");
  document.getElementById("announcement").textContent = text;
  if (place) { place.textContent = text; place.hidden = false; place.scrollIntoView({ block: "nearest" }); }
}

function addressOf(form) {
  const fields = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (value !== "") fields.append(name, value);
  const text = fields.toString();
  return form.getAttribute("action") + (text ? "?" + text : "");
}

// Attach the handlers of new content.
function begin() {
  const canvas = document.querySelector("[data-draw]");
  if (canvas) drawable(canvas);
  for (const button of document.querySelectorAll("[data-copy]")) button.hidden = !navigator.clipboard;
  for (const title of document.querySelectorAll(".mark > title")) {  // shown at once in place of the browser's slow tip
    title.parentNode.dataset.says = title.textContent;
    title.remove();
  }
  for (const passage of document.querySelectorAll(".text.small")) {
    const mark = passage.querySelector("mark");
    if (mark) passage.scrollTop = mark.offsetTop - passage.offsetTop - passage.clientHeight / 3;
  }
  reachWide();
}

// A table that scrolls sideways can be reached and scrolled by keys.
function reachWide() {
  for (const wide of document.querySelectorAll(".wide")) {
    if (wide.scrollWidth <= wide.clientWidth || wide.hasAttribute("role")) continue;
    const part = wide.closest("section, details"), heading = part && part.querySelector("h2, h3, summary");
    wide.tabIndex = 0;
    wide.setAttribute("role", "region");
    wide.setAttribute("aria-label", (heading ? heading.textContent : "Numbers") + ", as a table");
  }
}
window.addEventListener("resize", reachWide);

// A text that can be copied.
document.addEventListener("click", async event => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
  button.textContent = "Copied";
});

// Charts: what a bar says, beside the pointer.
const tip = document.createElement("div");
tip.className = "tip"; tip.hidden = true; tip.setAttribute("aria-hidden", "true");
document.body.append(tip);
function point(event) {
  const mark = event.target.closest && event.target.closest("[data-says]");
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.says;
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = (event.clientY > 60 ? event.clientY - 36 : event.clientY + 20) + "px";
}
document.addEventListener("pointermove", point);
document.addEventListener("pointerdown", point);
document.addEventListener("scroll", () => { tip.hidden = true; }, true);

// Texts: a passage shows which tokens of the input it speaks to, a token shows its passages.
const levelsOf = figure => figure.dataset.speaks.split(",").map(Number);
// The level of a token; of a character that is several tokens, that of the one that counts most.
function levelOf(levels, token) {
  let level = 0;
  for (let i = Number(token.dataset.token); i <= Number(token.dataset.last); i++) if (Math.abs(levels[i] || 0) > Math.abs(level)) level = levels[i];
  return level;
}
function colour(levels) {
  for (const token of document.querySelectorAll("[data-tokens] [data-token]")) {
    token.dataset.own = token.dataset.own || token.className;
    const level = levels ? levelOf(levels, token) : null;
    token.className = level === null ? token.dataset.own : (token.dataset.own.includes("is-asked") ? "is-asked " : "") + "at-" + Math.abs(level) + (level < 0 ? " against" : "");
  }
}
function choose(token) {
  for (const figure of document.querySelectorAll("[data-speaks]")) {
    const level = token === null ? 0 : Math.abs(levelOf(levelsOf(figure), token));
    figure.classList.toggle("is-near", level >= 5);
    figure.classList.toggle("faint", token !== null && level === 0);
  }
}
for (const [begin, end] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
  document.addEventListener(begin, event => {
    const figure = event.target.closest("[data-speaks]"), token = event.target.closest("[data-tokens] [data-token]");
    if (figure) colour(levelsOf(figure));
    if (token) choose(token);
  });
  document.addEventListener(end, event => {
    if (event.target.closest("[data-speaks]")) colour(null);
    if (event.target.closest("[data-tokens] [data-token]")) choose(null);
  });
}

let sending = false;
async function bring(address, body) {
  if (sending) return;
  sending = true;
  try {
    const response = await fetch(address, { method: "POST", headers, body });
    const text = await response.text();
    if (response.ok) await show(JSON.parse(text).address);
    else problem(text.startsWith("{") ? JSON.parse(text).error : text);
  } catch (error) {
    problem("This could not be sent: it may be too large.");
  } finally {
    sending = false;
  }
}

function drawable(canvas) {
  const pen = canvas.getContext("2d");
  const clear = () => { pen.fillStyle = "#fff"; pen.fillRect(0, 0, canvas.width, canvas.height); };
  const at = event => { const box = canvas.getBoundingClientRect(); return [(event.clientX - box.left) * canvas.width / box.width, (event.clientY - box.top) * canvas.height / box.height]; };
  let last = null, drawn = false;
  clear();
  pen.lineCap = "round"; pen.lineWidth = canvas.width / 11; pen.strokeStyle = "#000";
  canvas.addEventListener("pointerdown", event => { last = at(event); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", event => { if (!last) return; const now = at(event); pen.beginPath(); pen.moveTo(...last); pen.lineTo(...now); pen.stroke(); last = now; drawn = true; });
  canvas.addEventListener("pointerup", () => { last = null; });
  document.querySelector("[data-clear]").addEventListener("click", () => { clear(); drawn = false; });
  document.querySelector("[data-ask-drawing]").addEventListener("click", () => drawn ? canvas.toBlob(blob => bring("/own/picture?name=drawing", blob), "image/png") : problem("Draw something first."));
}

document.addEventListener("change", event => {
  const field = event.target, form = field.form;
  if (field.matches("[data-upload]")) {
    const file = field.files[0], invert = document.querySelector("[data-invert]").value;
    if (file) bring("/own/picture?name=" + encodeURIComponent(file.name.slice(0, 60)) + (invert ? "&invert=" + invert : ""), file);
  } else if (form && form.matches("[data-go]")) {
    if (form.elements.row.value !== "") show(form.getAttribute("action") + "/" + form.elements.row.value + location.search);
  } else if (form && form.matches("[data-live]")) {
    for (const name of (field.dataset.clears || "").split(" ").filter(Boolean)) for (const other of form.querySelectorAll("[name=" + name + "]")) { other.checked = false; if (other.tagName === "SELECT") other.value = ""; }
    show(addressOf(form));
  }
});

document.addEventListener("input", event => {
  const shown = event.target.matches("input[type=range]") && event.target.parentElement.querySelector("output");
  if (shown) { shown.textContent = event.target.value; main().dataset.stale = ""; }
});

document.addEventListener("submit", event => {
  const form = event.target;
  if (!form.matches("[data-live], [data-go]")) return;
  event.preventDefault();
  if (form.matches("[data-go]") && form.elements.row.value === "") return;
  show(form.matches("[data-go]") ? form.getAttribute("action") + "/" + form.elements.row.value + location.search : addressOf(form));
});

document.addEventListener("click", event => {
  const token = event.target.closest("a[data-token]"), asked = document.querySelector(".tokens [aria-current]");
  if (token && event.shiftKey && asked) {  // a span from the token that is asked about
    event.preventDefault();
    const ends = [asked, token].flatMap(end => [Number(end.dataset.token), Number(end.dataset.last)]).sort((a, b) => a - b);
    const address = new URL(token.href);
    address.searchParams.set("token", ends[0] + "-" + ends[3]);
    show(address.pathname + address.search);
    return;
  }
  const link = event.target.closest("a[data-live]");
  if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey && event.button === 0) { event.preventDefault(); show(link.getAttribute("href")); }
  if (event.target.closest("[data-ask-text]")) bring("/own/text", document.querySelector("[data-text]").value);
});

document.addEventListener("keydown", event => {
  const typing = event.target.matches("input, select, textarea, canvas");
  if (event.altKey && event.key >= "1" && event.key <= "9") {
    const tab = document.querySelector("[data-key='" + event.key + "']");
    if (tab) { event.preventDefault(); tab.click(); }
  } else if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    const link = document.querySelector(event.key === "ArrowLeft" ? "a[rel=prev]" : "a[rel=next]");
    if (link) { event.preventDefault(); show(link.href); }
  }
});

window.addEventListener("dragover", event => { if (document.querySelector("[data-upload]")) event.preventDefault(); });
window.addEventListener("drop", event => {
  const file = event.dataTransfer && event.dataTransfer.files[0];
  if (!file || !document.querySelector("[data-upload]")) return;
  event.preventDefault();
  bring("/own/picture?name=" + encodeURIComponent(file.name.slice(0, 60)), file);
});

window.addEventListener("popstate", () => show(location.href, { push: false }));
begin();

// The selection of training examples, which all pages share: ticks take effect at once.
async function changeSelection(fields) {
  try {
    const response = await fetch("/selection", { method: "POST", headers, body: new URLSearchParams(fields).toString() });
    const text = await response.text();
    if (!response.ok) { problem(text.startsWith("{") ? JSON.parse(text).error : text); return false; }
    const count = JSON.parse(text).selected;
    for (const shown of document.querySelectorAll("[data-selected]")) shown.textContent = count.toLocaleString("en");
    for (const bar of document.querySelectorAll("[data-selection]")) bar.toggleAttribute("data-any", count > 0);
    document.getElementById("announcement").textContent = count.toLocaleString("en") + " selected";
    return true;
  } catch (error) {
    problem("The explorer does not answer. Is it still running?");
    return false;
  }
}

document.addEventListener("change", async event => {
  const box = event.target;
  if (!box.matches("[data-select]")) return;
  for (const same of document.querySelectorAll("[data-select]")) if (same.dataset.select === box.dataset.select) same.checked = box.checked;
  const done = await changeSelection({ do: box.checked ? "add" : "remove", index: box.dataset.select });
  if (!done) box.checked = !box.checked;
});

document.addEventListener("click", async event => {
  const button = event.target.closest("[data-do]");
  if (button && await changeSelection({ do: button.dataset.do, of: button.dataset.of || "" })) show(location.href, { push: false });
});
