// The page reads /status and /tables every two seconds, and begins with the host's /history, to draw the last five minutes. It sends nothing else.
'use strict';
const every = 2000, kept = 150;
const $ = id => document.getElementById(id);
let history = []; // readings of the status: those of /history have only what is drawn over time
let before = null; // the page's own reading before the last

// ---- text

const units = (n, step, names, digits = 1) => {
  let i = 0;
  while (n >= step && i < names.length - 1) { n /= step; i++; }
  return (i === 0 && Number.isInteger(n) ? n : n.toFixed(n >= 100 ? 0 : digits)) + names[i];
};
const bytes = n => units(n, 1024, [' B', ' KiB', ' MiB', ' GiB', ' TiB', ' PiB']);
const rate = n => bytes(n) + '/s';
const count = n => units(n, 1000, ['', ' k', ' M', ' G', ' T']);
const part = (a, b) => b > 0 ? (100 * a / b).toFixed(1) + ' %' : '–';
const time = s => s === 0 ? '–' : s < 1e-6 ? (s * 1e9).toFixed(0) + ' ns' : s < 1e-3 ? (s * 1e6).toFixed(0) + ' µs' : s < 1 ? +(s * 1e3).toPrecision(3) + ' ms' : +s.toPrecision(3) + ' s';
const span = s => s < 120 ? s.toFixed(0) + ' s' : s < 7200 ? (s / 60).toFixed(0) + ' min' : s < 172800 ? (s / 3600).toFixed(0) + ' h' : (s / 86400).toFixed(0) + ' d';

// ---- elements

function make(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) if (v !== undefined && v !== '') e.setAttribute(k, v);
  e.append(...children.filter(c => c !== undefined && c !== null));
  return e;
}

// table draws a table of the host: see Table in tables.go.
function table(t) {
  const e = $(t.name);
  if (!e) return;
  e.closest('section').hidden = t.rows.length === 0;
  const body = [make('tr', {}, ...t.columns.map(c => make('th', { class: c.number ? 'n' : '' }, c.title)))];
  for (const r of t.rows) {
    body.push(make('tr', {}, ...t.columns.map((c, i) => {
      const bar = c.part && make('i');
      if (bar) bar.style.width = (parseFloat(r.cells[i]) || 0) + '%';
      return make('td', { class: [c.number ? 'n' : '', r.tones[i]].join(' ').trim() }, bar ? make('span', { class: 'fill', title: r.cells[i] }, bar) : r.cells[i]);
    })));
    if (r.why) body.push(make('tr', {}, make('td', { class: 'why', colspan: t.columns.length }, r.why)));
  }
  e.replaceChildren(...body);
}

// ---- rates

// since returns the growth per second of a figure between the last two readings of the page's own.
function since(read) {
  const [a, b] = [before, history.at(-1)];
  return a && b.uptime > a.uptime ? Math.max(0, read(b) - read(a)) / (b.uptime - a.uptime) : 0;
}

const sum = (list, read, keep = () => true) => list.filter(keep).reduce((n, x) => n + read(x), 0);
const moved = direction => s => sum(s.routes, r => r.bytes, r => r.direction === direction);

// series returns, for each reading but the first, a figure of it and of the one before.
const series = f => history.slice(1).map((b, i) => f(history[i], b, b.uptime - history[i].uptime));

// ago returns how many readings before the last one the i-th of a series was due.
const ago = i => Math.round((history.at(-1).uptime - history[i + 1].uptime) * 1000 / every);

// ---- drawing

const colours = ['--blue', '--orange', '--violet', '--green', '--red'];

// lines draws series of numbers (null: a gap) and says which colour is which.
function lines(id, all, top, text) {
  const svg = $(id), ns = 'http://www.w3.org/2000/svg';
  const add = (tag, attributes) => {
    const e = document.createElementNS(ns, tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    svg.append(e);
    return e;
  };
  svg.replaceChildren();
  const max = top || Math.max(1, ...all.flatMap(s => s.values.filter(v => v !== null)));
  const scale = make('div', { class: 'scale' }, ...[max, max / 2, 0].map(v => make('span', {}, text(v))));
  const times = make('div', { class: 'times' }, ...['5 min ago', '2½ min ago', 'now'].map(t => make('span', {}, t)));
  svg.parentElement.replaceChildren(svg, scale, times);
  for (const y of [5, 80, 155]) add('line', { class: 'axis', x1: 0, x2: 600, y1: y, y2: y });
  all.forEach((s, i) => {
    let d = '', pen = 'M';
    s.values.forEach((v, x) => {
      if (v === null) { pen = 'M'; return; }
      if (ago(x) >= kept) return;
      d += `${pen}${(600 * (1 - ago(x) / (kept - 1))).toFixed(1)} ${(155 - 150 * Math.min(1, v / max)).toFixed(1)}${pen === 'M' ? 'h0' : ''}`; // a dot, if gaps are around it
      pen = 'L';
    });
    add('path', { d }).style.stroke = `var(${colours[i % colours.length]})`;
  });
  $(id + '-key').replaceChildren(...all.flatMap((s, i) => {
    const b = make('b', {}, s.name + ' ');
    b.style.color = `var(${colours[i % colours.length]})`;
    const last = s.values.at(-1);
    return [b, (last === undefined || last === null ? '–' : text(last)) + '  '];
  }));
}

function quantile(q, bounds, buckets) {
  const all = buckets.reduce((a, b) => a + b, 0);
  let below = 0;
  for (let i = 0; i < buckets.length; i++) {
    below += buckets[i];
    if (all > 0 && below >= q * all) return bounds[Math.min(i, bounds.length - 1)];
  }
  return 0;
}

const answers = { lookup: 'LOOKUP', load: 'LOAD', store_read: 'STORE, blocks free', store_published: 'STORE, published' };

function heat(status) {
  $('heat').replaceChildren(...status.latencies.map(l => {
    const rows = l.buckets.length;
    const columns = series((a, b) => {
      const before = a.latencies.find(x => x.answer === l.answer), now = b.latencies.find(x => x.answer === l.answer);
      return now.buckets.map((n, i) => n - (before ? before.buckets[i] : 0));
    });
    const canvas = make('canvas', { width: kept, height: rows });
    const c = canvas.getContext('2d');
    c.fillStyle = getComputedStyle($('heat')).color;
    const most = Math.max(1, ...columns.flat());
    columns.forEach((column, x) => column.forEach((n, i) => {
      if (n <= 0) return;
      c.globalAlpha = .2 + .8 * Math.log1p(n) / Math.log1p(most);
      c.fillRect(kept - 1 - ago(x), rows - 1 - i, 1, 1);
    }));
    const recent = columns.reduce((a, column) => column.map((n, i) => n + (a[i] || 0)), []);
    return make('figure', {}, canvas, make('figcaption', {}, make('b', {}, answers[l.answer] || l.answer),
      ` p50 ≤ ${time(quantile(.5, l.bounds, recent))}, p99 ≤ ${time(quantile(.99, l.bounds, recent))}, 5 min ago to now; from below ${time(l.bounds[0])} to above ${time(l.bounds.at(-1))}`));
  }));
}

// ---- the page

function show(s, tables) {
  $('version').textContent = s.version;
  $('uptime').textContent = 'up ' + span(s.uptime);
  $('ready').textContent = s.not_ready.length ? 'not ready' : 'ready';
  $('ready').className = s.not_ready.length ? 'bad' : 'good';
  $('reasons').replaceChildren(...s.not_ready.map(why => make('li', {}, why)));

  const keys = since(x => x.counters.lookup_keys), hits = since(x => x.counters.lookup_hits);
  const used = sum(s.roots, r => r.used), capacity = sum(s.roots, r => r.capacity);
  const tiles = [
    [part(s.counters.lookup_hits, s.counters.lookup_keys), 'hit ratio since the start'],
    [keys > 0 ? part(hits, keys) : '–', 'hit ratio now'],
    [rate(since(moved('load'))), 'loads'],
    [rate(since(moved('store'))), 'stores'],
    [count(since(x => x.counters.lookups)) + '/s', 'lookups'],
    [part(used, capacity), `of ${bytes(capacity)} used`],
    [count(sum(s.roots, r => r.entries)), 'entries'],
    [`${s.sessions}, ${s.engines}`, 'sessions, engines'],
    [count((s.counters.load_errors || 0) + (s.counters.store_errors || 0)), 'failed pieces'],
  ];
  $('tiles').replaceChildren(...tiles.map(([value, name]) => make('div', {}, make('b', {}, String(value)), make('span', {}, name))));

  const perSecond = direction => series((a, b, t) => Math.max(0, moved(direction)(b) - moved(direction)(a)) / t);
  lines('throughput', [{ name: 'loads', values: perSecond('load') }, { name: 'stores', values: perSecond('store') }], 0, rate);

  const live = series((a, b) => {
    const n = b.counters.lookup_keys - a.counters.lookup_keys;
    return n > 0 ? (b.counters.lookup_hits - a.counters.lookup_hits) / n : null;
  });
  const shadows = s.policies.filter(p => p.trial).map(p => ({
    name: 'shadow ' + p.name,
    values: series((a, b) => {
      const find = x => (x.policies.find(o => o.trial && o.name === p.name) || { trial: { keys: 0, hits: 0 } }).trial;
      const n = find(b).keys - find(a).keys;
      return n > 0 ? (find(b).hits - find(a).hits) / n : null;
    }),
  }));
  lines('ratio', [{ name: 'live', values: live }, ...shadows], 1, v => (100 * v).toFixed(1) + ' %');

  tables.forEach(table);
  heat(s);
}

// get reads a document. It returns null where a token is wanted.
async function get(name) {
  const token = sessionStorage.getItem('token');
  const answer = await fetch(name, { cache: 'no-store', headers: token ? { Authorization: 'Bearer ' + token } : {} });
  if (answer.status === 401) return null;
  if (!answer.ok) throw new Error(`/${name} answers ${answer.status}`);
  return answer.json();
}

// read reads the status, and says whether it may.
async function read() {
  const status = await get('status');
  $('login').hidden = status !== null;
  document.querySelector('main').hidden = status === null;
  if (status === null) return false;
  const last = history.at(-1);
  // Another process, or a page that did not run for a while, begins with what the host has kept. A reading of a moment ago is left
  // out: the rate between it and this one would be of that moment, and drawn as that of two seconds.
  before = last;
  if (!last || status.uptime < last.uptime || status.uptime > last.uptime + 5 * every / 1000) {
    before = null;
    history = (await get('history') || []).filter(s => s.uptime <= status.uptime - every / 2000);
  }
  if (!history.length || status.uptime > history.at(-1).uptime) history.push(status);
  if (history.length > kept + 1) history.shift();
  show(status, await get('tables') || []);
  return true;
}

async function tick() {
  try {
    if (!await read()) return; // until a token is typed
  } catch (e) {
    $('ready').textContent = 'no answer: ' + e.message;
    $('ready').className = 'bad';
  }
  setTimeout(tick, every);
}

$('login').addEventListener('submit', e => {
  e.preventDefault();
  sessionStorage.setItem('token', $('token').value);
  tick();
});
tick();
