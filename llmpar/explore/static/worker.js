// Python in a page: a worker that wakes what the page brings or what its site has, and answers states and exercises.
const load = globalThis.fetch.bind(globalThis);
const unpack = async (address) => {
  const packed = await load(address);
  if (!packed.ok) throw new Error(`Error: the site has no ${address}`);
  return new Response(packed.body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
};
const read = async (address) => new TextDecoder().decode(await unpack(address));
const script = async (address) => {
  const source = await read(address);
  return import(`data:text/javascript;charset=utf-8,${encodeURIComponent(source)}`);
};

const lastLine = (error) => { // of a traceback the line that says what is wrong
  const lines = String(error.message || error).trim().split("\n");
  return lines.findLast((line) => /^[\w.]*(Error|Exception)\b/.test(line)) || lines.at(-1);
};
const HOME = "/llmpar";
const BEGIN = `
import contextlib, functools, io, json, sys, traceback
sys.path.insert(0, "${HOME}")
sys.dont_write_bytecode = True
from llmpar.explore.explorer import by_kind

@functools.lru_cache(8)
def explorer(kind, given):
    return by_kind(kind, json.loads(given))

def run(code, known):
    from llmpar import lessons
    names, printed = vars(lessons).copy(), io.StringIO()
    exec(known, names)
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, "<exercise>", "exec"), names)
        except BaseException as error:
            own = [step.lineno for step in traceback.extract_tb(error.__traceback__) if step.filename == "<exercise>"]
            line = getattr(error, "lineno", None) or own[-1]
            print(f"line {line}: {type(error).__name__}: {error.args[0] if error.args else ''}")
    return printed.getvalue()

def answer(question):
    question = json.loads(question)
    if "code" in question:
        return json.dumps(run(question["code"], question["known"]))
    shown = explorer(question["kind"], json.dumps(question["given"]))
    return json.dumps((shown.more if question["more"] else shown.answer)(question["state"]))

answer
`;

async function wake({ python, sources }) {
  const parts = { "pyodide.asm.wasm": unpack(python.machine), "python_stdlib.zip": unpack(python.library) };
  const files = read(sources), glue = script(python.glue), { loadPyodide } = await script(python.start);
  globalThis.fetch = async (url) => {
    const part = await parts[String(url).split("/").pop()];
    return new Response(part, { headers: { "content-type": "application/wasm" } });
  };
  const pyodide = await loadPyodide({
    indexURL: "https://page.invalid/", createPyodideModule: (await glue).default, lockFileContents: JSON.parse(await read(python.lock)),
  });
  for (const [path, text] of Object.entries(JSON.parse(await files))) {
    pyodide.FS.mkdirTree(`${HOME}/${path}`.replace(/\/[^/]*$/, ""));
    pyodide.FS.writeFile(`${HOME}/${path}`, text);
  }
  return pyodide.runPython(BEGIN);
}

let begin;
const awake = new Promise((resolve) => { begin = resolve; });
onmessage = async ({ data }) => {
  if (data.python) {
    begin(wake(data));
    return awake.then(() => postMessage({ awake: true }), (error) => postMessage({ dead: lastLine(error) }));
  }
  const { id, ...question } = data;
  try {
    postMessage({ id, answer: JSON.parse((await awake)(JSON.stringify(question))) });
  } catch (error) {
    postMessage({ id, error: lastLine(error) });
  }
};
