// The explorers in a browser. Everything that a slider moves is computed here, by the rules of explore.py; what needs the
// model's formulas comes from Python as `answer`, or in an exported page from `doc.answers`. No library, no network.

// ---------------------------------------------------------------------------------------------- geometry, as explore.py

export const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const mod = (a, n) => ((a % n) + n) % n;
const divisors = (n) => Array.from({ length: n }, (_, i) => i + 1).filter((i) => n % i === 0);

export function strides(sizes, order) {
  const out = {};
  let stride = 1;
  for (const axis of [...order].reverse()) { out[axis] = stride; stride *= sizes[axis]; }
  return out;
}

// tp as two axes: tp, and inside it kv, whose ranks hold copies of one of the model's KV heads.
export function parted(sizes, order, heads) {
  if (!heads) return [sizes, order];
  const copies = sizes.tp % heads ? 1 : Math.max(1, sizes.tp / heads);
  return [{ ...sizes, tp: sizes.tp / copies, kv: copies }, order.flatMap((a) => (a === "tp" ? ["tp", "kv"] : [a]))];
}

export function coordinates(sizes, order, device, apart = strides(sizes, order)) {
  return Object.fromEntries(order.map((a) => [a, Math.floor(device / apart[a]) % sizes[a]]));
}

export function groups(sizes, order, axes) {
  const apart = strides(sizes, order), found = new Map(), n = product(order.map((a) => sizes[a]));
  for (let device = 0; device < n; device++) {
    let first = device, rank = 0;
    for (const a of axes) {
      const at = Math.floor(device / apart[a]) % sizes[a];
      first -= at * apart[a];
      rank = rank * sizes[a] + at;
    }
    if (!found.has(first)) found.set(first, []);
    found.get(first)[rank] = device;
  }
  return [...found.keys()].sort((a, b) => a - b).map((first) => found.get(first));
}

export function parseLayout(text) {
  const words = text === "whole" ? [] : text.split(" ").filter(Boolean), sums = words.filter((w) => w[0] === "+");
  const dims = words.filter((w) => w[0] !== "+").map((w) => w.split("/"));
  return { dims: dims.map(([name, axes]) => ({ name, axes: axes ? axes.split(",") : [] })), sums: sums.map((w) => w.slice(1)) };
}

export function slices(layout, shape, sizes, at) {
  const out = [];
  for (const [i, { axes }] of layout.dims.entries()) {
    let parts = 1, index = 0;
    for (const a of axes) { parts *= sizes[a]; index = index * sizes[a] + at[a]; }
    if (shape[i] % parts) return null;
    out.push([(index * shape[i]) / parts, ((index + 1) * shape[i]) / parts]);
  }
  return out;
}

export function places(sizes, order, node) {
  const n = product(order.map((a) => sizes[a])), apart = strides(sizes, order);
  const nested = [...new Set(order.flatMap((a) => divisors(sizes[a]).map((k) => apart[a] * k)))].sort((a, b) => a - b);
  const block = nested.find((b) => Math.floor(n / b) <= 512), num = n / block;
  const [w, h, rise, most] = num <= 64 ? [72, 46, 14, 8] : [44, 20, 10, 16], limit = Math.min(most, Math.ceil(2 * Math.sqrt(num)));
  let columns = Math.max(...nested.filter((b) => b % block === 0 && b / block <= limit).map((b) => b / block));
  if (3 * columns < limit) columns = limit;
  const gaps = order.filter((a) => sizes[a] > 1).map((a) => Math.floor(apart[a] / block)).filter((s) => s > 1 && !(columns % s && s % columns)).map((s) => [s, 6]);
  const held = Math.floor(node / block), frames = [];
  const framed = node < n && node % block === 0 && num % held === 0 && (columns % held === 0 || held % columns === 0);
  if (framed) gaps.push([held, 10], ...(held < columns ? [[columns, 6]] : []));
  const add = (index, chosen) => chosen.reduce((sum, [s, gap]) => sum + gap * Math.floor(index / s), 0);
  const cells = Array.from({ length: num }, (_, i) => {
    const row = Math.floor(i / columns), col = i % columns, below = gaps.filter(([s]) => s >= columns);
    return [col * (w + 4) + add(col, gaps.filter(([s]) => s < columns)),
      row * (h + rise) + add(row, below.map(([s, gap]) => [Math.floor(s / columns), gap]))];
  });
  for (let first = 0; framed && first < num; first += held) {
    const [x0, y0] = cells[first], [x1, y1] = cells[first + held - 1];
    frames.push([x0 - 3, y0 - 3, x1 - x0 + w + 6, y1 - y0 + h + 6]);
  }
  return { block, columns, w, h, rise, cells, frames };
}

// The points of an arrow between two cells, clear of their words.
export function lane({ cells, w, h, rise }, from, to) {
  const [[x0, y0], [x1, y1]] = [cells[from], cells[to]], down = to > from, off = Math.floor(rise / 3);
  if (y0 === y1) return [x0, x1].map((x) => [x + w / 2, y0 + (down ? h - 4 : 4)]);
  const [side, edge, gap, end] = down ? [w - 5, y0 + h, y0 + h + off, y1] : [5, y0, y0 - off, y1 + h];
  return [[x0 + side, edge], [x0 + side, gap], [x1 + side, gap], [x1 + side, end]];
}

export function rounds(kind, g, pairs = null) {
  const reduced = kind === "reduce-scatter" || kind === "all-reduce", exchanged = kind.endsWith("all-to-all");
  const copy = (rows) => rows.map((r) => [...r]), table = (f) => Array.from({ length: g }, (_, r) => Array.from({ length: g }, (_, b) => Number(f(r, b))));
  const held = table((r, b) => reduced || exchanged || r === b), out = [{ sends: [], held: copy(held) }];
  if (kind === "collective-permute" && g > 1) {
    const sends = (pairs || held.map((_, r) => [r, (r + 1) % g])).map(([s, d]) => [s, d, s]);
    return [...out, { sends, held: table((r, b) => sends.some(([s, d]) => s === b && d === r)) }];
  }
  for (const part of kind === "all-reduce" ? ["reduce-scatter", "all-gather"] : [kind]) {
    for (let t = 0; t < g - 1; t++) {
      const hop = exchanged ? t + 1 : 1, shift = part === "reduce-scatter" ? t + 1 : part === "all-gather" ? t : -hop;
      const sends = held.map((_, r) => [r, (r + hop) % g, mod(r - shift, g)]), before = copy(held), keeps = part === "all-gather";
      for (const [s, d, b] of sends) {
        const moved = exchanged ? 1 : before[s][b];
        held[d][b] = moved + (keeps ? 0 : held[d][b]);
        held[s][b] -= keeps ? 0 : moved;
      }
      out.push({ sends, held: copy(held) });
    }
  }
  return out;
}

// What an answer belongs to: the state in one spelling, without what is only looked at.
export function key(state, view, axes = null, most = 0) {
  const mesh = axes && readMesh(state.mesh, axes, most);
  const one = !axes ? state : { ...state, mesh: mesh.sizes ? mesh.text : state.mesh, order: words(state.order).join(" ") };
  return Object.keys(state).filter((k) => !view.includes(k)).map((k) => pythonText(one[k])).join("|");
}
const pythonText = (v) => (v === true ? "True" : v === false ? "False" : v === null ? "None" : String(v));
const words = (text) => text.split(/[\s,]+/).filter(Boolean);

export const meshText = (sizes, axes) => axes.filter((a) => sizes[a] > 1).map((a) => `${a}=${sizes[a]}`).join(" ") || "dp=1";

// A mesh text: its sizes and its usual spelling, or why it cannot be drawn, in Python's words.
export function readMesh(text, axes, most) {
  if (text.length > 200) return { why: `a mesh text of ${text.length} characters; six axes need fewer, for instance 'dp=2 fsdp=2 tp=2'` };
  const bang = /^\s*!/.exec(text)?.[0] ?? "", from = bang ? bang.length : text.length - text.trimStart().length;
  const bad = (start, end, why) => ({ why: `${why}\n  ${text}\n  ${" ".repeat(start)}${"^".repeat(Math.max(1, end - start))}` });
  const tokens = [...text.slice(from).matchAll(/[^\s,]+/g)].map((m) => [m[0], m.index + from]);
  if (!tokens.length) return bad(0, 1, "an empty mesh; write for instance 'dp=2 fsdp=2 tp=2'");
  const bare = tokens.every(([token]) => /^-?\d+$/.test(token)), unnamed = { 3: ["dp", "fsdp", "tp"], 4: ["dp", "fsdp", "tp", "sp"] }[tokens.length];
  if (bare && !unnamed) return bad(from, text.length, `${tokens.length} unnamed sizes; give 4 (dp,fsdp,tp,sp) or 3 (dp,fsdp,tp), or name the axes: 'dp=2 tp=4'`);
  const given = {};
  for (const [i, [token, at]] of tokens.entries()) {
    const [, named, value = ""] = bare ? ["", unnamed[i], token] : /^([^=:]*)(?:[=:](.*))?$/s.exec(token), name = named === "mp" ? "tp" : named;
    const stop = (why) => bad(at, at + token.length, why);
    if (!axes.includes(name)) return stop(`unknown mesh axis '${name}'; the axes are ${axes.join(" ")}`);
    if (name in given) return stop(`axis '${name}' is given twice`);
    if (!/^(-1|0*[1-9]\d*)$/.test(value)) return stop(`the size of '${name}' must be a positive number or -1`);
    if (value === "-1" && Object.values(given).includes(-1n)) return stop("two axes are -1; only one can be inferred");
    given[name] = BigInt(value);
  }
  const free = Object.keys(given).find((a) => given[a] === -1n);
  if (free) return { why: `mesh '${text}' leaves ${free} to be inferred, which needs the number of devices; write its size` };
  const all = Object.fromEntries(axes.map((a) => [a, given[a] ?? 1n])), size = Object.values(all).reduce((a, b) => a * b, 1n);
  const usual = (bang && "!") + meshText(all, axes);
  if (size > BigInt(most)) return { why: `mesh '${usual}' has ${size} devices; at most ${most} are drawn` };
  return { sizes: Object.fromEntries(axes.map((a) => [a, Number(all[a])])), text: usual };
}

export function scaled(value, units, base) {
  let power = 0;
  while (power + 1 < units.length && Math.abs(value) >= 0.9995 * base) { value /= base; power++; }
  return `${Math.abs(value) >= 100 ? value.toFixed(0) : Number(value.toPrecision(3))} ${units[power]}`;
}
export const sizeText = (bytes) => scaled(bytes, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
export function timeText(s) {
  if (s >= 600) return s < 7200 ? scaled(s / 60, ["min"], 1) : scaled(s / 3600, ["h"], 1);
  return s ? scaled(s * 1e9, ["ns", "µs", "ms", "s"], 1000) : "0 s";
}

// What a device holds of every tensor: [row, live layout text, slices or null, bytes]. A tensor of a compiled program
// brings its shards with it.
const modeOf = (state) => state.zero + (state.tp_sequence ? "s" : "");
export function holdings(rows, state, sizes, order, device) {
  const at = coordinates(sizes, order, device);
  return rows.map((row) => {
    const [text, cut] = cutOf(row, state, sizes, at, device);
    const bytes = cut ? product(cut.map(([a, b]) => b - a)) * row.itemsize * row.times : 0;
    return { row, text, cut, bytes };
  });
}

function live(layout, sizes) {
  const dims = layout.dims.map((d) => ({ ...d, axes: d.axes.filter((a) => sizes[a] > 1) }));
  return { dims, sums: layout.sums.filter((a) => sizes[a] > 1) };
}

// A tensor's shape on a mesh: a pipeline pads the layers to as many for every chunk of every stage.
export function shapeOf(row, state, sizes) {
  if (!row.chunks || sizes.pp === 1) return row.shape;
  const cells = sizes.pp * (row.chunks[state.schedule] ?? 1);
  return [Math.ceil(row.shape[0] / cells) * cells, ...row.shape.slice(1)];
}

function cutOf(row, state, sizes, at, device) {
  if (row.shards) return [row.layout, row.shards[row.holds[device]] ?? null];
  const [all] = parted(sizes, [], row.heads), layout = live(parseLayout(row.layout[modeOf(state)]), all);
  if (all.kv) at = { ...at, tp: Math.floor(at.tp / all.kv), kv: at.tp % all.kv };
  const words = layout.dims.map((d) => d.name + (d.axes.length ? "/" + d.axes.join(",") : ""));
  return [[...words, ...layout.sums.map((a) => "+" + a)].join(" ") || "whole", slices(layout, shapeOf(row, state, all), all, at)];
}

// The shard of one tensor that each device holds, as a number in order of appearance; null where it cannot be cut.
export function shardNumbers(row, state, sizes, order) {
  if (row.shards) return [...row.holds];
  [sizes, order] = parted(sizes, order, row.heads);
  const layout = live(parseLayout(row.layout[modeOf(state)]), sizes), shape = shapeOf(row, state, sizes);
  if (!slices(layout, shape, sizes, Object.fromEntries(order.map((a) => [a, 0])))) return null;
  const n = product(order.map((a) => sizes[a])), apart = strides(sizes, order), numbers = new Map(), out = [];
  const axes = layout.dims.flatMap((d) => d.axes);
  for (let device = 0; device < n; device++) {
    let shard = 0;
    for (const a of axes) shard = shard * sizes[a] + (Math.floor(device / apart[a]) % sizes[a]);
    if (!numbers.has(shard)) numbers.set(shard, numbers.size);
    out.push(numbers.get(shard));
  }
  return out;
}

// ------------------------------------------------------------------------------------------------------------- drawing

const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const esc = (text) => String(text).replace(/[&<>"]/g, (c) => escapes[c]);
const many = (n, what) => `${n} ${n === 1 ? what : what + "s"}`;
const KEYS = 'data-lm-suppress-shortcuts="true"'; // JupyterLab takes arrows, letters and x away from what has the focus

const CSS = `
.lpx{font:13px/1.45 "DejaVu Sans",Verdana,system-ui,sans-serif;color:var(--ink);background:var(--paper);padding:12px;max-width:1240px}
.lpx *{box-sizing:border-box}.lpx h1,.lpx h2{font-size:15px;margin:0 0 10px}.lpx .sub{font-size:13px;margin:14px 0 6px}
.lpx .cols{display:flex;flex-wrap:wrap;gap:16px 28px;align-items:flex-start}.lpx .cols>*{min-width:0}
.lpx label{display:inline-flex;flex-direction:column;font-size:12px;color:var(--soft);gap:2px}
.lpx label.flag{flex-direction:row;align-items:center;gap:6px}
.lpx input,.lpx select,.lpx button,.lpx textarea{font:inherit;color:var(--ink);background:var(--cell);border:1px solid var(--edge);border-radius:4px;padding:3px 7px;min-height:26px}
.lpx input[type=range]{padding:0;border:0;background:none;width:170px}.lpx input[type=number]{width:100px}
.lpx input[type=text]{width:250px}.lpx textarea{width:520px;max-width:100%;font-family:"DejaVu Sans Mono",monospace;font-size:12px}
.lpx button{cursor:pointer}.lpx button[aria-pressed=true]{background:var(--ink);color:var(--paper)!important}
.lpx :focus-visible{outline:3px solid var(--dp-line);outline-offset:1px}.lpx svg :focus-visible{outline:none}
.lpx g.cell,.lpx .editable rect:has(title){cursor:pointer}.lpx .editable text{pointer-events:none}.lpx g.cell:focus-visible rect.ring{stroke:var(--ink);stroke-width:4}
.lpx .axes{display:grid;grid-template-columns:auto 44px 170px 34px auto auto;gap:3px 8px;align-items:center}
.lpx .axes .name{font-weight:600}.lpx .axes output{text-align:right}
.lpx .form{display:flex;flex-wrap:wrap;gap:8px 14px;align-items:end;flex:1 1 400px;max-width:620px}
.lpx .refusal{border-left:4px solid var(--s4);background:var(--cell);padding:6px 12px;margin:10px 0;white-space:pre-wrap}
.lpx .refusal:empty{display:none}
.lpx table{border-collapse:collapse;font-size:12px}.lpx th,.lpx td{text-align:left;padding:2px 10px 2px 0;vertical-align:top;font-weight:400}
.lpx thead th{color:var(--soft)}.lpx td.n,.lpx th.n{text-align:right;white-space:nowrap}.lpx tbody tr.on{background:var(--cell)}
.lpx tbody tr.kind>*{padding-top:6px}.lpx tbody tr.kind th{font-weight:600}
.lpx td code{white-space:nowrap;font-size:11px}.lpx th button{padding:0 4px;min-height:0;border-color:transparent;background:none;text-align:left}
.lpx .scroll{max-height:430px;overflow:auto}.lpx pre{font:12px/1.45 "DejaVu Sans Mono",monospace;margin:4px 0;white-space:pre-wrap}
.lpx .soft{color:var(--soft);font-size:12px}.lpx .bar{display:flex;gap:6px;flex-wrap:wrap;align-items:center;margin:6px 0}
.lpx .waiting{opacity:.4}.lpx label:has(:disabled),.lpx button:disabled{opacity:.5;cursor:default}.lpx .wide{overflow-x:auto}
@media(max-width:600px){.lpx .axes{grid-template-columns:auto 40px 1fr 34px auto}.lpx .axes .soft{display:none}.lpx input[type=range]{width:100%;min-width:70px}
.lpx .wide svg{max-width:none}.lpx input[type=text]{width:100%}.lpx .cols>*{flex-basis:100%!important}}
.lpx svg{max-width:100%;height:auto;display:block}.lpx code{font-family:"DejaVu Sans Mono",monospace;font-size:12px}
`;

function themeCss({ light, dark }, scope) {
  const vars = (theme) => Object.entries(theme).map(([k, v]) => `--${k}:${v}`).join(";");
  return `${scope}{${vars(light)}}@media (prefers-color-scheme:dark){${scope}{${vars(dark)}}}` +
    `[data-jp-theme-light=true] ${scope}{${vars(light)}}[data-jp-theme-light=false] ${scope}{${vars(dark)}}`;
}

const AXES = ["pp", "dp", "fsdp", "ep", "sp", "tp", "kv"]; // a live array's mesh may name others: they are grey
const axisColor = (a, line = "") => (AXES.includes(a) ? `var(--${a}${line})` : a === "s1" ? "var(--s1)" : line ? "var(--ink)" : "var(--s2)");
const onFill = (a) => (["pp", "dp", "sp"].includes(a) ? "var(--white)" : "var(--black)");

// The mesh as one SVG; returns its text. `look` says what each cell's second line and fill are.
function gridSvg(view) {
  const { place, sizes, order, n, state, label, fill, arrows, what } = view, { w, h, block, cells, columns } = place;
  const width = Math.max(...cells.map(([x]) => x)) + w + 12, height = cells[cells.length - 1][1] + h + 12, chosen = Math.floor(state.device / block);
  const apart = strides(sizes, order), named = order.filter((a) => sizes[a] > 1);
  const parts = place.frames.map(([x, y, fw, fh]) => `<rect x="${x}" y="${y}" width="${fw}" height="${fh}" rx="4" fill="none" stroke="var(--ink)" stroke-dasharray="6 4"/>`);
  const words = []; // beside the cells, whose labels say more: a reader must not hear both
  for (let row = 0; row * columns < cells.length; row++) {
    parts.push(`<g role="row">`);
    for (let i = row * columns; i < Math.min(cells.length, (row + 1) * columns); i++) {
      const [x, y] = cells[i], device = i * block, second = label(i), paint = fill(i), here = i === chosen;
      const name = block > 1 ? `devices ${device} to ${device + block - 1}` : `device ${device}`;
      const where = named.filter((a) => apart[a] >= block).map((a) => `${a} ${Math.floor(device / apart[a]) % sizes[a]}`).join(", ");
      parts.push(`<g class="cell" role="gridcell" data-device="${device}" tabindex="${here ? 0 : -1}" aria-selected="${here}" ${KEYS} ` +
        `aria-label="${esc([name, where, second].filter(Boolean).join("; "))}">` +
        `<rect class="ring" x="${x}" y="${y}" width="${w}" height="${h}" rx="3" fill="${paint ? axisColor(paint) : "var(--cell)"}" ` +
        `stroke="${here ? "var(--ink)" : "var(--edge)"}" stroke-width="${here ? 3 : 1}"/></g>`);
      words.push(`<text x="${x + w / 2}" y="${y + (h > 30 ? 19 : h / 2 + 4)}" text-anchor="middle" font-size="${h > 30 ? 13 : 11}" ` +
        `font-weight="${here ? 700 : 400}" fill="${paint ? onFill(paint) : "var(--ink)"}">${device}</text>` +
        (h > 30 ? `<text x="${x + w / 2}" y="${y + 34}" text-anchor="middle" font-size="11" fill="${paint ? onFill(paint) : "var(--soft)"}">${esc(second)}</text>` : ""));
    }
    parts.push("</g>");
  }
  const halos = [], drawn = arrows.map(([from, to]) => {
    const points = lane(place, Math.floor(from / block), Math.floor(to / block)), [[x0, y0], [x1, y1]] = points.slice(-2);
    const d = Math.hypot(x1 - x0, y1 - y0) || 1, [ux, uy] = [(x1 - x0) / d, (y1 - y0) / d], [bx, by] = [x1 - 7 * ux, y1 - 7 * uy];
    const shaft = `M${[...points.slice(0, -1), [bx, by]].join(" L")}`;
    const head = `M${x1},${y1} L${bx - 3.5 * uy},${by + 3.5 * ux} L${bx + 3.5 * uy},${by - 3.5 * ux} z`;
    halos.push(`<path class="halo" d="${shaft} ${head}" fill="none" stroke="var(--paper)" stroke-width="4.6"/>`);
    return `<path class="arrow" d="${shaft}" fill="none" stroke="var(--ink)" stroke-width="1.6"/><path d="${head}" fill="var(--ink)"/>`;
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" role="grid" aria-label="${esc(what)}" width="${width}" height="${height}" viewBox="-7 -7 ${width} ${height}">` +
    parts.join("") + `<g aria-hidden="true" pointer-events="none">${words.join("")}${halos.join("")}${drawn.join("")}</g></svg>`;
}

const SERIES = ["s1", "s2", "s3", "s4", "s5"];

// One bar of parts against a limit, its legend beside it, as SVG. A part has the colour of its meaning; others what is left.
function barSvg(title, parts, colors, text, limit = 0, whole = 0) {
  const total = parts.reduce((sum, [, v]) => sum + v, 0), high = Math.max(total, limit, whole) || 1, wide = 500;
  const free = SERIES.filter((s) => !parts.some(([name]) => colors[name] === s));
  let x = 0;
  const out = [];
  parts.forEach(([name, value], i) => {
    const w = (wide * value) / high, color = colors[name] || free.shift() || "cell";
    out.push(`<rect x="${x.toFixed(2)}" y="24" width="${w.toFixed(2)}" height="24" fill="var(--${color})" stroke="var(--ink)" stroke-width="0.75"><title>${esc(name)} ${text(value)}</title></rect>`,
      `<rect x="${(i % 2) * 280}" y="${62 + 18 * Math.floor(i / 2)}" width="12" height="12" fill="var(--${color})" stroke="var(--ink)" stroke-width="0.75"/>`,
      `<text x="${(i % 2) * 280 + 18}" y="${72 + 18 * Math.floor(i / 2)}" font-size="12" fill="var(--ink)">${esc(name)} ${text(value)}</text>`);
    x += w;
  });
  const fits = limit ? (total > limit ? `about ${text(total - limit)} too much` : `about ${text(limit - total)} free`) : "";
  const said = `${title}: ${text(total)}` + (limit ? ` of ${text(limit)} usable, ${fits}` : "");
  if (limit) out.push(`<path d="M${(wide * limit) / high},20 v32" stroke="var(--ink)" stroke-width="2.5" stroke-dasharray="5 3"/>`);
  const rest = whole > limit, height = 60 + 18 * Math.ceil((parts.length + rest) / 2) + 4, [lx, ly] = [(parts.length % 2) * 280, 62 + 18 * Math.floor(parts.length / 2)];
  if (rest) out.push(`<path d="M${(wide * whole) / high},20 v32 M${lx + 6},${ly - 2} v16" stroke="var(--edge)" stroke-width="1.5" stroke-dasharray="2 2"/>`,
    `<text x="${lx + 18}" y="${ly + 10}" font-size="12" fill="var(--ink)">whole memory ${text(whole)}</text>`);
  return `<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="${esc(said)}" width="560" height="${height}" viewBox="-2 0 560 ${height}">` +
    `<text x="0" y="13" font-size="13" font-weight="${limit && total > limit ? 700 : 400}" fill="var(--ink)">${esc(said)}</text>${out.join("")}</svg>`;
}

// Who holds which part of what a group exchanges, round by round.
function progressSvg(members, step, full, axis) {
  const g = members.length, size = Math.max(10, Math.min(26, Math.floor(360 / g))), left = 76, shown = Math.min(g, 16);
  const out = [];
  for (let r = 0; r < shown; r++) {
    out.push(`<text x="${left - 8}" y="${r * (size + 3) + size / 2 + 4}" text-anchor="end" font-size="11" fill="var(--ink)">device ${members[r]}</text>`);
    for (let b = 0; b < g; b++) {
      const part = step.held[r][b] / full, x = left + b * (size + 2), y = r * (size + 3);
      out.push(`<rect x="${x}" y="${y}" width="${size}" height="${size}" fill="var(--cell)" stroke="var(--edge)"/>`);
      if (part) out.push(`<rect x="${x}" y="${y + size * (1 - part)}" width="${size}" height="${size * part}" fill="${axisColor(axis)}"/>`);
    }
  }
  const words = members.slice(0, shown).map((d, r) => `device ${d} holds ${step.held[r].map((c, b) => (c === full ? `${b}` : c ? `${c}/${full} of ${b}` : "")).filter(Boolean).join(", ") || "nothing"}`);
  return `<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="${esc(words.join("; "))}" width="${left + g * (size + 2)}" height="${shown * (size + 3) + 1}" viewBox="0 -1 ${left + g * (size + 2)} ${shown * (size + 3) + 1}">${out.join("")}</svg>`;
}

const shortTime = (s) => (s < 1e-6 ? "< 1 µs" : timeText(s));

function download(name, type, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function savePng(svg, name) {
  const image = new Image(), url = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  image.onload = () => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    URL.revokeObjectURL(url);
    canvas.toBlob((blob) => download(name, "image/png", blob));
  };
  image.src = url;
}

// --------------------------------------------------------------------------------------------------------- the widgets

function control(c, value) {
  const name = `data-name="${c.name}" ${KEYS}`;
  if (c.kind === "flag") return `<label class="flag"><input type="checkbox" ${name}${value ? " checked" : ""}>${esc(c.label)}</label>`;
  const all = c.options || [], shown = c.stored ? all.filter((o) => c.stored.includes(o)) : all;
  const options = (c.kind === "choice" && !shown.includes(value) ? [value, ...shown] : shown).map((o) => `<option value="${esc(o)}"${o === value ? " selected" : ""}>${esc(o)}</option>`);
  if (c.kind === "choice") return `<label>${esc(c.label)}<select ${name}>${options.join("")}</select></label>`;
  if (c.kind === "lines") return `<label>${esc(c.label)}<textarea rows="5" ${name} spellcheck="false">${esc(value)}</textarea></label>`;
  if (c.kind === "slider") return `<label><span>${esc(c.label)}: <output>${esc(value)}</output></span><input type="range" min="${c.min}" max="${c.max}" step="${c.step || 1}" value="${value}" ${name}></label>`;
  const type = c.kind === "int" ? `type="number" min="${c.min}"` : 'type="text" spellcheck="false"';
  return `<label>${esc(c.label)}<input ${type} value="${esc(value)}" ${name}></label>`;
}

// What cannot change anything in an exported page is not offered there; the page says its value.
const offered = (doc) => doc.controls.filter((c) => !c.stored || c.free || c.stored.length > 1);
const left = (doc) => doc.controls.filter((c) => !offered(doc).includes(c) && c.kind !== "lines");
const settled = (doc) => (left(doc).length ? `<p class="soft">Stored in this page for ${left(doc).map((c) => `${esc(c.label)}: ${esc(c.stored[0])}`).join("; ")}. Others need a notebook.</p>` : "");

function read(input, c) {
  if (c.kind === "flag") return input.checked;
  if (c.kind === "int" || c.kind === "slider") return input.value === "" ? null : Number(input.value);
  return c.kind === "choice" ? c.options.find((o) => String(o) === input.value) : input.value;
}

// Values of the form follow the state, except the field that is being typed in.
function refresh(root, controls, state) {
  for (const c of controls) {
    const input = root.querySelector(`[data-name="${c.name}"]`);
    if (input) input.disabled = Boolean(c.without && String(state[c.without]).trim());
    if (!input || (input === input.getRootNode().activeElement && c.kind !== "slider")) continue;
    if (c.kind === "choice" && ![...input.options].some((o) => o.value === String(state[c.name]))) input.add(new Option(state[c.name]));
    if (c.kind === "flag") input.checked = state[c.name];
    else if (input.value !== String(state[c.name])) input.value = state[c.name];
    const shown = input.parentElement.querySelector("output");
    if (shown) shown.textContent = state[c.name];
  }
}

function start({ model, el }) {
  const doc = model.get("doc"), root = document.createElement("div");
  root.className = "lpx";
  const style = document.createElement("style");
  style.textContent = themeCss(doc.theme, ".lpx") + CSS;
  el.append(style, root);
  const widget = { doc, root, model, state: { ...doc.state, ...model.get("state") }, timer: 0, alarm: 0, late: false };
  widget.heading = doc.answers ? `<h1>llmpar: ${esc(doc.title)}</h1>` : `<h2>${esc(doc.title)}</h2>`;
  widget.answer = () => {
    const live = model.get("answer"), wanted = key(widget.state, doc.view, doc.axes && !doc.fixed ? Object.keys(doc.axes) : null, doc.most);
    return (live && live.key === wanted && live) || (doc.answers && doc.answers[wanted]) || null;
  };
  // An answer is on its way (a page that brought its answers has no Python to ask); after three seconds nobody is there.
  widget.waiting = () => !doc.answers && !widget.late && !widget.answer();
  widget.expect = () => {
    clearTimeout(widget.alarm);
    widget.late = false;
    if (widget.waiting()) widget.alarm = setTimeout(() => { widget.late = !widget.answer(); widget.draw(); }, 3000);
  };
  widget.set = (patch) => {
    widget.state = { ...widget.state, ...patch };
    clearTimeout(widget.timer);
    widget.timer = setTimeout(() => { model.set("state", widget.state); model.save_changes(); }, 25);
    widget.expect();
    widget.draw();
  };
  const onState = () => { widget.state = { ...widget.state, ...model.get("state") }; widget.expect(); widget.draw(); };
  const onAnswer = () => { widget.expect(); widget.draw(); };
  model.on("change:answer", onAnswer);
  model.on("change:state", onState);
  widget.stop = () => { clearTimeout(widget.timer); clearTimeout(widget.alarm); model.off("change:answer", onAnswer); model.off("change:state", onState); };
  return widget;
}

const SILENT = "Python does not answer: its kernel is busy, or was restarted; then run the cell again.";

// A small explorer: a form, and a picture that Python drew (or that the exported page brought with it).
function renderFigure(context) {
  const widget = start(context), { doc, root } = widget, controls = offered(doc), text = controls.find((c) => c.kind === "lines");
  root.innerHTML = `${widget.heading}<div class="form">${controls.map((c) => control(c, widget.state[c.name])).join("")}</div>${settled(doc)}` +
    (text ? `<div class="bar"><button type="button" data-do="take" ${KEYS}>start from this schedule</button><button type="button" data-do="discard" ${KEYS}>discard mine</button><span class="soft own"></span></div>` : "") +
    `<div class="refusal" role="status"></div><div class="picture${text ? " editable" : ""}"></div><p class="soft said" aria-live="polite"></p>`;
  const area = root.querySelector("textarea"), find = (name) => root.querySelector(name);
  root.addEventListener("input", (event) => {
    const c = controls.find((c) => c.name === event.target.dataset.name), value = c && read(event.target, c);
    if (c && value !== null) widget.set({ [c.name]: value });
  });
  root.addEventListener("click", ({ target }) => { // an operation of a timetable is selected in the text, ready to be typed over
    if (target.dataset?.do === "take" || target.dataset?.do === "discard") {
      area.value = target.dataset.do === "take" ? area.placeholder : "";
      return widget.set({ [text.name]: area.value });
    }
    const cell = /^stage (\d+), (\S+): /.exec(target.querySelector?.("title")?.textContent || "");
    if (!cell || !area) return;
    area.value ||= area.placeholder;
    area.focus();
    const lines = area.value.split("\n"), start = lines.slice(0, cell[1]).reduce((n, line) => n + line.length + 1, 0);
    const at = (lines[cell[1]] || "").search(new RegExp(`(?<![^\\s&])${cell[2].replace(".", "\\.")}(?![^\\s&])`));
    if (at >= 0) area.setSelectionRange(start + at, start + at + cell[2].length);
  });
  widget.draw = () => {
    const answer = widget.answer(), waiting = widget.waiting();
    refresh(root, controls, widget.state);
    find(".picture").classList.toggle("waiting", waiting);
    if (waiting) return; // the last picture stays, dimmed
    const missing = doc.answers ? "This choice is not stored in the page; open the explorer in a notebook." : SILENT;
    find(".refusal").textContent = answer ? answer.refusal : missing;
    find(".picture").innerHTML = answer ? answer.svg : ""; // never the picture of another state
    find(".said").textContent = answer ? answer.note : "";
    for (const [name, value] of Object.entries((answer && answer.fill) || {})) {
      const input = find(`[data-name="${name}"]`);
      if (input) input.placeholder = value;
    }
    if (!text) return;
    const own = Boolean(widget.state[text.name].trim());
    find('[data-do="take"]').disabled = own || !area.placeholder;
    find('[data-do="discard"]').disabled = !own;
    find(".own").textContent = own ? "Your own order is drawn; the greyed controls belong to the schedule." : "";
  };
  widget.draw();
  return widget.stop;
}

function renderMesh(context) {
  const widget = start(context), { doc, root, model } = widget, names = Object.keys(doc.axes), fixed = doc.fixed, controls = fixed ? [] : offered(doc);
  const sub = doc.answers ? "h2" : "h3"; // below the page's one h1, or a notebook's h2
  const steps = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
  let sizes = null, order = names, kept = null, hovered = null;
  root.innerHTML = widget.heading + (fixed ? "" : `<div class="cols"><div><div class="axes"></div><div class="form" style="margin-top:8px">` +
    controls.slice(0, 2).map((c) => control(c, widget.state[c.name])).join("") + `</div></div><div class="form" data-part="form">` +
    controls.slice(2).map((c) => control(c, widget.state[c.name])).join("") + settled(doc) + `</div></div>`) +
    `<div data-part="planned"></div><div class="refusal" role="status"></div>
    <div class="cols"><div><${sub} class="sub" data-part="what"></${sub}><div class="wide" data-part="grid"></div><p class="soft" data-part="hover">&nbsp;</p><div data-part="memory"></div></div>
    <div style="flex:1 1 430px"><${sub} class="sub" data-part="device" aria-live="polite"></${sub}><div class="scroll" tabindex="0" role="region" aria-label="what the device holds" ${KEYS} data-part="holds"></div></div></div>
    <div class="cols"><div class="wide" data-part="traffic"></div><div class="wide" data-part="steps"></div></div>
    <div data-part="code"></div><div class="bar" data-part="buttons"></div><div data-part="compare"></div>`;
  const parts = Object.fromEntries([...root.querySelectorAll("[data-part]")].map((e) => [e.dataset.part, e]));
  const part = (name) => parts[name], drawnAs = {};
  const fill = (name, html) => { if (drawnAs[name] !== html) parts[name].innerHTML = drawnAs[name] = html; };
  let scrolled = 0;
  part("holds").addEventListener("scroll", (event) => { scrolled = event.target.scrollTop; });
  const buttons = [["copy", "copy as code"], ["keep", "keep as A, compare"], ["svg", "save SVG"], ["png", "save PNG"], ["html", "save HTML"]];
  part("buttons").innerHTML = buttons.filter(([id]) => !fixed || id === "svg" || id === "png")
    .map(([id, text]) => `<button type="button" data-do="${id}" ${KEYS}>${text}</button>`).join("") + `<span class="soft" role="status" data-part="done"></span>`;
  parts.done = root.querySelector('[data-part="done"]');

  function axisRows() {
    const box = root.querySelector(".axes");
    if (!box) return;
    if (box.dataset.order !== order.join()) {
      box.dataset.order = order.join();
      box.innerHTML = order.map((a, i) => `<button type="button" data-outer="${a}" aria-label="move ${a} outward" title="move ${a} outward"${i ? "" : " disabled"} ${KEYS}>↑</button>` +
        `<span class="name" style="color:${axisColor(a, "-line")}">${a}</span><input type="range" min="0" max="9" step="1" data-axis="${a}" aria-label="${a}: ${esc(doc.axes[a])}" ${KEYS}>` +
        `<output></output><button type="button" data-groups="${a}" ${KEYS}>groups</button><span class="soft">${esc(doc.axes[a])}</span>`).join("");
    }
    for (const a of order) {
      const input = box.querySelector(`[data-axis="${a}"]`), at = steps.findIndex((s) => s >= sizes[a]);
      input.value = at < 0 ? 9 : at;
      input.setAttribute("aria-valuetext", many(sizes[a], "device"));
      input.nextElementSibling.textContent = sizes[a];
      const button = box.querySelector(`[data-groups="${a}"]`);
      button.setAttribute("aria-pressed", widget.state.axis === a);
      button.setAttribute("aria-label", `groups over ${a}`);
      button.disabled = sizes[a] === 1;
    }
  }

  function readState() {
    const { state } = widget, asked = fixed ? doc.sizes : readMesh(state.mesh, names, doc.most).sizes;
    const given = fixed ? names : words(state.order);
    if ([...given].sort().join() === [...names].sort().join()) order = given;
    if (asked) sizes = asked;
    sizes ||= Object.fromEntries(names.map((a) => [a, 1]));
    return product(order.map((a) => sizes[a]));
  }

  widget.draw = () => {
    const began = performance.now(), n = readState(), { state } = widget, answer = widget.answer(), waiting = widget.waiting();
    const all = model.get("tensors") || doc.tensors, own = (row) => fixed || doc.shapes.every((name, i) => row.of[i] === state[name]);
    const rows = waiting ? all : all.filter(own), device = Math.min(state.device, n - 1);
    const tensor = rows.find((r) => r.name === state.tensor) || rows[0];
    refresh(root, controls, state);
    axisRows();
    const node = (answer && answer.node) || doc.node || n, place = places(sizes, order, node);
    const traffic = (answer && answer.traffic) || [], asked = state.axis === "tp" ? ["tp", "kv"] : [state.axis], mine = traffic.filter((t) => t.axes.some((a) => asked.includes(a))), row = mine[Math.min(state.row, mine.length - 1)];
    const [cut, inside] = parted(sizes, order, tensor && tensor.heads), axes = inside.filter((a) => (row ? row.axes : asked).includes(a) && cut[a] > 1);
    const teams = axes.length ? groups(cut, inside, axes) : [], teamOf = new Array(n);
    teams.forEach((team, i) => team.forEach((d) => { teamOf[d] = i; }));
    const shards = axes.length || !tensor ? null : shardNumbers(tensor, state, sizes, order), team = teams[teamOf[device]] || [];
    const g = team.length, plan = row && g <= 64 ? rounds(row.kind, g, row.pairs) : null, at = plan ? Math.min(state.step, plan.length - 1) : 0;
    const arrows = plan ? plan[at].sends.map(([s, d]) => [team[s], team[d]]).filter(([s, d]) => Math.floor(s / place.block) !== Math.floor(d / place.block)) : [];
    // Of a cell that stands for several devices: filled if one of them is meant, labelled if all are alike.
    const number = axes.length ? teamOf : shards, lit = new Set(), mixed = new Set(), { block } = place;
    for (let d = 0; number && d < n; d++) {
      if (number[d] === number[device] && number[d] !== null) lit.add(Math.floor(d / block));
      if (number[d] !== number[d - (d % block)] || number[d] === null) mixed.add(Math.floor(d / block));
    }
    const view = {
      place, sizes, order, n, arrows, tensor, state: { ...state, device },
      label: (i) => (number && !mixed.has(i) ? `${axes.length ? "group" : "shard"} ${number[i * block]}` : ""),
      fill: (i) => (lit.has(i) ? axes[0] || "s1" : ""),
    };
    const across = (team.length ? new Set(team.map((d) => Math.floor(d / node))).size : 0);
    view.what = axes.length ? `${many(teams.length, "group")} over ${axes.join(",")}; filled: the group of device ${device}` +
        (node < n ? `, on ${many(across, "node")}` : "")
      : `${many(n, "device")} in link order` + (!tensor ? "" : shards ? `; filled: same shard of ${tensor.name} as device ${device}` : `; ${tensor.name} cannot be cut evenly`);
    const focused = root.contains(document.activeElement) && document.activeElement.classList.contains("cell");
    part("what").textContent = view.what;
    fill("grid", gridSvg(view));
    if (focused) part("grid").querySelector('[tabindex="0"]').focus({ preventScroll: true });
    const held = holdings(rows, state, sizes, order, device), where = order.filter((a) => sizes[a] > 1).map((a) => `${a} ${coordinates(sizes, order, device)[a]}`);
    part("device").textContent = `Device ${device}` + (where.length ? `: ${where.join(", ")}` : "") + (node < n ? `; node ${Math.floor(device / node)}` : "");
    holdsTable(held, tensor);
    const notes = [place.frames.length ? `Dashed: nodes of ${node} devices.` : "", place.block > 1 ? `Each cell stands for ${place.block} devices.` : ""];
    part("hover").dataset.rest = notes.filter(Boolean).join(" ") || "Point at a device, or move with the arrow keys.";
    part("hover").textContent = part("hover").dataset.rest;
    part("holds").classList.toggle("waiting", waiting && !all.every(own));
    for (const name of ["memory", "traffic", "steps", "code", "compare"]) part(name).classList.toggle("waiting", waiting);
    planned(answer);
    if (!waiting) { // else what is there stays, dimmed: it belongs to another state
      memory(answer, held);
      trafficTable(answer, traffic, row);
      stepper(answer && !answer.refusal && answer.traffic, row, plan, at, team, axes);
      fill("code", answer && answer.code ? `<${sub} class="sub">As code</${sub}><pre>${esc(answer.code)}</pre>` : "");
      compare(answer);
      refusal(answer, held);
    }
    widget.view = view;
    root.dataset.drawn = Number(root.dataset.drawn || 0) + 1;
    root.dataset.ms = (performance.now() - began).toFixed(2);
  };

  function holdsTable(held, tensor) {
    const kinds = [...new Set(held.map((x) => x.row.kind))], titles = doc.kinds;
    const body = kinds.map((kind) => {
      const inside = held.filter((x) => x.row.kind === kind), total = inside.every((x) => x.cut || x.row.shards) ? sizeText(inside.reduce((sum, x) => sum + x.bytes, 0)) : "—";
      return `<tbody><tr class="kind"><th scope="rowgroup">${esc(titles[kind] || kind)}</th><td class="n">${total}</td><td colspan="2"></td></tr>` +
        inside.map(({ row, text, cut, bytes }) => `<tr${row === tensor ? ' class="on"' : ""}><th scope="row"><button type="button" data-tensor="${esc(row.name)}" tabindex="${row === tensor ? 0 : -1}" aria-pressed="${row === tensor}" ${KEYS}>${esc(row.name.startsWith(kind + " ") ? row.name.slice(kind.length + 1) : row.name)}</button></th>` +
          `<td class="n">${cut ? sizeText(bytes) : "—"}</td><td><code>${esc(text)}</code></td><td><code>${cut ? "[" + cut.map(([a, b]) => `${a}:${b}`).join(", ") + "]" : row.shards ? "not on this device" : "cannot be cut evenly"}</code></td></tr>`).join("") + "</tbody>";
    });
    const focus = root.contains(document.activeElement) && document.activeElement.dataset.tensor, box = part("holds"), top = scrolled;
    fill("holds", `<table><thead><tr><th scope="col">tensor</th><th scope="col" class="n">bytes</th><th scope="col">layout</th><th scope="col">slice</th></tr></thead>${body.join("")}</table>`);
    if (top) box.scrollTop = top;
    if (focus) [...box.querySelectorAll("[data-tensor]")].find((b) => b.dataset.tensor === focus)?.focus({ preventScroll: true });
  }

  // What `llmpar plan` found: every plan in order, each one click away; of the one that is shown, why, and the lines that run it.
  function planned(answer) {
    if (!doc.planned) return;
    const { rows, title } = doc.planned, at = answer && answer.planned, now = rows[at];
    const body = rows.map((r, i) => `<tr${i === at ? ' class="on"' : ""}><th scope="row"><button type="button" data-plan="${i}" aria-pressed="${i === at}" ${KEYS}>${esc(r.mesh)}</button></th>` +
      `<td class="n">${timeText(r.step_s)}</td><td class="n">${(100 * r.mfu).toFixed(1)} %</td><td class="n">${sizeText(r.memory_bytes.total)}</td><td>${esc([r.why, r.change].filter(Boolean).join("; "))}</td></tr>`);
    const lines = now ? [now.train, now.compile].filter(Boolean).join("\n") : "";
    fill("planned", `<${sub} class="sub">${esc(title)}</${sub}><table><thead><tr><th scope="col">mesh</th><th scope="col" class="n">a step</th><th scope="col" class="n">MFU</th><th scope="col" class="n">memory</th><th scope="col">why</th></tr></thead><tbody>${body.join("")}</tbody></table>` +
      (now ? `<pre>${esc(lines)}</pre>` : `<p class="soft">What is shown below is none of these plans.</p>`));
  }

  function memory(answer, held) {
    const plan = doc.planned && answer && doc.planned.rows[answer.planned], time = answer && answer.time;
    const seconds = !time ? "" : `<div style="height:12px"></div>` + (time.simulated ? `<p class="soft">Time is not predicted: simulated devices share one processor and have no links.</p>`
      : barSvg("Time per step, by the planner", Object.entries(time.terms).filter(([, v]) => v > time.step_s / 500).sort((a, b) => b[1] - a[1]), doc.parts, timeText) +
        `<p class="soft">${timeText(time.step_s)} a step, ${(100 * time.mfu).toFixed(1)} % MFU, by the constants of published runs; what overlaps is hidden. ${esc(answer.links)}</p>`);
    if (plan) {
      const { total, ...parts } = plan.memory_bytes;
      return fill("memory", barSvg("Memory per device, by the planner", Object.entries(parts), doc.parts, sizeText, doc.planned.room) + seconds + `<p class="soft">${esc(doc.planned.note)}</p>`);
    }
    const sum = (kind) => held.filter((x) => x.row.kind === kind).reduce((total, x) => total + x.bytes, 0);
    const known = answer && answer.memory.length, title = known ? "Memory per device" : fixed ? "These arrays, per device" : "Weights, moments and batch only, per device";
    const parts = known ? answer.memory : fixed ? [...new Set(held.map((x) => x.row.kind))].map((k) => [doc.kinds[k] || k, sum(k)]) : [["weights", sum("weight")], ["optimizer", sum("moments")], ["batch", sum("batch")]];
    if (!known && (!held.length || held.some((x) => !x.cut && !x.row.shards))) return fill("memory", "");
    fill("memory", barSvg(title, parts, doc.parts, sizeText, known && answer.capacity, known && answer.whole) + seconds);
  }

  function trafficTable(answer, traffic, row) {
    if (!traffic.length) return fill("traffic", answer && !answer.refusal && answer.traffic ? `<p class="soft">Nothing is sent.</p>` : "");
    const body = traffic.map((t, i) => `<tr${t === row ? ' class="on"' : ""}><th scope="row"><button type="button" data-traffic="${i}" aria-pressed="${t === row}" ${KEYS} style="color:${axisColor(t.axes[0], "-line")}">${esc(t.axes.join(","))}</button></th>` +
      `<td>${esc(t.kind)}</td><td class="n">${t.count}</td><td class="n">${sizeText(t.bytes)}</td><td class="n">${answer.time && !answer.time.simulated ? shortTime(t.seconds) : "—"}</td><td>${esc(t.what)}</td></tr>`);
    fill("traffic", `<${sub} class="sub">Sent per device and step${sizes.pp > 1 ? " (first stage)" : ""}</${sub}><table><thead><tr><th scope="col">axes</th><th scope="col">collective</th><th scope="col" class="n">times</th><th scope="col" class="n">bytes</th><th scope="col" class="n">at link rate</th><th scope="col">of what</th></tr></thead><tbody>${body.join("")}</tbody></table>`);
  }

  function stepper(known, row, plan, at, team, axes) {
    const focus = root.contains(document.activeElement) && document.activeElement.dataset.step;
    if (!row) return fill("steps", known && axes.length ? `<${sub} class="sub">Groups over ${axes.join(",")}</${sub}><p class="soft">Nothing is sent over ${axes.join(",")} in a step.</p>` : "");
    if (!plan) return fill("steps", `<p class="soft">A group of ${team.length} is too large to step through.</p>`);
    const each = row.largest / (plan.length - 1), exchanged = row.kind.endsWith("all-to-all"), summed = ["reduce-scatter", "all-reduce"].includes(row.kind);
    const gathering = row.kind === "all-reduce" && at >= team.length, full = exchanged || summed ? team.length : 1;
    const columns = exchanged ? `Columns are where pieces belong; height is how many of ${team.length} are there: one for each device before, one from each after.`
      : `Columns are blocks; ${summed ? `height is how many of ${team.length} addends are summed` : "filled is held"}. ${gathering ? "Now the sums travel." : row.pairs ? "Gradients go back between the same devices." : ""}`;
    fill("steps", `<${sub} class="sub">One ${esc(row.kind)} over ${esc(row.axes.join(","))}, ${many(team.length, "device")}${row.sizes > 1 ? `: the largest of ${row.count}` : ""}</${sub}>` +
      `<div class="bar"><button type="button" data-step="-1" aria-label="step back"${at ? "" : " disabled"} ${KEYS}>◀</button><button type="button" data-step="1" aria-label="step forward"${at < plan.length - 1 ? "" : " disabled"} ${KEYS}>▶</button>` +
      `<span data-part="round" aria-live="polite">round ${at} of ${plan.length - 1}${at ? `: each device sends ${sizeText(each)}` : ": what each device starts with"}</span></div>` +
      progressSvg(team, plan[at], full, axes[0]) + `<p class="soft">${columns}</p>`);
    if (focus) { const again = part("steps").querySelector(`[data-step="${focus}"]`); (again.disabled ? part("steps").querySelector("[data-step]:not([disabled])") : again)?.focus(); }
  }

  // Why there is no answer, as far as the page can tell: a mesh that cannot be read, a tensor that cannot be cut.
  function unanswered(held) {
    const { state } = widget, { why } = readMesh(state.mesh, names, doc.most), own = doc.answers && Object.values(doc.answers)[0].refusal;
    if (!doc.answers) return SILENT;
    if (why) return why;
    if (order.join() !== words(state.order).join()) return `the order '${state.order}' must name each axis once; for instance '${names.join(" ")}'`;
    if (own && !own.nearest) return own.why; // whatever the mesh
    const uncut = held.find((x) => !x.cut && x.row.kind !== "activation") || held.find((x) => !x.cut);
    if (uncut) return `mesh '${state.mesh}' is refused: ${uncut.row.name}, ${shapeOf(uncut.row, state, sizes).join(" × ")}, cannot be cut evenly as '${uncut.text}'`;
    return `This page stored ${Object.keys(doc.answers).length} answers near '${doc.state.mesh}' (meshes and ZeRO stages), and none for this choice. Who holds what is right; what is sent, activations and time need a notebook.`;
  }

  function refusal(answer, held) {
    const box = root.querySelector(".refusal"), { state } = widget, refused = answer && answer.refusal;
    const unread = !fixed && readMesh(state.mesh, names, doc.most).why ? "Shown below: the last mesh that could be read." : "";
    const text = refused ? [refused.why, refused.text, unread].filter(Boolean).join("\n") : answer ? "" : [unanswered(held), unread].filter(Boolean).join("\n");
    if (box.dataset.text === text) return;
    box.dataset.text = box.textContent = text;
    if (refused && refused.nearest) box.insertAdjacentHTML("beforeend", ` <button type="button" data-mesh="${esc(refused.nearest)}" ${KEYS}>use ${esc(refused.nearest)}</button>`);
    if (refused && refused.batch_size && !doc.answers) box.insertAdjacentHTML("beforeend", ` <button type="button" data-batch="${refused.batch_size}" ${KEYS}>use batch ${refused.batch_size}</button>`);
  }

  function compare(answer) {
    if (!kept) return fill("compare", "");
    const total = (a) => a.memory.reduce((sum, [, v]) => sum + v, 0), sent = (a) => a.traffic.reduce((sum, t) => sum + t.bytes, 0);
    const cells = (f) => [kept.answer, answer].map((a) => (!a ? "…" : a.refusal ? "refused" : f(a)));
    const rows = [["memory per device", cells((a) => sizeText(total(a)))], ["usable", cells((a) => sizeText(a.capacity))], ["sent per device and step", cells((a) => sizeText(sent(a)))], ["time per step", cells((a) => (a.time.simulated ? "—" : timeText(a.time.step_s)))]];
    const changed = Object.keys(kept.state).filter((k) => !doc.view.includes(k) && kept.state[k] !== widget.state[k]).map((k) => [k, [kept.state[k], widget.state[k]]]);
    fill("compare", `<${sub} class="sub">A beside B</${sub}><table><thead><tr><td></td><th scope="col">A (kept)</th><th scope="col">B (now)</th></tr></thead><tbody>` +
      [...changed, ...rows].map(([name, [a, b]]) => `<tr><th scope="row">${esc(name)}</th><td>${esc(a)}</td><td>${esc(b)}</td></tr>`).join("") + "</tbody></table>");
  }

  // The picture to save: the grid and the bars below one another, in the light theme's own colours (not every program that
  // shows SVG knows variables), and under them the whole state.
  function picture() {
    const drawn = [...root.querySelectorAll('[data-part="grid"] svg,[data-part="memory"] svg')], { light } = doc.theme;
    let y = 34;
    const inner = drawn.map((svg) => { const copy = svg.cloneNode(true); copy.setAttribute("x", 12); copy.setAttribute("y", y); y += Number(svg.getAttribute("height")) + 14; return new XMLSerializer().serializeToString(copy); });
    const width = Math.max(640, 9 * part("what").textContent.length, ...drawn.map((svg) => Number(svg.getAttribute("width")))) + 24, lines = [""];
    const facts = fixed ? [doc.title] : doc.controls.map((c) => `${c.label} ${widget.state[c.name]}`);
    for (const fact of [...facts, `llmpar ${doc.version}`]) {
      if (lines.at(-1) && 7 * (lines.at(-1) + fact).length > width - 24) lines.push("");
      lines[lines.length - 1] += (lines.at(-1) && "; ") + fact;
    }
    const caption = lines.map((line, i) => `<text x="12" y="${y + 8 + 16 * i}" font-size="11" fill="var(--soft)">${esc(line)}</text>`);
    const title = fixed ? doc.title : readMesh(widget.state.mesh, names, doc.most).text || meshText(sizes, names);
    const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${y + 16 * lines.length + 4}" font-family="DejaVu Sans, Verdana, sans-serif"><rect width="100%" height="100%" fill="var(--paper)"/>` +
      `<text x="12" y="20" font-size="13" font-weight="600" fill="var(--ink)">${esc(title)}: ${esc(part("what").textContent)}</text>${inner.join("")}${caption.join("")}</svg>`;
    return svg.replace(/var\(--([\w-]+)\)/g, (_, role) => light[role]);
  }

  const done = (text) => { part("done").textContent = text; };
  const actions = {
    copy: () => { const answer = widget.answer(); if (!answer || !answer.code) return done("nothing to copy: the mesh is refused"); (navigator.clipboard ? navigator.clipboard.writeText(answer.code) : Promise.reject()).then(() => done("copied"), () => done("the browser allows no copying here; select the code above")); },
    keep: () => { const answer = widget.answer(); if (!answer) return done("wait for the answer"); kept = { state: { ...widget.state }, answer }; done(`A is ${widget.state.mesh}`); widget.draw(); },
    svg: () => download("mesh.svg", "image/svg+xml", picture()),
    png: () => savePng(picture(), "mesh.png"),
    html: () => { if (doc.answers) return download("mesh.html", "text/html", "<!doctype html>" + doc.page(widget.state)); model.send({ export: "html" }); done("Python writes the page"); },
  };
  const onMessage = (message) => { if (message && message.html) { download("mesh.html", "text/html", message.html); done("saved"); } };
  model.on("msg:custom", onMessage);
  root.addEventListener("input", (event) => {
    const { dataset, value } = event.target;
    if (dataset.axis) {
      sizes = { ...sizes, [dataset.axis]: steps[Number(value)] };
      return widget.set({ mesh: meshText(sizes, names), step: 0 });
    }
    const c = controls.find((c) => c.name === dataset.name), now = c && read(event.target, c);
    if (c && now !== null && now !== undefined) widget.set({ [c.name]: now, step: 0 });
  });
  root.addEventListener("click", (event) => {
    const hit = event.target.closest("[data-device],[data-tensor],[data-groups],[data-outer],[data-traffic],[data-step],[data-mesh],[data-batch],[data-plan],[data-do]");
    if (!hit || hit.disabled) return;
    const d = hit.dataset, { state } = widget;
    if (d.device) { widget.set({ device: Number(d.device) }); part("grid").querySelector('[tabindex="0"]').focus({ preventScroll: true }); }
    else if (d.tensor) widget.set({ tensor: d.tensor, axis: "", step: 0 });
    else if (d.groups) widget.set({ axis: state.axis === d.groups ? "" : d.groups, row: 0, step: 0 });
    else if (d.outer) { const next = [...order], i = next.indexOf(d.outer); [next[i - 1], next[i]] = [next[i], next[i - 1]]; widget.set({ order: next.join(" ") }); root.querySelector(`[data-outer="${d.outer}"]`).focus(); }
    else if (d.traffic) { const all = widget.answer().traffic, t = all[Number(d.traffic)], axis = t.axes[0] === "kv" ? "tp" : t.axes[0]; widget.set({ axis, row: all.filter((x) => x.axes.includes(axis) || (axis === "tp" && x.axes.includes("kv"))).indexOf(t), step: 0 }); }
    else if (d.step) widget.set({ step: state.step + Number(d.step) });
    else if (d.mesh) widget.set({ mesh: d.mesh, step: 0 });
    else if (d.plan) { widget.set({ ...doc.planned.rows[d.plan].state, step: 0 }); root.querySelector(`[data-plan="${d.plan}"]`).focus(); }
    else if (d.batch) widget.set({ batch_size: Number(d.batch), step: 0 });
    else actions[d.do]();
  });
  root.addEventListener("keydown", (event) => {
    const cell = event.target.closest("[data-device]"), tensor = event.target.closest("[data-tensor]");
    if (tensor) { // one stop of the Tab key for all of the table; arrows move in it
      const all = [...part("holds").querySelectorAll("[data-tensor]")], i = all.indexOf(tensor), step = { ArrowUp: -1, ArrowDown: 1, Home: -i, End: all.length - 1 - i }[event.key];
      if (step === undefined || !all[i + step]) return;
      event.preventDefault();
      event.stopPropagation();
      all[i + step].focus();
      return widget.set({ tensor: all[i + step].dataset.tensor, axis: "", step: 0 });
    }
    if (!cell) return;
    const { place, n } = widget.view, now = Number(cell.dataset.device), by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -place.columns, ArrowDown: place.columns }[event.key];
    const next = event.key === "Home" ? 0 : event.key === "End" ? n - place.block : by ? now + by * place.block : null;
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    if (next >= 0 && next < n) widget.set({ device: next });
  });
  root.addEventListener("pointerover", (event) => {
    const cell = event.target.closest("[data-device]"), line = part("hover");
    if (cell === hovered) return;
    hovered = cell;
    if (!cell) { line.textContent = line.dataset.rest; return; }
    const { tensor } = widget.view, device = Number(cell.dataset.device), [x] = holdings(tensor ? [tensor] : [], widget.state, sizes, order, device);
    line.textContent = cell.getAttribute("aria-label") + (x ? `; ${x.row.name} ${x.cut ? "[" + x.cut.map(([a, b]) => `${a}:${b}`).join(", ") + "], " + sizeText(x.bytes) : "cannot be cut evenly"}` : "");
  });
  root.addEventListener("pointerleave", () => { hovered = null; part("hover").textContent = part("hover").dataset.rest; });
  model.on("change:tensors", widget.draw);
  widget.draw();
  return () => { widget.stop(); model.off("msg:custom", onMessage); model.off("change:tensors", widget.draw); };
}

function render(context) {
  return context.model.get("doc").kind === "mesh" ? renderMesh(context) : renderFigure(context);
}

export default { render };
