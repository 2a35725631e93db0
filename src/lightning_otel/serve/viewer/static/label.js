// Labels: a key scores the item on the screen, and the next one, which was read ahead, takes its
// place. Scores are sent one after the other; one that is refused leads back to its item.
"use strict";

const desk = $("#label");
const judge = $("#judge");
const sitting = $("#sitting");
const REMEMBERED = ["names", "author"];
const parts = new Map(); // id → its part, read or being read
const given = []; // what was done, for undo
let { items, names, author, done } = JSON.parse(desk?.dataset.sitting ?? "{}");
let at = items?.indexOf(desk.dataset.item) ?? -1;
let sending = Promise.resolve();
let pending = 0; // scores that are not kept yet: who leaves is asked

// --- who labels, and what: asked for once, and remembered by the browser ----------------------------

try {
  for (const name of REMEMBERED) {
    const field = sitting?.elements[name];
    if (field && !new URLSearchParams(location.search).has(name)) field.value = localStorage.getItem(`label.${name}`) ?? field.value;
  }
  sitting?.addEventListener("submit", () => REMEMBERED.forEach((name) => localStorage.setItem(`label.${name}`, sitting.elements[name].value)));
} catch { /* a browser that keeps nothing asks again */ }

// --- items: the one on the screen, and the next one --------------------------------------------------

async function fetchPart(id) {
  const answer = await fetch(`${desk.dataset.part}?rollout=${encodeURIComponent(id)}`, { headers: { Accept: "text/html" } });
  if (!answer.ok) throw new Error(answer.status);
  return $("main", new DOMParser().parseFromString(await answer.text(), "text/html"));
}

function readPart(place) {
  const id = items[place];
  if (id !== undefined && !parts.has(id)) {
    const part = fetchPart(id);
    parts.set(id, part);
    part.catch(() => parts.delete(id));
  }
  return parts.get(id);
}

const nameOf = () => judge.elements.name.value;
const own = (name) => $$("#item .labels li").find((each) => each.dataset.name === name && each.dataset.author === author)?.dataset.value ?? "";

function choose(name) {
  const field = $$("[name=name]", judge).find((each) => each.value === name);
  if (field.type === "radio") field.checked = true;
}

async function show(place, name = names[0]) {
  at = Math.min(Math.max(place, 0), items.length);
  desk.setAttribute("aria-busy", "true"); // a key now would score what is not seen yet
  const id = items[at];
  const isEnd = id === undefined;
  try {
    if (!isEnd) $("#item").replaceChildren(...(await readPart(at)).childNodes);
  } catch {
    $("#item").textContent = "This item could not be loaded; reload the page.";
  }
  parts.clear(); // another look at it shows what became of it
  for (const element of [$("#item"), judge]) element.hidden = isEnd;
  $("#end").hidden = !isEnd;
  $("[name=item]", judge).value = id ?? ""; // elements.item is a method
  $("#at").textContent = Math.min(at + 1, items.length);
  $("#done").textContent = new Set(done).size;
  $("progress", desk).value = new Set(done).size;
  choose(name);
  start($("#item"));
  const address = new URL(location.href);
  if (id === undefined) address.searchParams.delete("item");
  else address.searchParams.set("item", id);
  history.replaceState(null, "", address);
  scrollTo(0, 0);
  desk.removeAttribute("aria-busy");
  readPart(at + 1);
}

// --- scores -------------------------------------------------------------------------------------------

async function send(fields) {
  const body = new URLSearchParams({ author, ...fields });
  const answer = await fetch(judge.action, { method: "POST", body, headers: { Accept: "application/json" } });
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.detail ?? answer.status);
  return told;
}

addEventListener("beforeunload", (event) => { if (pending) event.preventDefault(); });

function queue(fields, place) {
  pending += 1;
  sending = sending.then(() => send(fields)).then(
    (told) => { if (told.notes?.length) $("#told").textContent += `. ${told.notes.join(" ")}`; },
    (error) => {
      done = done.filter((each) => each !== fields.item);
      $("#told").textContent = `Not kept: ${error.message}`;
      return show(place, fields.name);
    },
  ).finally(() => { pending -= 1; });
  return sending;
}

function score(reward) {
  const [item, name, place] = [items[at], nameOf(), at];
  given.push({ item, name, place, before: own(name), wasDone: done.includes(item) });
  queue({ item, name, reward }, place);
  $("#told").textContent = `${name} ${Number(reward).toPrecision(2).replace(/\.?0+$/, "")} given; u takes it back`;
  const following = names[names.indexOf(name) + 1];
  if (following) return choose(following);
  done.push(item);
  return show(at + 1);
}

async function undo() {
  const last = given.pop();
  const { item, name, place, before } = last ?? { item: items[at], name: nameOf(), place: at, before: "" };
  if (!last?.wasDone) done = done.filter((each) => each !== item);
  desk.setAttribute("aria-busy", "true");
  $("#told").textContent = `${name} taken back`;
  await queue({ item, name, reward: before }, place);
  parts.delete(item);
  return show(place, name);
}

judge?.addEventListener("submit", (event) => {
  event.preventDefault();
  if (desk.hasAttribute("aria-busy")) return;
  const { value } = event.submitter;
  if (value) score(value);
  else undo();
});

$("[rel=next]", judge ?? document)?.addEventListener("click", (event) => {
  event.preventDefault();
  show(at + 1);
});

if (desk) {
  keys.set("[", () => desk.hasAttribute("aria-busy") || show(at - 1));
  readPart(at + 1);
}
