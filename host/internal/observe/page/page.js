// The page reads /status every two seconds, and begins with the host's /history, to draw the last five minutes. It sends nothing else.
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

// table fills a table: a column is [name, right-aligned?, row => text or element, row => class?].
function table(id, columns, rows, empty, why) {
  const t = $(id);
  if (rows.length === 0) { t.replaceChildren(make('caption', {}, empty)); return; }
  const body = [make('tr', {}, ...columns.map(([name, right]) => make('th', { class: right ? 'n' : '' }, name)))];
  for (const r of rows) {
    body.push(make('tr', {}, ...columns.map(([, right, text, style]) =>
      make('td', { class: [right ? 'n' : '', style ? style(r) : ''].join(' ').trim() }, text(r)))));
    const reason = why && why(r);
    if (reason) body.push(make('tr', {}, make('td', { class: 'why', colspan: columns.length }, reason)));
  }
  t.replaceChildren(...body);
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

// ---- levels

// levels shows what each level gives, takes and lets go. A host with one level has none of these counters.
function levels(s) {
  const list = [0, 1, 2, 3, 4, 5, 6, 7].filter(n => `level${n}_hits` in s.counters);
  const at = (n, what) => s.counters[`level${n}_${what}`] || 0;
  const loaded = sum(list, n => at(n, 'loaded_bytes'));
  $('levels').closest('section').hidden = list.length === 0;
  table('levels', [
    ['level', false, n => n], ['hits', true, n => count(at(n, 'hits'))], ['loaded', true, n => bytes(at(n, 'loaded_bytes'))],
    ['of all', true, n => part(at(n, 'loaded_bytes'), loaded)], ['now', true, n => rate(since(x => x.counters[`level${n}_loaded_bytes`] || 0))],
    ['pieces written', true, n => count(at(n, 'published'))], ['demoted to it', true, n => count(at(n, 'demotion'))],
    ['promoted to it', true, n => count(at(n, 'promotion'))], ['prefetched', true, n => count(at(n, 'prefetch'))],
    ['used', true, n => part(at(n, 'prefetch_used'), at(n, 'prefetch'))], ['kept', true, n => at(n, 'volatile') ? part(at(n, 'kept'), at(n, 'volatile')) : ''],
    ['shed', true, n => count(sum(['demotion', 'promotion', 'through', 'prefetch'], k => at(n, k + '_shed'))),
      n => at(n, 'demotion_shed') > 0 ? 'warn' : ''],
  ], list, 'one level');
}

// ---- the page

const good = ['in_service', 'acting', 'shadow'];
const state = s => s.replaceAll('_', ' ');

function show(s) {
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

  const fill = r => {
    const bar = make('i');
    bar.style.width = Math.min(100, 100 * r.used / Math.max(1, r.capacity)) + '%';
    return make('span', { class: 'fill', title: bytes(r.used) }, bar);
  };
  table('roots', [
    ['root', false, r => r.path + (r.shared ? ' (shared)' : '')],
    ['state', false, r => state(r.state) + (r.scanning ? ', scanning' : ''), r => r.state === 'in_service' ? 'good' : 'bad'],
    ['fill', false, fill], ['used', true, r => bytes(r.used)], ['capacity', true, r => bytes(r.capacity)],
    ['entries', true, r => count(r.entries)], ['writing', true, r => bytes(r.writing)],
    ['quarantine', true, r => bytes(r.quarantine), r => r.quarantine > 0 ? 'warn' : ''],
    ['evictions', true, r => count(r.evictions)], ['sheds', true, r => count(r.sheds), r => r.sheds > 0 ? 'warn' : ''],
    ['damaged', true, r => count(r.damaged), r => r.damaged > 0 ? 'bad' : ''], ['outages', true, r => count(r.outages)],
  ], s.roots, 'no roots', r => r.reason);

  levels(s);

  table('policies', [
    ['policy', false, p => p.name], ['role', false, p => p.role],
    ['state', false, p => state(p.state), p => good.includes(p.state) ? 'good' : 'bad'],
    ['module', false, p => [p.module, p.version].filter(Boolean).join(' ')], ['calls', true, p => count(p.calls)],
    ['records', true, p => count(p.records)], ['time/record', true, p => p.records > 0 ? time(p.time / p.records) : '–'],
    ['fuel/record', true, p => p.records > 0 && p.fuel > 0 ? count(p.fuel / p.records) : '–'],
    ['faults', true, p => count(p.faults), p => p.faults > 0 ? 'bad' : ''],
    ['hit ratio', true, p => p.trial ? `${part(p.trial.hits, p.trial.keys)}, live ${part(p.trial.live_hits, p.trial.keys)}` : '–'],
    ['root', false, p => p.root],
  ], s.policies, 'no policies', p => p.reason);

  $('peers').closest('section').hidden = s.peers.length === 0;
  table('peers', [
    ['peer', false, p => p.address || p.name], ['state', false, p => p.state, p => p.state === 'here' ? 'good' : p.state === 'alone' ? 'bad' : ''],
    ['entries', true, p => count(p.entries)], ['asked for', true, p => count(p.keys)], ['struck out', true, p => count(p.struck)],
    ['read', true, p => bytes(p.bytes)], ['offered', true, p => count(p.offers)], ['taken', true, p => count(p.taken)],
    ['failures', true, p => count(p.failures)], ['blamed', true, p => count(p.blamed), p => p.blamed > 0 ? 'bad' : ''],
  ], s.peers, '', p => p.reason);

  heat(s);

  table('routes', [
    ['memory', false, r => r.gpu], ['root', false, r => r.root], ['route', false, r => r.route], ['direction', false, r => r.direction],
    ['now', true, r => rate(since(x => sum(x.routes, o => o.bytes, o => ['gpu', 'root', 'route', 'direction'].every(k => o[k] === r[k]))))],
    ['pieces', true, r => count(r.files)], ['bytes', true, r => bytes(r.bytes)], ['in flight', true, r => r.in_flight],
    ['busy', true, r => part(r.busy, s.uptime)],
    ['errors', true, r => count(r.errors), r => r.errors > 0 ? 'bad' : ''],
  ], s.routes.filter(r => r.files + r.errors + r.in_flight > 0), 'nothing has moved yet');

  table('usage', [
    ['model', false, u => u.model || '(unnamed)'], ['tenant', true, u => u.tenant], ['keys', true, u => count(u.keys)],
    ['hit ratio', true, u => part(u.hits, u.keys)], ['loaded', true, u => bytes(u.loaded_bytes)], ['stored', true, u => bytes(u.stored_bytes)],
  ], s.usage, 'no session yet');

  table('sessions', [
    ['', true, x => x.number], ['engine', false, x => x.engine], ['role', false, x => x.role], ['rank', true, x => x.rank],
    ['model', false, x => x.model], ['leases', true, x => x.leases], ['jobs', true, x => x.jobs],
    ['for', true, x => span(Date.now() / 1000 - x.since)],
  ], s.session_list, 'no session');
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
  show(status);
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
