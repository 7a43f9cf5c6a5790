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

export function coordinates(sizes, order, device, apart = strides(sizes, order)) {
  return Object.fromEntries(order.map((a) => [a, Math.floor(device / apart[a]) % sizes[a]]));
}

export function groups(sizes, order, axes) {
  const apart = strides(sizes, order), found = new Map(), n = product(order.map((a) => sizes[a]));
  for (let device = 0; device < n; device++) {
    const at = coordinates(sizes, order, device, apart);
    let first = device, rank = 0;
    for (const a of axes) { first -= at[a] * apart[a]; rank = rank * sizes[a] + at[a]; }
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

export const key = (state, view) => Object.keys(state).filter((k) => !view.includes(k)).map((k) => pythonText(state[k])).join("|");
const pythonText = (v) => (v === true ? "True" : v === false ? "False" : String(v));

export const meshText = (sizes, axes) => axes.filter((a) => sizes[a] > 1).map((a) => `${a}=${sizes[a]}`).join(" ") || "dp=1";

// Sizes of a mesh text, or null: Python then says what is wrong with it.
export function parseMesh(text, axes) {
  const words = text.replace(/^\s*!/, "").split(/[\s,]+/).filter(Boolean), sizes = Object.fromEntries(axes.map((a) => [a, 1]));
  const unnamed = { 3: ["dp", "fsdp", "tp"], 4: ["dp", "fsdp", "tp", "sp"] }[words.length];
  const bare = words.every((w) => /^\d+$/.test(w)), seen = new Set();
  if (!words.length || (bare && !unnamed)) return null;
  for (const [i, word] of words.entries()) {
    const match = bare ? [0, unnamed[i], word] : /^([a-z]+)[=:](0*[1-9]\d*)$/.exec(word);
    const name = match && (match[1] === "mp" ? "tp" : match[1]);
    if (!match || !(name in sizes) || seen.has(name) || !Number(match[2])) return null;
    sizes[name] = Number(match[2]);
    seen.add(name);
  }
  return product(Object.values(sizes)) <= 4096 ? sizes : null;
}

export function scaled(value, units, base) {
  let power = 0;
  while (power + 1 < units.length && Math.abs(value) >= 0.9995 * base) { value /= base; power++; }
  return `${Math.abs(value) >= 100 ? value.toFixed(0) : Number(value.toPrecision(3))} ${units[power]}`;
}
export const sizeText = (bytes) => scaled(bytes, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
export const timeText = (s) => (s ? scaled(s * 1e9, ["ns", "µs", "ms", "s"], 1000) : "0 s");

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
  if (row.shards) return [row.layout, row.shards[row.holds[device]]];
  const layout = live(parseLayout(row.layout[modeOf(state)]), sizes);
  const words = layout.dims.map((d) => d.name + (d.axes.length ? "/" + d.axes.join(",") : ""));
  return [[...words, ...layout.sums.map((a) => "+" + a)].join(" ") || "whole", slices(layout, shapeOf(row, state, sizes), sizes, at)];
}

// The shard of one tensor that each device holds, as a number in order of appearance; null where it cannot be cut.
export function shardNumbers(row, state, sizes, order) {
  const n = product(order.map((a) => sizes[a])), apart = strides(sizes, order), numbers = new Map(), out = [];
  if (row.shards) return [...row.holds];
  const layout = live(parseLayout(row.layout[modeOf(state)]), sizes), shape = shapeOf(row, state, sizes);
  for (let device = 0; device < n; device++) {
    const cut = slices(layout, shape, sizes, coordinates(sizes, order, device, apart));
    if (!cut) return null;
    const name = cut.join();
    if (!numbers.has(name)) numbers.set(name, numbers.size);
    out.push(numbers.get(name));
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
.lpx *{box-sizing:border-box}.lpx h2{font-size:15px;margin:0 0 10px}.lpx h3{font-size:13px;margin:14px 0 6px}
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
.lpx tbody tr.kind th{font-weight:600;padding-top:6px}
.lpx td code{white-space:nowrap;font-size:11px}.lpx th button{padding:0 4px;min-height:0;border-color:transparent;background:none;text-align:left}
.lpx .scroll{max-height:430px;overflow:auto}.lpx pre{font:12px/1.45 "DejaVu Sans Mono",monospace;margin:4px 0;white-space:pre-wrap}
.lpx .soft{color:var(--soft);font-size:12px}.lpx .bar{display:flex;gap:6px;flex-wrap:wrap;align-items:center;margin:6px 0}
.lpx svg{max-width:100%;height:auto;display:block}.lpx code{font-family:"DejaVu Sans Mono",monospace;font-size:12px}
`;

function themeCss({ light, dark }, scope) {
  const vars = (theme) => Object.entries(theme).map(([k, v]) => `--${k}:${v}`).join(";");
  return `${scope}{${vars(light)}}@media (prefers-color-scheme:dark){${scope}{${vars(dark)}}}` +
    `[data-jp-theme-light=true] ${scope}{${vars(light)}}[data-jp-theme-light=false] ${scope}{${vars(dark)}}`;
}

const AXES = ["pp", "dp", "fsdp", "ep", "sp", "tp"]; // a live array's mesh may name others: they are grey
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
      const [x, y] = cells[i], device = i * block, second = label(device), paint = fill(device), here = i === chosen;
      const name = block > 1 ? `devices ${device} to ${device + block - 1}` : `device ${device}`;
      const where = named.map((a) => `${a} ${Math.floor(device / apart[a]) % sizes[a]}`).join(", ");
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
  const drawn = arrows.map(([from, to]) => {
    const points = lane(place, Math.floor(from / block), Math.floor(to / block)), [[x0, y0], [x1, y1]] = points.slice(-2);
    const d = Math.hypot(x1 - x0, y1 - y0) || 1, [ux, uy] = [(x1 - x0) / d, (y1 - y0) / d], [bx, by] = [x1 - 7 * ux, y1 - 7 * uy];
    return `<path d="M${[...points.slice(0, -1), [bx, by]].join(" L")}" fill="none" stroke="var(--ink)" stroke-width="1.6"/>` +
      `<path d="M${x1},${y1} L${bx - 3.5 * uy},${by + 3.5 * ux} L${bx + 3.5 * uy},${by - 3.5 * ux} z" fill="var(--ink)"/>`;
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" role="grid" aria-label="${esc(what)}" width="${width}" height="${height}" viewBox="-7 -7 ${width} ${height}">` +
    parts.join("") + `<g aria-hidden="true" pointer-events="none">${words.join("")}${drawn.join("")}</g></svg>`;
}

const SERIES = ["s1", "s2", "s3", "s4", "s5"];

// One bar of parts against a limit, its legend beside it, as SVG.
function barSvg(title, parts, limit, text, limitName) {
  const total = parts.reduce((sum, [, v]) => sum + v, 0), high = Math.max(total, limit || 0) || 1, wide = 500;
  let x = 0;
  const out = [];
  parts.forEach(([name, value], i) => {
    const w = (wide * value) / high;
    out.push(`<rect x="${x.toFixed(2)}" y="24" width="${w.toFixed(2)}" height="24" fill="var(--${SERIES[i % 5]})" stroke="var(--ink)" stroke-width="0.75"><title>${esc(name)} ${text(value)}</title></rect>`,
      `<rect x="${(i % 2) * 280}" y="${62 + 18 * Math.floor(i / 2)}" width="12" height="12" fill="var(--${SERIES[i % 5]})" stroke="var(--ink)" stroke-width="0.75"/>`,
      `<text x="${(i % 2) * 280 + 18}" y="${72 + 18 * Math.floor(i / 2)}" font-size="12" fill="var(--ink)">${esc(name)} ${text(value)}</text>`);
    x += w;
  });
  const fits = limit ? (total > limit ? `${text(total - limit)} too much` : `${text(limit - total)} free`) : "";
  const words = `${title}: ${text(total)}` + (limit ? ` of ${text(limit)} ${limitName}, ${fits}` : "");
  if (limit) out.push(`<path d="M${(wide * limit) / high},20 v32" stroke="var(--ink)" stroke-width="2.5" stroke-dasharray="5 3"/>`);
  const height = 60 + 18 * Math.ceil(parts.length / 2) + 4;
  return `<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="${esc(words)}" width="560" height="${height}" viewBox="-2 0 560 ${height}">` +
    `<text x="0" y="13" font-size="13" font-weight="${limit && total > limit ? 700 : 400}" fill="var(--ink)">${esc(words)}</text>${out.join("")}</svg>`;
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
  return `<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="${esc(words.join("; "))}" width="${left + g * (size + 2)}" height="${shown * (size + 3)}">${out.join("")}</svg>`;
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
  const options = (c.options || []).map((o) => `<option value="${esc(o)}"${o === value ? " selected" : ""}>${esc(o)}</option>`);
  if (c.kind === "choice") return `<label>${esc(c.label)}<select ${name}>${options.join("")}</select></label>`;
  if (c.kind === "lines") return `<label>${esc(c.label)}<textarea rows="5" ${name} spellcheck="false">${esc(value)}</textarea></label>`;
  if (c.kind === "slider") return `<label><span>${esc(c.label)}: <output>${esc(value)}</output></span><input type="range" min="${c.min}" max="${c.max}" step="${c.step || 1}" value="${value}" ${name}></label>`;
  const type = c.kind === "int" ? `type="number" min="${c.min}"` : 'type="text" spellcheck="false"';
  return `<label>${esc(c.label)}<input ${type} value="${esc(value)}" ${name}></label>`;
}

function read(input, c) {
  if (c.kind === "flag") return input.checked;
  if (c.kind === "int" || c.kind === "slider") return input.value === "" ? null : Number(input.value);
  return c.kind === "choice" ? c.options.find((o) => String(o) === input.value) : input.value;
}

// Values of the form follow the state, except the field that is being typed in.
function refresh(root, controls, state) {
  for (const c of controls) {
    const input = root.querySelector(`[data-name="${c.name}"]`);
    if (!input || (input === input.getRootNode().activeElement && c.kind !== "slider")) continue;
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
  const widget = { doc, root, model, state: { ...doc.state, ...model.get("state") }, timer: 0 };
  widget.heading = `<h2>${esc(doc.title)}</h2>`;
  widget.answer = () => {
    const live = model.get("answer"), wanted = key(widget.state, doc.view);
    return (live && live.key === wanted && live) || (doc.answers && doc.answers[wanted]) || null;
  };
  widget.set = (patch) => {
    widget.state = { ...widget.state, ...patch };
    clearTimeout(widget.timer);
    widget.timer = setTimeout(() => { model.set("state", widget.state); model.save_changes(); }, 25);
    widget.draw();
  };
  const onState = () => { widget.state = { ...widget.state, ...model.get("state") }; widget.draw(); };
  const onAnswer = () => widget.draw();
  model.on("change:answer", onAnswer);
  model.on("change:state", onState);
  widget.stop = () => { clearTimeout(widget.timer); model.off("change:answer", onAnswer); model.off("change:state", onState); };
  return widget;
}

// A small explorer: a form, and a picture that Python drew (or that the exported page brought with it).
function renderFigure(context) {
  const widget = start(context), { doc, root } = widget;
  root.innerHTML = `${widget.heading}<div class="form">${doc.controls.map((c) => control(c, widget.state[c.name])).join("")}</div>` +
    `<div class="refusal" role="status"></div><div class="picture${doc.controls.some((c) => c.kind === "lines") ? " editable" : ""}"></div><p class="soft said" aria-live="polite"></p>`;
  root.addEventListener("input", (event) => {
    const c = doc.controls.find((c) => c.name === event.target.dataset.name), value = c && read(event.target, c);
    if (c && value !== null) widget.set({ [c.name]: value });
  });
  root.addEventListener("click", ({ target }) => { // an operation of a timetable is selected in the text, ready to be typed over
    const cell = /^stage (\d+), (\S+): /.exec(target.querySelector?.("title")?.textContent || ""), area = root.querySelector("textarea");
    if (!cell || !area) return;
    area.focus();
    const lines = area.value.split("\n"), start = lines.slice(0, cell[1]).reduce((n, line) => n + line.length + 1, 0);
    const at = (lines[cell[1]] || "").search(new RegExp(`(?<![^\\s&])${cell[2].replace(".", "\\.")}(?![^\\s&])`));
    if (at >= 0) area.setSelectionRange(start + at, start + at + cell[2].length);
  });
  root.addEventListener("focusin", ({ target }) => { if (target.tagName === "TEXTAREA" && !target.value) target.value = target.placeholder; });
  widget.draw = () => {
    const answer = widget.answer();
    refresh(root, doc.controls, widget.state);
    if (!answer) {
      root.querySelector(".said").textContent = doc.answers ? "This choice was not stored in the page; open the explorer in a notebook." : "…";
      return;
    }
    root.querySelector(".refusal").textContent = answer.refusal || "";
    if (answer.svg) root.querySelector(".picture").innerHTML = answer.svg;
    root.querySelector(".said").textContent = answer.note || "";
    for (const [name, value] of Object.entries(answer.fill || {})) {
      const input = root.querySelector(`[data-name="${name}"]`);
      if (input && input !== input.getRootNode().activeElement && widget.state[name] === "") input.placeholder = value;
    }
  };
  widget.draw();
  return widget.stop;
}

function renderMesh(context) {
  const widget = start(context), { doc, root, model } = widget, names = Object.keys(doc.axes), fixed = doc.fixed;
  const steps = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
  let sizes = null, order = names, kept = null, hovered = null;
  root.innerHTML = widget.heading + (fixed ? "" : `<div class="cols"><div><div class="axes"></div><div class="form" style="margin-top:8px">` +
    doc.controls.slice(0, 2).map((c) => control(c, widget.state[c.name])).join("") + `</div></div><div class="form" data-part="form">` +
    doc.controls.slice(2).map((c) => control(c, widget.state[c.name])).join("") + `</div></div>`) +
    `<div class="refusal" role="status"></div>
    <div class="cols"><div><h3 data-part="what"></h3><div data-part="grid"></div><p class="soft" data-part="hover">&nbsp;</p><div data-part="memory"></div></div>
    <div style="flex:1 1 430px"><h3 data-part="device" aria-live="polite"></h3><div class="scroll" tabindex="0" role="region" aria-label="what the device holds" ${KEYS} data-part="holds"></div></div></div>
    <div class="cols"><div data-part="traffic"></div><div data-part="steps"></div></div>
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
    const { state } = widget, asked = fixed ? doc.sizes : parseMesh(state.mesh, names);
    const given = fixed ? names : state.order.split(/[\s,]+/).filter(Boolean);
    if ([...given].sort().join() === [...names].sort().join()) order = given;
    if (asked) sizes = asked;
    sizes ||= Object.fromEntries(names.map((a) => [a, 1]));
    return product(order.map((a) => sizes[a]));
  }

  widget.draw = () => {
    const began = performance.now(), n = readState(), { state } = widget, answer = widget.answer();
    const rows = model.get("tensors") || doc.tensors, device = Math.min(state.device, n - 1);
    const tensor = rows.find((r) => r.name === state.tensor) || rows[0];
    refresh(root, doc.controls, state);
    axisRows();
    const node = (answer && answer.node) || doc.node || n, place = places(sizes, order, node);
    const traffic = (answer && answer.traffic) || [], mine = traffic.filter((t) => t.axes.includes(state.axis)), row = mine[Math.min(state.row, mine.length - 1)];
    const axes = row ? order.filter((a) => row.axes.includes(a)) : state.axis && sizes[state.axis] > 1 ? [state.axis] : [];
    const teams = axes.length ? groups(sizes, order, axes) : [], teamOf = new Array(n);
    teams.forEach((team, i) => team.forEach((d) => { teamOf[d] = i; }));
    const shards = axes.length || !tensor ? null : shardNumbers(tensor, state, sizes, order), team = teams[teamOf[device]] || [];
    const g = team.length, plan = row && g <= 64 ? rounds(row.kind, g) : null, at = plan ? Math.min(state.step, plan.length - 1) : 0;
    const arrows = plan ? plan[at].sends.map(([s, d]) => [team[s], team[d]]).filter(([s, d]) => Math.floor(s / place.block) !== Math.floor(d / place.block)) : [];
    const view = {
      place, sizes, order, n, arrows, state: { ...state, device },
      label: (d) => (axes.length ? `group ${teamOf[d]}` : shards ? `shard ${shards[d]}` : ""),
      fill: (d) => (axes.length ? (teamOf[d] === teamOf[device] ? axes[0] : "") : shards && shards[d] === shards[device] ? "s1" : ""),
    };
    const across = (team.length ? new Set(team.map((d) => Math.floor(d / node))).size : 0);
    view.what = axes.length ? `${many(teams.length, "group")} over ${axes.join(",")}; filled: the group of device ${device}` +
        (node < n ? `, on ${many(across, "node")}` : "")
      : `${many(n, "device")} in link order; filled: same shard of ${tensor ? tensor.name : ""} as device ${device}`;
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
    memory(answer, held);
    trafficTable(answer, traffic, mine, row);
    stepper(answer && !answer.refusal, row, plan, at, team, axes);
    refusal(answer);
    fill("code", answer && answer.code ? `<h3>As code</h3><pre>${esc(answer.code)}</pre>` : "");
    compare(answer);
    widget.view = view;
    root.dataset.drawn = Number(root.dataset.drawn || 0) + 1;
    root.dataset.ms = (performance.now() - began).toFixed(2);
  };

  function holdsTable(held, tensor) {
    const kinds = [...new Set(held.map((x) => x.row.kind))], titles = doc.kinds;
    const body = kinds.map((kind) => {
      const inside = held.filter((x) => x.row.kind === kind), total = inside.reduce((sum, x) => sum + x.bytes, 0);
      return `<tbody><tr class="kind"><th scope="rowgroup">${esc(titles[kind] || kind)}</th><td class="n">${sizeText(total)}</td><td colspan="2"></td></tr>` +
        inside.map(({ row, text, cut, bytes }) => `<tr${row === tensor ? ' class="on"' : ""}><th scope="row"><button type="button" data-tensor="${esc(row.name)}" aria-pressed="${row === tensor}" ${KEYS}>${esc(row.name.slice(kind.length + 1))}</button></th>` +
          `<td class="n">${cut ? sizeText(bytes) : "—"}</td><td><code>${esc(text)}</code></td><td><code>${cut ? "[" + cut.map(([a, b]) => `${a}:${b}`).join(", ") + "]" : "cannot be cut evenly"}</code></td></tr>`).join("") + "</tbody>";
    });
    const focus = root.contains(document.activeElement) && document.activeElement.dataset.tensor, box = part("holds"), top = scrolled;
    fill("holds", `<table><thead><tr><th scope="col">tensor</th><th scope="col" class="n">bytes</th><th scope="col">layout</th><th scope="col">slice</th></tr></thead>${body.join("")}</table>`);
    if (top) box.scrollTop = top;
    if (focus) [...box.querySelectorAll("[data-tensor]")].find((b) => b.dataset.tensor === focus)?.focus({ preventScroll: true });
  }

  function memory(answer, held) {
    const sum = (kind) => held.filter((x) => x.row.kind === kind).reduce((total, x) => total + x.bytes, 0);
    let parts = answer && answer.memory.length ? answer.memory : null;
    parts ||= fixed ? [...new Set(held.map((x) => x.row.kind))].map((k) => [doc.kinds[k] || k, sum(k)]) : [["weights", sum("weight")], ["optimizer", sum("moments")], ["batch", sum("batch")]];
    if (!(answer && answer.memory.length) && held.some((x) => !x.cut)) return fill("memory", "");
    const time = answer && answer.time, busy = time && [["computing", time.computing], ["pipeline bubble", time["pipeline bubble"]], ["communicating", time.communicating]].filter(([, v]) => v);
    fill("memory", barSvg("Memory per device", parts, answer && answer.capacity, sizeText, "usable") +
      (time ? `<div style="height:12px"></div>` + (time.simulated ? `<p class="soft">Time is not predicted: simulated devices share one processor and have no links.</p>`
        : barSvg("Time per step, nothing hidden", busy, 0, timeText, "") + `<p class="soft">${esc(timeText(Math.max(time.computing + time["pipeline bubble"], time.communicating)))} if all communication hides behind computing (peak rates).</p>`) : ""));
  }

  function trafficTable(answer, traffic, mine, row) {
    if (!traffic.length) return fill("traffic", answer && !answer.refusal ? `<p class="soft">Nothing is sent.</p>` : "");
    const body = traffic.map((t, i) => `<tr${t === row ? ' class="on"' : ""}><th scope="row"><button type="button" data-traffic="${i}" aria-pressed="${t === row}" ${KEYS} style="color:${axisColor(t.axes[0], "-line")}">${esc(t.axes.join(","))}</button></th>` +
      `<td>${esc(t.kind)}</td><td class="n">${t.count}</td><td class="n">${sizeText(t.bytes)}</td><td class="n">${answer.time && !answer.time.simulated ? shortTime(t.seconds) : "—"}</td><td>${esc(t.what)}</td></tr>`);
    fill("traffic", `<h3>Sent per device and step${sizes.pp > 1 ? " (first stage)" : ""}</h3><table><thead><tr><th scope="col">axes</th><th scope="col">collective</th><th scope="col" class="n">times</th><th scope="col" class="n">bytes</th><th scope="col" class="n">at link rate</th><th scope="col">of what</th></tr></thead><tbody>${body.join("")}</tbody></table>`);
  }

  function stepper(known, row, plan, at, team, axes) {
    const focus = root.contains(document.activeElement) && document.activeElement.dataset.step;
    if (!row) return fill("steps", known && axes.length ? `<h3>Groups over ${axes.join(",")}</h3><p class="soft">Nothing is sent over ${axes.join(",")} in a step.</p>` : "");
    if (!plan) return fill("steps", `<p class="soft">A group of ${team.length} is too large to step through.</p>`);
    const each = row.bytes / row.count / (plan.length - 1), full = ["reduce-scatter", "all-reduce"].includes(row.kind) ? team.length : 1;
    const gathering = row.kind === "all-reduce" && at >= team.length;
    fill("steps", `<h3>One ${esc(row.kind)} over ${esc(row.axes.join(","))}, ${many(team.length, "device")}</h3>` +
      `<div class="bar"><button type="button" data-step="-1" aria-label="step back"${at ? "" : " disabled"} ${KEYS}>◀</button><button type="button" data-step="1" aria-label="step forward"${at < plan.length - 1 ? "" : " disabled"} ${KEYS}>▶</button>` +
      `<span data-part="round" aria-live="polite">round ${at} of ${plan.length - 1}${at ? `: each device sends ${sizeText(each)}` : ": what each device starts with"}</span></div>` +
      progressSvg(team, plan[at], full, axes[0]) + `<p class="soft">Columns are blocks; ${full > 1 ? `height is how many of ${team.length} addends are summed` : "filled is held"}. ${gathering ? "Now the sums travel." : ""}</p>`);
    if (focus) { const again = part("steps").querySelector(`[data-step="${focus}"]`); (again.disabled ? part("steps").querySelector("[data-step]:not([disabled])") : again)?.focus(); }
  }

  function refusal(answer) {
    const box = root.querySelector(".refusal"), { state } = widget, stored = doc.answers;
    if (!answer) {
      box.textContent = stored ? `This page stored ${Object.keys(stored).length} meshes near ${doc.state.mesh}; who holds what is right for every mesh, but what is sent, and time, of this one need a notebook.` : "";
      return;
    }
    const refused = answer.refusal, text = refused ? `${refused.why}\n${refused.text}` : "";
    if (box.dataset.text === text && box.childElementCount) return;
    box.dataset.text = text;
    box.textContent = text;
    if (refused && refused.nearest) box.insertAdjacentHTML("beforeend", ` <button type="button" data-mesh="${esc(refused.nearest)}" ${KEYS}>use ${esc(refused.nearest)}</button>`);
    if (refused && !parseMesh(state.mesh, names)) box.insertAdjacentText("beforeend", "\nShown below: the last mesh that could be read.");
  }

  function compare(answer) {
    if (!kept) return fill("compare", "");
    const total = (a) => a.memory.reduce((sum, [, v]) => sum + v, 0), sent = (a) => a.traffic.reduce((sum, t) => sum + t.bytes, 0);
    const span = (t) => (t.simulated ? "—" : `${timeText(Math.max(t.computing + t["pipeline bubble"], t.communicating))} to ${timeText(t.computing + t["pipeline bubble"] + t.communicating)}`);
    const cells = (f) => [kept.answer, answer].map((a) => (!a ? "…" : a.refusal ? "refused" : f(a)));
    const rows = [["memory per device", cells((a) => sizeText(total(a)))], ["usable", cells((a) => sizeText(a.capacity))], ["sent per device and step", cells((a) => sizeText(sent(a)))], ["time per step", cells((a) => span(a.time))]];
    const changed = Object.keys(kept.state).filter((k) => !doc.view.includes(k) && kept.state[k] !== widget.state[k]).map((k) => [k, [kept.state[k], widget.state[k]]]);
    fill("compare", `<h3>A beside B</h3><table><thead><tr><td></td><th scope="col">A (kept)</th><th scope="col">B (now)</th></tr></thead><tbody>` +
      [...changed, ...rows].map(([name, [a, b]]) => `<tr><th scope="row">${esc(name)}</th><td>${esc(a)}</td><td>${esc(b)}</td></tr>`).join("") + "</tbody></table>");
  }

  // The picture to save: the grid and the bars below one another, with the colours of the light theme.
  function picture() {
    const drawn = [...root.querySelectorAll('[data-part="grid"] svg,[data-part="memory"] svg')];
    let y = 34;
    const inner = drawn.map((svg) => { const copy = svg.cloneNode(true); copy.setAttribute("x", 12); copy.setAttribute("y", y); y += Number(svg.getAttribute("height")) + 14; return new XMLSerializer().serializeToString(copy); });
    const width = Math.max(640, 9 * part("what").textContent.length, ...drawn.map((svg) => Number(svg.getAttribute("width")))) + 24;
    const vars = Object.entries(doc.theme.light).map(([k, v]) => `--${k}:${v}`).join(";");
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${y}" style="${vars}" font-family="DejaVu Sans, Verdana, sans-serif"><rect width="100%" height="100%" fill="${doc.theme.light.paper}"/>` +
      `<text x="12" y="20" font-size="13" font-weight="600" fill="${doc.theme.light.ink}">${esc(widget.state.mesh)}: ${esc(part("what").textContent)}</text>${inner.join("")}</svg>`;
  }

  const done = (text) => { part("done").textContent = text; };
  const actions = {
    copy: () => { const answer = widget.answer(); if (!answer || !answer.code) return done("nothing to copy: the mesh is refused"); (navigator.clipboard ? navigator.clipboard.writeText(answer.code) : Promise.reject()).then(() => done("copied"), () => done("the browser allows no copying here; select the code above")); },
    keep: () => { const answer = widget.answer(); if (!answer) return done("wait for the answer"); kept = { state: { ...widget.state }, answer }; done(`A is ${widget.state.mesh}`); widget.draw(); },
    svg: () => download("mesh.svg", "image/svg+xml", picture()),
    png: () => savePng(picture(), "mesh.png"),
    html: () => { if (doc.answers) return download("mesh.html", "text/html", "<!doctype html>" + doc.page()); model.send({ export: "html" }); done("Python writes the page"); },
  };
  const onMessage = (message) => { if (message && message.html) { download("mesh.html", "text/html", message.html); done("saved"); } };
  model.on("msg:custom", onMessage);
  root.addEventListener("input", (event) => {
    const { dataset, value } = event.target;
    if (dataset.axis) {
      sizes = { ...sizes, [dataset.axis]: steps[Number(value)] };
      return widget.set({ mesh: meshText(sizes, names), step: 0 });
    }
    const c = doc.controls.find((c) => c.name === dataset.name), now = c && read(event.target, c);
    if (c && now !== null && now !== undefined) widget.set({ [c.name]: now, step: 0 });
  });
  root.addEventListener("click", (event) => {
    const hit = event.target.closest("[data-device],[data-tensor],[data-groups],[data-outer],[data-traffic],[data-step],[data-mesh],[data-do]");
    if (!hit || hit.disabled) return;
    const d = hit.dataset, { state } = widget;
    if (d.device) { widget.set({ device: Number(d.device) }); part("grid").querySelector('[tabindex="0"]').focus({ preventScroll: true }); }
    else if (d.tensor) widget.set({ tensor: d.tensor, axis: "", step: 0 });
    else if (d.groups) widget.set({ axis: state.axis === d.groups ? "" : d.groups, row: 0, step: 0 });
    else if (d.outer) { const next = [...order], i = next.indexOf(d.outer); [next[i - 1], next[i]] = [next[i], next[i - 1]]; widget.set({ order: next.join(" ") }); root.querySelector(`[data-outer="${d.outer}"]`).focus(); }
    else if (d.traffic) { const all = widget.answer().traffic, t = all[Number(d.traffic)], axis = t.axes[0]; widget.set({ axis, row: all.filter((x) => x.axes.includes(axis)).indexOf(t), step: 0 }); }
    else if (d.step) widget.set({ step: state.step + Number(d.step) });
    else if (d.mesh) widget.set({ mesh: d.mesh, step: 0 });
    else actions[d.do]();
  });
  root.addEventListener("keydown", (event) => {
    const cell = event.target.closest("[data-device]");
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
    const rows = model.get("tensors") || doc.tensors, tensor = rows.filter((r) => r.name === widget.state.tensor), device = Number(cell.dataset.device);
    const [x] = holdings(tensor.length ? tensor : rows.slice(0, 1), widget.state, sizes, order, device);
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
