// An explorer in a browser: a form, pictures that Python drew, and the question for the next ones. What they
// mean is known to Python alone. `render` is a notebook's way in, where its kernel answers; `start` a page's,
// where Python in the page does, or what is stored in it. No library, no network.

const SILENT = "Python does not answer: its kernel is busy, or was restarted; then run the cell again.";
const ACT = "[data-set],[data-op]"; // what a click, Enter or Space does something with
const TYPED = ["int", "number", "text", "lines"];
const ICONS = { good: "✓", unsure: "≈", bad: "✗", refused: "⊘" };
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const KEYS = {
  Tab: "the next control, button or picture",
  "arrows, Home, End": "in a picture or a table: to the nearest part that can be chosen",
  "Enter, Space": "choose it",
  "↑ ↓": "in a number: the next, the one before",
  "Shift and ← →": "in a timetable: move the operation in its row",
  "?": "these keys; Esc closes them",
};

const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const esc = (text) => String(text).replace(/[&<>"]/g, (c) => escapes[c]);
const shown = (value) => ({ null: "none", true: "yes", false: "no" })[value] ?? String(value);

// ---------------------------------------------------------------------------------------------------- states

// One spelling of a state, whatever the order of its names: a stored notebook sorts them.
function sorted(value) {
  if (Array.isArray(value)) return value.map(sorted);
  if (!value || typeof value !== "object") return value;
  return Object.fromEntries(Object.keys(value).sort().map((name) => [name, sorted(value[name])]));
}
const isObject = (value) => Boolean(value) && typeof value === "object" && !Array.isArray(value);
const spelt = (value) => JSON.stringify(sorted(value));
const belongs = (answer, state) => [answer.asked, answer.state].some((one) => spelt(one) === spelt(state));

// A patch on a state: the plan's fields are set one by one, and null gives one back to the planner.
function patched(state, patch) {
  const had = isObject(state.fields) ? state.fields : {}; // of a mistyped address it may be anything
  const fields = Object.entries({ ...had, ...patch.fields }).filter(([, value]) => value !== null);
  return { ...state, ...patch, ...(patch.fields && { fields: Object.fromEntries(fields) }) };
}

// A state in a page's address: what differs from where the page starts.
function toHash(state, start) {
  const names = Object.keys(state).filter((name) => spelt(state[name]) !== spelt(start[name]));
  const text = (value) => encodeURIComponent(typeof value === "string" ? value : JSON.stringify(value));
  const readable = { "%20": "+", "%3D": "=", "%2C": "," };
  const value = (name) => text(state[name]).replace(/%(20|3D|2C)/g, (code) => readable[code]);
  return names.map((name) => `${name}=${value(name)}`).join("&");
}

function fromHash(hash, start) {
  if (document.getElementById(hash.slice(1))) return [start, ""]; // a place in the page
  const state = { ...start }, unread = [], lost = "Left out of the link, since it cannot be read here:";
  for (const part of hash.replace(/^#/, "").split("&").filter(Boolean)) {
    const [, name, text] = /^([^=]*)=?(.*)$/s.exec(part);
    try {
      const value = decodeURIComponent(text.replaceAll("+", " "));
      if (!(name in start)) throw new Error("no such name");
      state[name] = typeof start[name] === "string" ? value : JSON.parse(value);
    } catch {
      unread.push(part);
    }
  }
  return [state, unread.length ? `${lost} ${unread.join(", ")}` : ""];
}

// -------------------------------------------------------------------------------------------------- controls

function options(all, value) {
  const same = (one) => spelt(one) === spelt(value), known = all.some(same) ? all : [value, ...all];
  const option = (one) =>
    `<option value="${esc(spelt(one))}"${same(one) ? " selected" : ""}>${esc(shown(one))}</option>`;
  return known.map(option).join("");
}

const level = (c, value) => c.words?.[value - c.min] ?? value; // what a slider's place is called

function control(c, value, attribute = "data-name") {
  const name = `${attribute}="${esc(c.name)}" data-kind="${c.kind}" aria-label="${esc(c.label)}"`;
  if (c.kind === "lines") return `<textarea rows="${c.rows ?? 5}" spellcheck="false" ${name}>${esc(value)}</textarea>`;
  if (c.kind === "choice") return `<select ${name}>${options(c.options, value)}</select>`;
  const range = `type="range" min="${c.min}" max="${c.max}" step="${c.step ?? 1}"`;
  if (c.kind === "slider") return `<input ${range} value="${value}" ${name}><output>${esc(level(c, value))}</output>`;
  const typed = `<input spellcheck="false" autocomplete="off" value="${esc(value ?? "")}" ${name}`;
  if (c.kind === "text" || c.kind === "number") return `${typed}>`;
  const more = '<button type="button" tabindex="-1" aria-hidden="true" data-by="1">▴</button>';
  const less = '<button type="button" tabindex="-1" aria-hidden="true" data-by="-1">▾</button>';
  return `<span class="int">${typed} inputmode="numeric" role="spinbutton">${more}${less}</span>`;
}

// What a control says; undefined where it is not a number that can be read.
function read(input) {
  const { kind } = input.dataset, digits = input.value.replace(/[\s,_]/g, "");
  if (kind === "choice") return JSON.parse(input.value);
  if (kind === "slider") return Number(input.value);
  if (kind === "number") return /^\d*\.?\d*$/.test(digits) ? Number(digits) || 0 : undefined;
  if (kind === "int") return /^-?\d{1,15}$/.test(digits) ? Number(digits) : undefined;
  return input.value;
}

// `usual` is what an empty control stands for.
function write(input, c, value, usual = "") {
  const number = c.kind === "int" && value !== null, none = c.kind === "number" && !value;
  const text = number ? value.toLocaleString("en-US") : none ? "" : String(value ?? "");
  if (c.kind === "choice") input.innerHTML = options(c.options, value);
  else if (input.value !== text) input.value = text;
  if (c.kind === "int") input.setAttribute("aria-valuenow", value ?? 0);
  if (TYPED.includes(c.kind) && c.kind !== "lines") input.size = Math.max(3, text.length || usual.length);
  if (usual) input.placeholder = usual;
  if (c.kind === "slider") input.nextElementSibling.textContent = level(c, value);
  if (c.words) input.setAttribute("aria-valuetext", level(c, value));
  input.removeAttribute("aria-invalid");
}

// The number after or before one, among the powers of two.
function next(c, now, by) {
  const power = by > 0 ? Math.floor(Math.log2(now)) + 1 : Math.ceil(Math.log2(now)) - 1;
  return Math.min(c.max ?? Infinity, Math.max(c.min ?? 1, now < 1 ? 1 : 2 ** power));
}

// ------------------------------------------------------------------------------------------- parts of a page

function themeCss({ light, dark }) {
  const rule = (theme) => `.lpx{${Object.entries(theme).map((pair) => `--${pair.join(":")}`).join(";")}}`;
  const [day, night] = [rule(light), rule(dark)];
  const lab = `[data-jp-theme-light=true] ${day}[data-jp-theme-light=false] ${night}`;
  const site = `[data-theme=light] ${day}[data-theme=dark] ${night}`;
  return `${day}@media (prefers-color-scheme:dark){${night}}${lab}${site}`;
}

const acting = (set, name, inner) =>
  `<button type="button" ${name} data-set="${esc(JSON.stringify(set))}">${inner}</button>`;
const step = ({ text, do: word, set }) => acting(set, 'class="step"', `${esc(text)} <b>${esc(word)}</b>`);

function verdict({ verdict: known, refusal }, last) {
  const one = known || (refusal && { tone: "refused", head: "Not possible" });
  if (!one) return "";
  const line = (kind, text) => (text ? `<p class="${kind}">${esc(text)}</p>` : "");
  const icon = `<span aria-hidden="true">${ICONS[one.tone]}</span>`, steps = (refusal || one).steps || [];
  return `<div class="${one.tone}"><div role="status">
    <p class="head"><b>${icon} ${esc(one.head)}</b> ${esc(one.rest || "")}</p>
    ${line("why", refusal?.why)}${line("line", one.line)}
    ${line("line", refusal && last && "Shown: the last that could be answered.")}</div>
    <div class="steps">${steps.map(step).join("")}</div></div>`;
}

const labelled = (c, inner) => {
  const tag = c.kind === "int" ? "div" : "label"; // a label would pass clicks on to its first button
  return `<${tag} class="labelled ${c.kind}"><span>${esc(c.label)}</span>${inner}</${tag}>`;
};

// All that stays; what an answer says is put into it. Controls that a sentence does not name are folded.
function skeleton(doc, source, own) {
  const [h, sub] = source.page ? ["h1", "h2"] : ["h2", "h3"], words = doc.sentence.split(/\{(\w+)\}/);
  const button = (name, text, label = text) =>
    `<button type="button" data-do="${name}" aria-label="${label}" title="${label}">${text}</button>`;
  const unnamed = doc.controls.filter((c) => !words.includes(c.name)), box = (c) => labelled(c, own(c.name));
  const others = unnamed.filter((c) => !c.fold).map(box);
  const folds = unnamed.filter((c) => c.fold).map((c) => `<details class="fold"><summary>${c.fold}</summary>${box(c)}</details>`);
  const form = `<div class="form">${others.join("")}</div>`;
  const panel = ([name, title]) => `<section class="panel" data-panel="${name}" hidden>
    <${sub}>${esc(title)}</${sub}>
    <div class="pic" role="group" aria-label="${esc(title || name)}"></div><p class="note"></p></section>`;
  const area = (where) =>
    `<div class="${where}">${doc.panels.filter((one) => one[2] === where).map(panel).join("")}</div>`;
  const tab = ([name, title]) =>
    `<button type="button" data-tab="${name}">${esc(title || name)}</button>`;
  const keys = Object.entries(KEYS).map(([key, what]) => `<tr><th>${key}</th><td>${what}</td></tr>`).join("");
  return `<style>${themeCss(doc.theme)}</style>
    <div class="ask"><div class="top"><${h} class="${doc.sentence ? "unseen" : ""}">${esc(doc.title)}</${h}>
      <div class="sentence">${words.map((word, i) => (i % 2 ? own(word) : esc(word))).join("")}</div>
      <div class="tools">${source.address ? button("link", "copy link") : ""}${button("code", "copy code")}
        <details class="menu"><summary>save</summary><div>${button("png", "PNG")}${button("svg", "SVG")}
        ${source.save ? button("html", "HTML") : ""}</div></details>${button("help", "?", "keys")}</div></div>
      ${doc.sentence ? "" : form}</div>
    <div class="verdict"></div><div class="ask under"><p class="said" role="status"></p>
      ${folds.join("")}<details class="rest" hidden><summary></summary>${doc.sentence && form}<div class="fields"></div></details></div>
    <nav class="tabs" aria-label="pictures">${doc.panels.map(tab).join("")}</nav>
    ${area("over")}<div class="panels">${["left", "middle", "right"].map(area).join("")}</div>${area("below")}
    <p class="foot"><span></span> ${button("cite", "copy")}<br>${source.made}</p>
    <dialog aria-label="keys"><table>${keys}</table>
      <form method="dialog"><button>close</button></form></dialog>
    <div class="player" role="group" aria-label="the moving pictures" hidden>${button("play", "▶", "play")}
      ${button("back", "◂", "step back")}${button("forth", "▸", "step forward")}
      <input type="range" min="0" aria-label="instant"><span></span></div>`;
}

function download(name, type, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function savePng(svg, name) {
  const image = new Image();
  image.onload = () => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => download(name, "image/png", blob));
  };
  image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
}

// What a panel shows: of a choice that stands above its picture what is chosen, else its heading.
function named(panel) {
  const select = panel.querySelector(".pic select"), words = select?.closest("label")?.firstChild.textContent;
  return words ? `${words} ${select.selectedOptions[0].textContent}` : panel.firstChild.textContent;
}

// The first screen as one picture, in the light theme's own colours: not every program knows variables.
function picture(root, { light: { ink, soft, paper } }, head, foot) {
  const out = [], text = (x, y, size, fill, said) =>
    out.push(`<text x="${x}" y="${y}" font-size="${size}" fill="${fill}">${esc(said)}</text>`);
  let x = 16, high = 0;
  for (const where of ["left", "middle", "right"]) {
    let y = 36 + 24 * head.length, wide = 0;
    for (const svg of root.querySelectorAll(`.${where} .panel:not([hidden]) svg`)) {
      const copy = svg.cloneNode(true), { width, height } = svg.viewBox.baseVal;
      copy.querySelector("style")?.remove();
      copy.removeAttribute("style");
      for (const button of copy.querySelectorAll("[data-live]")) button.remove();
      text(x, y + 4, 13, ink, named(svg.closest(".panel")));
      copy.setAttribute("x", x);
      copy.setAttribute("y", y + 12);
      out.push(new XMLSerializer().serializeToString(copy));
      [wide, y] = [Math.max(wide, width), y + height + 36];
    }
    [x, high] = [x + wide + (wide ? 16 : 0), Math.max(high, y)];
  }
  head.forEach((said, i) => text(16, 28 + 24 * i, 15, ink, said));
  text(16, high + 8, 11, soft, foot);
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${Math.max(x, 900)}" height="${high + 24}"
    font-family="DejaVu Sans, Verdana, sans-serif"><rect width="100%" height="100%" fill="${paper}"/>
    ${out.join("")}</svg>`;
}

function centre(e) {
  const { x, y, width, height } = e.getBoundingClientRect();
  return [x + width / 2, y + height / 2];
}

// The one that costs least to reach from a point; none where all cost Infinity.
function nearest(all, [x, y], cost) {
  let best = null, least = Infinity;
  for (const e of all) {
    const [x1, y1] = centre(e), far = e.getClientRects().length ? cost(x1 - x, y1 - y) : Infinity;
    if (far < least) [best, least] = [e, far];
  }
  return best;
}

const unhidden = (e) => !e.closest("[display=none]"); // asks for no layout

function showFrame(picture, frame) {
  for (const group of picture.querySelectorAll("[data-frame]")) {
    const of = group.dataset.frame, now = of === "moving" ? frame > 0 : Number(of) === frame;
    group.setAttribute("display", now ? "inline" : "none");
  }
  for (const svg of picture.querySelectorAll("svg:has([data-frame=moving])")) rove(svg);
}

// One Tab stop for all parts of a picture; without one given, the one that it has, or the first that is shown.
function rove(group, given) {
  const all = [...group.querySelectorAll(ACT)], shown = all.filter(unhidden);
  const stop = given ?? shown.find((act) => act.getAttribute("tabindex") === "0") ?? shown[0];
  for (const act of all) act.setAttribute("tabindex", act === stop ? 0 : -1);
}

// ---------------------------------------------------------------------------------------------- the explorer

// `source` is what answers: {state, answer, page, address, made, ask(state), more(state), save(state, answer)
// and waiting(ms): what to say after so long}. It tells `receive` an answer, and `follow` a state.
function mount(doc, source, el) {
  const stored = [doc.answer, ...(doc.stored || [])].filter(Boolean), root = document.createElement("div");
  const kinds = Object.fromEntries(doc.controls.map((c) => [c.name, c])), fieldKinds = {}, boxes = {};
  let { state, answer } = source, waiting = false, pending = false, timer = 0, clock = 0, since = 0, revision = 0;
  let frame = 0, playing = 0, address = 0, undone = false, rested = ""; // what is shown, and where
  let typing = null, dragged = null, dropped = -50, moved = "", drawing = false, strips = []; // what hands do
  root.className = "lpx";
  root.innerHTML = skeleton(doc, source, (name) => control(kinds[name], state[name]));
  el.append(root);
  const find = (selector) => root.querySelector(selector), focused = () => root.getRootNode().activeElement;
  const player = find(".player"), scrub = player.querySelector("input"), knob = find('[data-do="play"]');
  const say = (text) => { find(".said").textContent = text; };
  for (const section of root.querySelectorAll(".panel")) {
    const [title, pic, note] = section.children, name = section.dataset.panel;
    boxes[name] = { section, title, pic, note, tab: find(`[data-tab="${name}"]`), text: null };
  }
  const filled = {}; // what is not different is not touched
  const fill = (selector, html) => {
    if (filled[selector] !== html) find(selector).innerHTML = filled[selector] = html;
  };
  const frames = () => answer.frames || [];
  const own = (one) => Object.fromEntries(Object.entries(one).filter(([name]) => kinds[name]?.own)); // too long for a link
  const linked = (from) => toHash({ ...state, ...own(from) }, from);
  const opens = () => Object.values(boxes).filter((box) => !box.section.hidden);

  // -------- states and answers

  function set(patch, delay = 0) {
    state = patched(state, patch);
    seek(delay);
  }

  // The answer to the state: one that is here, or Python's.
  function seek(delay = 0, asks = true) {
    clearTimeout(timer);
    pending = asks;
    const here = [answer, ...stored].find((one) => one && !one.failed && belongs(one, state));
    if (here) receive(here);
    else expect(true);
    if (!asks || !source.ask || (here && source.page)) return; // a kernel hears of every state
    clearTimeout(timer);
    timer = setTimeout(() => source.ask(state), Math.max(delay, 15));
  }

  function expect(more) {
    waiting = more;
    since = performance.now();
    clearInterval(clock);
    root.classList.toggle("waiting", waiting);
    root.setAttribute("aria-busy", waiting);
    const tell = () => say(waiting ? source.waiting(performance.now() - since) : "");
    if (waiting) clock = setInterval(tell, 250);
    tell();
  }

  function receive(reply) {
    if (!reply?.state || !belongs(reply, state)) return; // of an older question
    [answer, state, pending] = [reply, reply.state, false];
    if (waiting) expect(false);
    draw();
    complete();
  }

  function complete() {
    const of = state;
    clearTimeout(timer);
    if (answer.more && source.more) timer = setTimeout(() => source.more(of), 60);
  }

  // Another view of the same widget, or Python, chose a state; what this view waits for itself goes before.
  function follow(chosen, asks = false) {
    if (pending && waiting && !asks || spelt(chosen) === spelt(state)) return;
    state = chosen;
    refresh();
    seek(0, asks);
  }

  // -------- drawing

  function draw() {
    const began = performance.now(), panels = answer.panels || {};
    drawing = true;
    const kept = Boolean(answer.refusal) && !Object.keys(panels).length; // the last picture stays, dimmed
    fill(".verdict", verdict(answer, kept && opens().length));
    root.classList.toggle("kept", kept);
    if (!kept) for (const name in boxes) show(boxes[name], panels[name]);
    moved = "";
    refresh();
    fields(answer.fields || []);
    if (answer.refusal) reveal(); // what is refused is seen
    if (!kept) go(frame);
    if (!find(".panel.on:not([hidden])") && opens().length) showTab(opens()[0].section.dataset.panel);
    seat();
    find('[data-do="code"]').hidden = !boxes.code?.text;
    find(".foot span").textContent = cite();
    if (source.address) keepAddress();
    drawing = false;
    root.dataset.revision = ++revision; // whoever waits for a drawing waits for this
    requestAnimationFrame(scrollable);
    performance.measure("llmpar redraw", { start: began });
  }

  function show(box, panel) {
    const { section, title, pic, note, tab } = box, text = (panel?.html || "") + (panel?.svg || "");
    const name = section.dataset.panel, asked = panel && section.hidden && kinds[name]?.fold;
    section.hidden = tab.hidden = !panel;
    if (!panel) return;
    if (asked) { // what a fold asked is seen
      find(`[data-name="${name}"]`).closest("details").open = true;
      showTab(name);
    }
    if (panel.title) title.textContent = tab.textContent = panel.title;
    if (box.text === text) return;
    note.textContent = "";
    const had = pic.contains(focused()) && focused(), spot = had && centre(had);
    const mark = moved || had?.dataset?.op || had?.dataset?.set, folds = [...pic.querySelectorAll("details")];
    pic.innerHTML = box.text = text;
    pic.querySelectorAll("details").forEach((one, i) => { one.open = folds[i]?.open ?? one.open; });
    for (const svg of pic.querySelectorAll("svg[viewBox]")) { // shrinks where a little too wide, else scrolls
      svg.style.maxWidth = `max(100%, (${0.75 * svg.viewBox.baseVal.width}px - 100%) * 9999)`;
    }
    showFrame(pic, frame);
    for (const group of pic.querySelectorAll("svg,table")) rove(group);
    if (!had) return;
    const all = [...pic.querySelectorAll(`${ACT},[data-name]`)].filter(unhidden), own = had.dataset?.name;
    const same = all.find((e) => (own ? e.dataset.name === own : e.dataset.op === mark || e.dataset.set === mark));
    (same || nearest(all, spot, Math.hypot) || pic).focus({ preventScroll: true });
  }

  // A picture that scrolls can be scrolled by keys, and fades where it goes on.
  function scrollable() {
    for (const { pic } of opens()) {
      const beyond = pic.scrollWidth - pic.clientWidth;
      pic.classList.toggle("more", beyond - pic.scrollLeft > 1);
      if (beyond > 1) pic.tabIndex = 0;
      else pic.removeAttribute("tabindex");
    }
  }

  // The form follows the state, except what is being typed.
  function refresh() {
    for (const input of root.querySelectorAll("[data-name]")) {
      const c = kinds[input.dataset.name];
      if (!c) continue; // of a panel, which Python writes
      input.disabled = Boolean(c.without && String(state[c.without]).trim());
      if (input !== typing) write(input, c, state[c.name], answer?.usual?.[c.name]);
    }
  }

  function fields(all) {
    const num = all.filter((c) => c.yours).length, at = focused()?.dataset?.field;
    const back = (c) => acting({ fields: { [c.name]: null } },
      `aria-label="${esc(c.label)}: give it back to the planner"`, "yours ✕");
    const one = (c) => `<div class="${c.yours ? "yours" : ""}">
      ${labelled(c, control(c, c.value, "data-field"))}${c.yours ? back(c) : ""}</div>`;
    for (const c of all) fieldKinds[c.name] = c;
    find(".rest").hidden = !all.length && !find(".rest [data-name]");
    find(".rest summary").textContent =
      `The rest of the plan: chosen by the planner${num ? `, ${num} set by you` : ""}`;
    fill(".fields", all.map(one).join(""));
    if (at && !focused()?.dataset?.field) find(`[data-field="${at}"]`)?.focus({ preventScroll: true });
  }

  // Folds are open that have a text.
  function reveal() {
    for (const input of root.querySelectorAll('.ask > details [data-kind="text"]')) {
      if (input.value) input.closest("details").open = true;
    }
  }

  function showTab(name) { // on a phone: one picture at a time
    for (const [other, { section, tab }] of Object.entries(boxes)) {
      section.classList.toggle("on", other === name);
      tab.setAttribute("aria-pressed", other === name);
    }
    seat();
    scrollable();
  }

  // -------- what moves

  // The player stands over a picture that moves: the one of the open tab, or the last.
  function seat() {
    const all = opens().filter(({ pic }) => pic.querySelector('[data-frame="1"]'));
    const on = all.length > 1 && all.find(({ section }) => section.classList.contains("on"));
    // Whether there are tabs is asked last: the browser lays out the page for it.
    const { title } = (on && find(".tabs").offsetParent ? on : all.at(-1)) || {};
    player.hidden = !title || frames().length < 2;
    if (title && title.nextSibling !== player) title.after(player);
  }

  function go(to) {
    const most = Math.max(0, frames().length - 1);
    frame = Math.min(Math.max(to, 0), most);
    const said = frames()[frame]?.text ?? "";
    for (const { pic } of opens()) showFrame(pic, frame);
    [scrub.max, scrub.value] = [most, frame];
    scrub.setAttribute("aria-valuetext", `${frame + 1} of ${most + 1}: ${said}`);
    player.querySelector("span").textContent = said;
  }

  // A frame lasts as long as it takes, between 0.4 and 1.5 seconds.
  function play(on) {
    const [mark, label] = on ? ["❚❚", "pause"] : ["▶", "play"], last = frames().length - 1;
    const longest = Math.max(...frames().map((one) => one.seconds)) || 1;
    const rest = () => Math.max(400, (1500 * frames()[frame].seconds) / longest);
    clearTimeout(playing);
    playing = 0;
    [knob.textContent, knob.title, knob.ariaLabel] = [mark, label, label];
    player.querySelector("span").ariaLive = on ? "off" : "polite";
    if (on && frame >= last) go(0);
    const tick = () => {
      if (frame >= last) return play(false);
      go(frame + 1);
      playing = setTimeout(tick, rest());
    };
    if (on) playing = setTimeout(tick, rest());
  }

  // -------- sharing

  const chosen = (name) => {
    const value = level(kinds[name], state[name] || (answer.usual?.[name] ?? state[name]));
    return typeof value === "number" ? value.toLocaleString("en-US") : shown(value);
  };
  const asked = () => doc.sentence.replace(/\{(\w+)\}/g, (_, name) => chosen(name));
  const cite = () => [`llmpar ${doc.version}, ${doc.title}`, asked()].filter(Boolean).join(": ").replaceAll("\n", ". ");
  const still = () => picture(root, doc.theme, [...(asked() || doc.title).split("\n"),
    ...(answer.verdict ? [`${answer.verdict.head} ${answer.verdict.rest || ""}`] : [])], cite());

  // Going back undoes: every state that was rested at is an entry of the browser's history.
  function keepAddress() {
    const hash = linked(doc.state), url = hash ? `#${hash}` : location.pathname + location.search;
    if (url === rested) return; // the same again, with more of what lies around it
    rested = url;
    const method = undone ? "replaceState" : "pushState";
    undone = false;
    clearTimeout(address);
    address = setTimeout(() => {
      if (hash === location.hash.slice(1)) return;
      try { history[method](null, "", url); } catch { /* a frame that may not */ }
    }, 400);
  }

  function back() {
    const [chosen, unread] = fromHash(location.hash, doc.state);
    clearTimeout(address);
    [undone, rested] = [true, ""];
    follow({ ...chosen, ...own(state) }, true);
    if (unread) say(unread);
  }

  const copy = (text, done = "copied") =>
    (navigator.clipboard ? navigator.clipboard.writeText(text) : Promise.reject())
      .then(() => say(done), () => say(`The browser allows no copying here: ${text}`));
  const name = doc.kind || "explorer";
  const actions = {
    link: () => {
      if (location.protocol !== "file:") return copy(location.href.replace(/#.*|$/s, `#${linked(doc.state)}`));
      if (doc.site) return copy(`${doc.site}#${toHash(state, {})}`); // whole: that page may start elsewhere
      const hash = `#${linked(doc.state)}`;
      if (hash === "#") return say("This page is a file of yours, and holds this choice: send the file.");
      const where = "it goes behind the page's name in the address bar";
      return copy(hash, `copied: the choice alone, ${hash}. This page is a file of yours: send it too; ${where}.`);
    },
    code: () => copy((boxes.code.pic.querySelector("[open] pre") ?? boxes.code.pic.querySelector("pre")).textContent), // an open fold, else ours
    cite: () => copy(cite()),
    png: () => savePng(still(), `${name}.png`),
    svg: () => download(`${name}.svg`, "image/svg+xml", still()),
    html: () => { say(source.page ? "" : "Python writes the page"); source.save(state, answer); },
    help: () => find("dialog").showModal(),
    play: () => play(!playing),
    back: () => { play(false); go(frame - 1); },
    forth: () => { play(false); go(frame + 1); },
  };

  // -------- hands

  function act(e) {
    if (e.dataset.set) set(JSON.parse(e.dataset.set));
    else pick(e.dataset.op);
  }

  // An operation of a timetable is selected in the order's text, ready to be typed over.
  function pick(op) {
    const area = find("textarea"), [row, place] = op.split(":").map(Number);
    if (!area) return;
    typing = null;
    refresh(); // its text may be of before a move
    area.value ||= answer.numbers?.order ?? "";
    const lines = area.value.split("\n"), start = lines.slice(0, row).join("\n").length + (row > 0);
    const word = [...(lines[row] || "").matchAll(/[^\s,]+/g)][place];
    typing = area;
    area.focus();
    if (word) area.setSelectionRange(start + word.index, start + word.index + word[0].length);
  }

  const opNamed = (op) => find(`[data-op="${op}"]`), numbers = (op) => op.split(":").map(Number);
  function move(from, to) {
    const [row, i] = numbers(from), [other, j] = numbers(to);
    if (row !== other || i === j || !opNamed(to)) return;
    moved = to;
    set({ move: [row, i, j] });
  }

  const kindOf = ({ dataset: { field, name, kind } }) => // or a panel's own
    fieldKinds[field] ?? kinds[name] ?? (name && { name, kind, label: name });

  function change(input, delay) {
    const c = kindOf(input), value = c && read(input);
    if (input === scrub) return go(Number(input.value));
    if (!c) return;
    if (value === undefined) {
      input.setAttribute("aria-invalid", true);
      return say(`${c.label}: write a ${c.kind === "int" ? "whole " : ""}number`);
    }
    if (input.ariaInvalid) say("");
    input.removeAttribute("aria-invalid");
    const cleared = (c.clears || []).map((other) => [other, typeof state[other] === "string" ? "" : 0]);
    const patch = { [c.name]: value, ...Object.fromEntries(cleared) };
    set(input.dataset.field ? { fields: { [c.name]: value } } : patch, delay);
  }

  function count(input, by) {
    write(input, kindOf(input), next(kindOf(input), read(input) || 0, by));
    change(input, 150);
  }

  // What is pointed at or has the focus is said below its picture.
  function tip({ target }) {
    const box = boxes[target.closest(".panel")?.dataset.panel], e = box && target.closest(".pic *:not(svg)");
    const said = e?.ariaLabel || e?.querySelector(":scope > title")?.textContent;
    if (box) box.note.textContent = said || "";
  }

  function key(event) {
    const { target, key, shiftKey } = event, e = target.closest(ACT), by = ARROWS[key];
    const group = e?.closest("svg,table");
    if (key === "?" && !target.matches("input,textarea")) actions.help();
    else if (by?.[1] && target.dataset.kind === "int") count(target, -by[1]);
    else if ((key === "Enter" || key === " ") && e && e.localName !== "button") act(e);
    else if (shiftKey && by?.[0] && e?.dataset.op) {
      const [row, i] = numbers(e.dataset.op);
      move(e.dataset.op, `${row}:${i + by[0]}`);
    } else if (group && (by || key === "Home" || key === "End")) {
      const all = [...group.querySelectorAll(ACT)].filter((one) => one.getClientRects().length);
      const cost = (dx, dy) => {
        const [along, across] = by[0] ? [dx * by[0], dy] : [dy * by[1], dx];
        return along > 1 ? along + 3 * Math.abs(across) : Infinity;
      };
      (by ? nearest(all, centre(e), cost) : all.at(key === "Home" ? 0 : -1))?.focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  function under({ clientX, clientY }, selector) {
    return document.elementsFromPoint(clientX, clientY).find((e) => root.contains(e) && e.matches(selector));
  }

  // Where a dragged operation would go.
  function over(event) {
    if (!dragged) return null;
    const e = under(event, "[data-op]"), op = e?.dataset.op;
    find(".target")?.classList.remove("target");
    if (!op || op === dragged || numbers(op)[0] !== numbers(dragged)[0]) return null;
    e.classList.add("target");
    return op;
  }

  function drop(event) {
    const from = dragged, to = over(event);
    dragged = null;
    find(".target")?.classList.remove("target");
    if (from && under(event, "[data-op]")?.dataset.op !== from) dropped = event.timeStamp;
    if (to) move(from, to);
  }

  function click(event) {
    const { tab, by, do: what } = event.target.closest("button")?.dataset || {};
    const e = event.target.closest(ACT) || under(event, ACT);
    if (event.timeStamp - dropped < 50) return; // the end of a drag
    if (what || tab) find(".menu").open = false;
    if (tab) showTab(tab);
    else if (by) count(event.target.parentElement.querySelector("input"), Number(by));
    else if (what) actions[what]();
    else if (e) {
      e.focus({ preventScroll: true });
      act(e);
    }
  }

  // On paper what moves stands as its first instants beside one another.
  function unfold() {
    for (const { pic } of opens().filter((box) => box.pic.querySelector('[data-frame="1"]'))) {
      const strip = document.createElement("div"), num = Math.min(8, frames().length);
      strip.className = "strip";
      for (let k = 0; k < num; k++) {
        strip.append(pic.querySelector("svg").cloneNode(true));
        showFrame(strip.lastChild, k);
      }
      pic.append(strip);
      strips.push(strip);
    }
  }
  const fold = () => strips.splice(0).forEach((strip) => strip.remove());

  const typed = ({ target }) => (TYPED.includes(target.dataset.kind) ? target : null);
  const listen = [
    [root, "input", (event) => change(event.target, (typing = typed(event)) ? 300 : 0)],
    [root, "change", (event) => { // not of a field that a new answer replaces
      typing = null;
      if (typed(event) && !drawing) change(event.target, 0);
    }],
    [root, "focusout", ({ target }) => setTimeout(() => { // later: nothing may move under a click
      if (typing === target && focused() !== target) typing = null;
      if (target.ariaInvalid) say("");
      if (!waiting) refresh();
    }, 200)],
    [root, "focusin", (event) => {
      const e = event.target.closest(ACT), group = e?.closest("svg,table");
      event.target.dataset.lmSuppressShortcuts = "true"; // JupyterLab would take arrows and letters away
      if (group) rove(group, e);
      tip(event);
    }],
    [root, "dragover", (event) => event.target.dataset.kind === "lines" && event.preventDefault()],
    [root, "drop", (event) => { // a file's text
      const { name, kind } = event.target.dataset, file = event.dataTransfer.files[0];
      if (kind !== "lines" || !file) return;
      event.preventDefault();
      file.text().then((text) => set({ [name]: event.target.value = text }));
    }],
    [root, "keydown", key], [root, "click", click], [root, "pointerover", tip],
    [root, "pointerdown", (event) => { dragged = under(event, "[data-op]")?.dataset.op; }],
    [root, "pointermove", over],
    [root, "scroll", scrollable, true], // of a picture: it does not bubble
    [window, "pointerup", drop], [window, "beforeprint", unfold], [window, "afterprint", fold],
    ...(source.address ? [[window, "popstate", back], [document, "keydown", (event) => {
      if (event.key === "?" && event.target === document.body) actions.help();
    }]] : []),
  ];
  for (const [where, ...args] of listen) where.addEventListener(...args);
  const sized = new ResizeObserver(() => { seat(); scrollable(); });
  sized.observe(root);

  reveal(); // what is not the usual is seen
  if (answer) draw();
  if (answer && belongs(answer, state)) complete();
  else { refresh(); seek(0, Boolean(source.page)); }
  if (source.said) say(source.said);
  const stop = () => {
    for (const [where, ...args] of listen) where.removeEventListener(...args);
    sized.disconnect();
    for (const one of [timer, playing, address, clock]) clearTimeout(one);
  };
  return { receive, follow, say, stop };
}

// Python in a page, which its explorers share: a worker, that sleeps until it is told where its parts are.
export function python(script) {
  const asked = new Map();
  let worker, parts = null, last = 0, status = "";
  const tell = (now, said) => {
    document.documentElement.dataset.python = now;
    status = said;
  };
  const failed = (why) => {
    tell("failed", `Python in this page failed: ${why}`);
    for (const { reject } of asked.values()) reject(new Error(why));
    asked.clear();
  };
  function begin() {
    worker = new Worker(script, { type: "module" });
    worker.onerror = (event) => failed(event.message || "this browser starts no such worker");
    worker.onmessage = ({ data: { id, answer, error, awake, dead } }) => {
      if (awake) tell("awake", "");
      if (dead) failed(dead);
      if (error) asked.get(id)?.reject(new Error(error));
      else asked.get(id)?.resolve(answer);
      asked.delete(id);
    };
    tell("starts", "Python starts in this page, in some seconds");
  }
  function wake(files) {
    if (!parts) worker.postMessage(parts = files);
  }
  function again() { // what runs for ever can only be ended from outside
    worker.terminate();
    failed("it was ended");
    begin();
    if (parts) worker.postMessage(parts);
  }
  const ask = (question) => new Promise((resolve, reject) => {
    asked.set(++last, { resolve, reject });
    worker.postMessage({ id: last, ...question });
  });
  const answering = (doc) => ({
    doc,
    get status() { return status; },
    ask: (state) => ask({ kind: doc.kind, given: doc.given, state, more: false }),
    more: (state) => ask({ kind: doc.kind, given: doc.given, state, more: true }),
  });
  begin();
  return { wake, again, ask, answering };
}

// What is shown where Python could not answer: no verdict of another state stays, and the next try asks again.
function unanswered(state, message) {
  const refusal = { why: `Python in this page gave no answer: ${message}`, steps: [] };
  return { asked: state, state, failed: true, refusal, verdict: null, fields: [], panels: {}, numbers: {}, frames: [] };
}

// A page: its own Python, or only stored answers. Of the questions that wait, only the last is asked.
export function start(doc, backend, el) {
  const address = doc.address ?? !document.querySelector("[data-explorer]"); // else the first one has the page's address
  const [state, said] = address ? fromHash(location.hash, doc.state) : [doc.state, ""];
  const stores = `This page stores ${1 + (doc.stored || []).length} answers of llmpar`;
  const none = `${stores}, and none for this choice; a page that was saved whole, or a notebook, has all.`;
  const source = { page: true, address, state, answer: doc.answer, said };
  source.made = doc.live ? "computed in this page by llmpar itself, no network" : stores;
  let wanted = null, busy = false;
  async function ask(state) {
    wanted = state;
    if (busy) return;
    busy = true;
    while (wanted) {
      const now = wanted;
      wanted = null;
      await backend.ask(now).then(app.receive, ({ message }) => app.receive(unanswered(now, message)));
    }
    busy = false;
  }
  source.waiting = () => (backend ? backend.status || "" : none);
  if (backend) source.ask = ask;
  if (backend) source.more = (state) => backend.more(state).then(app.receive, () => {});
  source.save = document.getElementById("doc") && ((state, answer) => { // this page, with the present state
    const copy = document.documentElement.cloneNode(true), own = JSON.stringify({ ...doc, state, answer });
    for (const one of copy.querySelectorAll("[data-explorer]")) {
      one.replaceChildren();
      one.removeAttribute("data-explorer"); // else it would take itself for another one, before it
    }
    copy.querySelector("#doc").textContent = own.replaceAll("<", "\\u003c");
    download(`${doc.kind}.html`, "text/html", `<!doctype html>${copy.outerHTML}`);
  });
  el.dataset.explorer = "";
  const app = mount(doc, source, el);
  return app.stop;
}

// A notebook: traits of a widget, which its kernel answers.
export function render({ model, el }) {
  const doc = model.get("doc"), app = mount(doc, {
    state: model.get("state"),
    answer: model.get("answer"),
    ask: (state) => { model.set("state", state); model.save_changes(); },
    more: () => model.send({ more: true }),
    save: () => model.send({ export: "html" }),
    waiting: (ms) => (ms > 3000 ? SILENT : ""),
    made: "computed by llmpar in this notebook",
  }, el);
  const heard = {
    "change:answer": () => app.receive(model.get("answer")),
    "change:state": () => app.follow(model.get("state")),
    "msg:custom": ({ html }) => {
      if (html) download(`${doc.kind}.html`, "text/html", html);
      if (html) app.say("saved");
    },
  };
  for (const [name, does] of Object.entries(heard)) model.on(name, does);
  return () => { app.stop(); for (const [name, does] of Object.entries(heard)) model.off(name, does); };
}

export default { render };
