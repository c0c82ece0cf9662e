"use strict";
// Searches sections.js, a list of all sections of the manual, which is a script so that pages that were opened as files can load it.
const field = document.getElementById("search"), found = document.getElementById("found"), pages = document.getElementById("pages");

const narrow = matchMedia("(max-width: 760px)");
const fold = () => { pages.open = !narrow.matches; };
narrow.addEventListener("change", fold);
fold();

let loading;
function load() {
  loading ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    script.src = "sections.js";
    script.onload = done;
    script.onerror = fail;
    document.head.append(script);
  });
  return loading;
}

// What finds words: at the beginning of one, or anywhere.
function finders(words) {
  const plain = words.map((w) => w.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return ["(?<![a-z0-9])", ""].map((before) => plain.map((w) => new RegExp(before + w, "gi")));
}

function matches(find) {
  const list = [];
  for (const s of sections) {
    const title = s.page + " " + s.title;
    let score = 0;
    for (const f of find) {
      const n = (title.search(f) >= 0 ? 20 : 0) + Math.min([...s.text.matchAll(f)].length, 5);
      if (n === 0) { score = 0; break; }
      score += n;
    }
    if (score > 0) list.push({ s, score });
  }
  return list.sort((a, b) => b.score - a.score).slice(0, 12).map((m) => m.s);
}

// A part of a text around the first word that was found, with all of them marked.
function around(text, find) {
  const at = find.map((f) => text.search(f)).filter((i) => i >= 0), p = document.createElement("p");
  let from = Math.max(0, (at.length ? Math.min(...at) : 0) - 60);
  from = from && text.indexOf(" ", from) + 1;
  let part = text.slice(from, from + 200);
  if (from + 200 < text.length) part = part.slice(0, part.lastIndexOf(" ")) + " …";
  if (from) p.append("… ");
  part.split(new RegExp("(" + find.map((f) => f.source).join("|") + ")", "i")).forEach((bit, i) => {
    if (i % 2 === 0) { p.append(bit); return; }
    const mark = document.createElement("mark");
    mark.textContent = bit;
    p.append(mark);
  });
  return p;
}

async function search() {
  const words = field.value.toLowerCase().split(/\s+/).filter((w) => w.length > 1);
  found.hidden = words.length === 0;
  if (found.hidden) return;
  await load();
  let find, hits = [];
  for (find of finders(words)) {
    hits = matches(find);
    if (hits.length) break;
  }
  const list = hits.map((s) => {
    const a = document.createElement("a"), b = document.createElement("b");
    a.href = s.file + (s.id && "#" + s.id);
    b.textContent = s.title && s.title !== s.page ? s.page + " › " + s.title : s.page;
    a.append(b, around(s.text, find));
    return a;
  });
  if (!list.length) list.push(Object.assign(document.createElement("p"), { textContent: "The manual does not have that." }));
  found.replaceChildren(...list);
}

field.addEventListener("focus", load);
field.addEventListener("input", search);
field.form.addEventListener("submit", (e) => {
  e.preventDefault();
  search().then(() => found.querySelector("a")?.click());
});
found.addEventListener("click", () => { found.hidden = true; });
addEventListener("keydown", (e) => {
  if (e.key === "/" && document.activeElement !== field) { e.preventDefault(); field.focus(); }
  if (e.key === "Escape") { field.value = ""; found.hidden = true; field.blur(); }
});
