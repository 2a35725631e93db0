// What a page can do beyond its links and forms: keys, parts that come later, live rows, copying.
// Markup asks for it by data attributes; without this file every page still works.
"use strict";

const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

// --- where pages lie: below a path that this server alone knows, which an address typed lacks -----

const { base } = document.documentElement.dataset;
try {
  const known = localStorage.getItem("base");
  if (base !== "/") localStorage.setItem("base", base);
  else if (known && $("[data-refused='401']")) {
    localStorage.removeItem("base"); // another start of the server has another one
    location.replace(known + location.pathname.slice(1) + location.search + location.hash);
  }
} catch { /* a browser that keeps nothing: the link with the key opens pages */ }

// --- parts: <div data-load="URL"> is filled when it is seen, or its <details> opened -------------

const loads = new WeakMap(); // part → what fills it: who comes second waits for the same

function load(part) {
  if (!loads.has(part)) loads.set(part, fill(part).finally(() => loads.delete(part)));
  return loads.get(part);
}

async function fill(part) {
  const address = part.dataset.load;
  if (!address) return;
  try {
    const answer = await fetch(address, { headers: { Accept: "text/html" } });
    const text = await answer.text();
    const found = new DOMParser().parseFromString(text, "text/html");
    const body = found.querySelector("main") || found.body;
    part.replaceChildren(...body.childNodes);
    part.removeAttribute("data-load");
    part.dataset.part = address;
    start(part);
  } catch {
    part.textContent = "This part could not be loaded; reload the page.";
  }
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    seen.unobserve(entry.target);
    load(entry.target);
  }
}, { rootMargin: "200px" });

function start(within) {
  for (const part of $$("[data-load]", within)) seen.observe(part);
  for (const element of $$("[data-script]", within)) element.hidden = false;
}

// --- rows: <tr data-href="URL"> in any table; one of them is selected ----------------------------

const rows = () => $$("tr[data-href], [data-row]").filter((row) => row.offsetParent !== null);
const selected = () => $(".selected");

function mark(row) {
  const isHeld = selected()?.contains(document.activeElement);
  selected()?.removeAttribute("aria-current");
  selected()?.classList.remove("selected");
  if (!row) return;
  row.classList.add("selected");
  row.setAttribute("aria-current", "true");
  row.scrollIntoView({ block: "nearest" });
  if (isHeld) $("a.name, a[href]", row)?.focus({ preventScroll: true });
}

function select(row) {
  mark(row);
  if (row) document.dispatchEvent(new CustomEvent("row", { detail: row }));
}

// The row after the selected one, or before it; a part that lies between is loaded first.
async function neighbour(by) {
  const all = rows();
  const held = selected();
  const at = all.indexOf(held);
  if (at < 0) return all.at(by > 0 ? 0 : -1);
  const next = all[at + by];
  const isPast = (one, other) => by * (one.compareDocumentPosition(other) & Node.DOCUMENT_POSITION_FOLLOWING ? 1 : -1) > 0;
  const parts = $$(".chunk[data-load]").filter((part) => isPast(held, part) && (!next || isPast(part, next)));
  const part = parts.at(by > 0 ? 0 : -1);
  if (!part) return next;
  await load(part);
  return part.dataset.load ? next : neighbour(by);
}

async function move(by) {
  const row = await neighbour(by);
  if (row) select(row);
}

function open(row, isNew) {
  const link = row.dataset.href || $("a.name, a[href]", row)?.getAttribute("href");
  if (!link) return;
  if (isNew) window.open(link, "_blank", "noopener");
  else location.assign(link);
}

// --- keys ------------------------------------------------------------------------------------------

const keys = new Map([
  ["j", () => move(1)],
  ["k", () => move(-1)],
  ["/", () => ($('input[type="search"]') || $("main textarea, main input:not([type=hidden])"))?.focus()],
  ["?", () => toggle($("#keys"))],
  ["x", () => selected() && $('[form="chosen"]', selected())?.click()],
  ["[", () => $('[rel="prev"]')?.click()],
  ["]", () => $('[rel="next"]')?.click()],
]);
let waiting = "";
let timer = 0;

function toggle(dialog) {
  if (!dialog) return;
  if (dialog.open) dialog.close();
  else dialog.showModal();
}

const isField = (element) => element.matches?.('input:not([type="submit"], [type="button"], [type="checkbox"], [type="radio"]), textarea, select, [contenteditable]');

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented) return;
  if (isField(event.target)) {
    if (event.key === "Escape") event.target.blur();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form?.requestSubmit();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if ($("dialog[open]") && event.key !== "?") return;
  if (event.key === "Enter") {
    const row = selected();
    if (row && (event.target === document.body || event.target === row || event.target.id === "content")) open(row, false);
    return;
  }
  if (event.key === "Escape") {
    if (selected()) select(null);
    else $('[rel="up"]')?.click();
    return;
  }
  const pressed = waiting ? `${waiting} ${event.key}` : event.key;
  clearTimeout(timer);
  waiting = "";
  const marked = $$("[data-key]").find((element) => element.dataset.key === pressed && !element.closest("[aria-busy]"));
  if (marked) {
    event.preventDefault();
    marked.click();
  } else if (keys.has(pressed)) {
    event.preventDefault();
    keys.get(pressed)();
  } else if ($(`[data-key^="${CSS.escape(pressed)} "]`)) {
    waiting = pressed;
    timer = setTimeout(() => { waiting = ""; }, 1500);
  }
});

// --- what a list leads to: its rows are remembered, so that one leads to the next -------------------

function remember() {
  const list = $("[data-step]") ? [] : $$("tr[data-href]").map((row) => row.dataset.href);
  const after = $('.pages [rel="next"]')?.getAttribute("href") ?? "";
  if (list.length) sessionStorage.setItem("list", JSON.stringify([...list, after]));
}

try {
  const path = (address) => address.split("?")[0];
  const list = [...new Map(JSON.parse(sessionStorage.getItem("list") ?? "[]").map((each) => [path(each), each])).values()];
  const at = list.findIndex((each) => path(each) === location.pathname);
  for (const link of at < 0 ? [] : $$("[data-step]")) {
    const address = list[at + Number(link.dataset.step)];
    if (!address) continue;
    link.href = address;
    link.dataset.key = link.title.at(-1);
    link.hidden = false;
  }
  addEventListener("pagehide", remember);
} catch { /* a browser that keeps nothing */ }

// --- clicks: a whole row is its link; buttons that copy or open -------------------------------------

document.addEventListener("click", async (event) => {
  const target = event.target;
  const copier = target.closest("[data-copy]");
  if (copier) {
    const source = copier.dataset.copy ? $(copier.dataset.copy) : copier;
    await navigator.clipboard.writeText(source?.textContent ?? "");
    copier.dataset.label ??= copier.textContent;
    copier.textContent = "copied";
    setTimeout(() => { copier.textContent = copier.dataset.label; }, 1200);
    return;
  }
  if (target.matches("[data-all]")) {
    for (const box of $$('[form="chosen"]')) box.checked = target.checked;
  }
  const opener = target.closest("[data-open]");
  if (opener) return toggle(document.getElementById(opener.dataset.open));
  const row = target.closest("tr[data-href]");
  if (row && !target.closest("a, button, input, summary, label, select") && !String(getSelection())) {
    select(row);
    open(row, event.ctrlKey || event.metaKey);
  }
});

document.addEventListener("toggle", (event) => {
  if (event.target.open) for (const part of $$("[data-load]", event.target)) load(part);
}, true);

// --- live: <section id="…" data-live="trace reward"> is read anew when such a thing happens ---------
// A part is asked for by its own address, anything else is found in this page by its id. Only the
// page that is looked at listens: a browser opens six connections to a server, for all its pages.

const KINDS = ["trace", "rollout", "reward", "run"];
const pace = new Map(); // element → { timer, rest: how long it is left alone after each time }
const missed = new Set();
let source = null;

const isBusy = (element) => element.contains(document.activeElement) && isField(document.activeElement)
  || $('[form="chosen"]:checked', element)
  || (!getSelection().isCollapsed && element.contains(getSelection().anchorNode));

async function renew(element) {
  if (document.hidden || isBusy(element) || element.dataset.load) return void missed.add(element);
  const began = performance.now();
  const answer = await fetch(element.dataset.part || location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const found = new DOMParser().parseFromString(await answer.text(), "text/html");
  const body = element.dataset.part ? $("main", found) : found.getElementById(element.id);
  if (body) swap(element, body);
  pace.get(element).rest = Math.max(1100, 5 * (performance.now() - began));
}

function swap(element, body) {
  const names = (within) => $$("[data-href]", within).map((row) => row.dataset.href);
  const [known, held] = [new Set(names(element)), $(".selected", element)?.dataset.href];
  const opened = $$("details", element).map((each) => each.open);
  element.replaceChildren(...body.childNodes);
  if (!element.dataset.part && !body.dataset.live) element.removeAttribute("data-live");
  $$("details", element).forEach((each, at) => { each.open = opened[at] ?? each.open; });
  for (const row of $$("[data-href]", element)) {
    if (!known.has(row.dataset.href)) row.classList.add("fresh");
    if (row.dataset.href === held) row.classList.add("selected");
  }
  start(element);
}

function soon(element) {
  // The server holds what costs a look at the whole store for a second.
  const own = pace.get(element) ?? { timer: 0, rest: 1100 };
  pace.set(element, own);
  own.timer ||= setTimeout(async () => {
    try {
      await renew(element);
    } catch { /* the server is gone; the next event renews it */ }
    own.timer = 0;
  }, own.rest);
}

function listen() {
  if (source || document.hidden || !$("[data-live]")) return;
  source = new EventSource(document.documentElement.dataset.events);
  const state = $("[data-live-state]");
  const tell = (word, colour) => {
    state.hidden = false;
    state.textContent = word;
    state.className = `status ${colour}`;
  };
  source.addEventListener("open", () => tell("live", "good"));
  source.addEventListener("error", () => tell("not live: the server does not answer", "warn"));
  for (const kind of [...KINDS, "reset"]) {
    source.addEventListener(kind, () => {
      for (const element of $$("[data-live]")) {
        if (kind === "reset" || element.dataset.live.split(" ").includes(kind)) soon(element);
      }
    });
  }
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    source?.close();
    source = null;
    return;
  }
  // What happened meanwhile was not heard.
  $$("[data-live]").forEach(soon);
  listen();
});
addEventListener("pagehide", () => { source?.close(); source = null; });
addEventListener("pageshow", listen);
setInterval(() => { for (const element of missed) { missed.delete(element); soon(element); } }, 2000);

for (const here of $$(".top [aria-current], .tabs [aria-current]")) here.scrollIntoView({ block: "nearest", inline: "center" });
start(document);
