// Python in a page: a worker that wakes what the page brought, and answers states. It asks no network for anything.
const load = globalThis.fetch.bind(globalThis);
const unpack = async (text) => {
  const packed = (await load(`data:;base64,${text}`)).body;
  return new Response(packed.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
};
const script = async (text) => {
  const source = new TextDecoder().decode(await unpack(text));
  return import(`data:text/javascript;charset=utf-8,${encodeURIComponent(source)}`);
};

const said = (error) => { // of a traceback the line that says what is wrong
  const lines = String(error.message || error).trim().split("\n");
  return lines.findLast((line) => /^[\w.]*(Error|Exception)\b/.test(line)) || lines.at(-1);
};
const HOME = "/llmpar";
const BEGIN = `
import json, sys
sys.path.insert(0, "${HOME}")
sys.dont_write_bytecode = True
from llmpar.explore.explorer import by_kind

def answering(kind, given):
    explorer = by_kind(kind, json.loads(given))
    return lambda state, more: json.dumps((explorer.more if more else explorer.answer)(json.loads(state)))

answering
`;

async function wake({ python, rooms, kind, given }) {
  const parts = { "pyodide.asm.wasm": unpack(python.machine), "python_stdlib.zip": unpack(python.library) };
  const files = unpack(rooms), glue = script(python.glue), { loadPyodide } = await script(python.start);
  globalThis.fetch = async (url) => {
    const part = await parts[String(url).split("/").pop()];
    return new Response(part, { headers: { "content-type": "application/wasm" } });
  };
  const pyodide = await loadPyodide({
    indexURL: "https://page.invalid/", createPyodideModule: (await glue).default, lockFileContents: python.lock,
  });
  for (const [path, text] of Object.entries(JSON.parse(new TextDecoder().decode(await files)))) {
    pyodide.FS.mkdirTree(`${HOME}/${path}`.replace(/\/[^/]*$/, ""));
    pyodide.FS.writeFile(`${HOME}/${path}`, text);
  }
  return pyodide.runPython(BEGIN)(kind, JSON.stringify(given));
}

let begin;
const awake = new Promise((resolve) => { begin = resolve; });
onmessage = async ({ data }) => {
  if (data.python) {
    begin(wake(data));
    return awake.then(() => postMessage({ awake: true }), (error) => postMessage({ dead: said(error) }));
  }
  const { id, state, more } = data;
  try {
    postMessage({ id, answer: JSON.parse((await awake)(JSON.stringify(state), more)) });
  } catch (error) {
    postMessage({ id, error: said(error) });
  }
};
