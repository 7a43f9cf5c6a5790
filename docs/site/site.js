// What is live on a site's page: explorers, and cells of code: exercises among them. They share one Python, which wakes when
// the first of them comes into sight.
import { python, start } from "./explorer.js";

const PARTS = ["start", "glue", "machine", "library", "lock"];
const LIMIT = 20_000; // milliseconds for an answer's code, once Python is awake
const at = (name) => new URL(name, import.meta.url).href;
const shared = python(at("worker.js"));
globalThis.llmpar = shared; // for a console: await llmpar.ask({ kind: "mesh", given: null, state: {…}, more: false })
const wake = () => shared.wake({
  python: Object.fromEntries(PARTS.map((name) => [name, at(`${name}.bin`)])), sources: at("sources.bin"),
});

function explorer(el, doc) {
  el.replaceChildren();
  start(doc, shared.answering(doc), el);
  requestAnimationFrame(() => setTimeout(wake)); // the picture first
}

function cell(el, { name, known }) {
  const [typed, said] = ["textarea", "pre"].map((tag) => el.querySelector(tag)), buttons = [...el.querySelectorAll("button")];
  const written = () => typed.value, code = { Check: written, Run: written, Hint: () => `hint("${name}")`, Solution: () => `solution("${name}")` };
  async function run(button) {
    for (const one of buttons) one.disabled = true;
    said.textContent = "Python starts in this page, in some seconds.";
    wake();
    let clock;
    try {
      await shared.ask({ code: "", known: "" }); // awake
      said.textContent = "";
      clock = setTimeout(shared.again, LIMIT);
      said.textContent = await shared.ask({ code: code[button.textContent](), known });
    } catch (error) {
      said.textContent = clock ? `No answer in ${LIMIT / 1000} seconds: does a loop never end? Python starts anew.` : error.message;
    }
    clearTimeout(clock);
    for (const one of buttons) one.disabled = false;
  }
  for (const button of buttons) {
    button.disabled = false;
    button.addEventListener("click", () => run(button));
  }
}

const seen = new IntersectionObserver((found) => {
  for (const { target, isIntersecting } of found) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    const doc = JSON.parse(target.querySelector("script").textContent);
    (target.dataset.llmpar === "cell" ? cell : explorer)(target, doc);
  }
}, { rootMargin: "400px" });
for (const el of document.querySelectorAll("[data-llmpar]")) seen.observe(el);
