"""Build the lessons: `src/NN_name.py` (py:percent text) becomes the executed, deterministic `NN_name.ipynb`
beside it.

    python notebooks/build.py                build what is not in step with its source; run what has new code
    python notebooks/build.py --force [NN…]  build all (or the named ones) again, after the package changed
    python notebooks/build.py --check        build nothing; name notebooks out of step or with a fault

Each run is noted in `runs.json`: the modules of the package that the kernel had imported at its end, and a
digest of them, of the notebook and of the versions. The gate runs the lessons whose digest is another one
now; the night runs all.

jupytext alone is not deterministic (random cell ids, time stamps). Here a cell's id is a hash of its source,
and everything that changes from run to run is dropped: two builds on one machine are byte-identical, pictures
included. A picture's words become its alt text. A notebook that writes to stderr, or breaks a rule in
`faults` or `form_faults`, is not written.

The form of a lesson:

* A YAML header says what a course needs to know of it, under `jupyter: llmpar:`: minutes of `teaching` and
  of `exercises`, the lessons that it `needs`, its `question`, its `objectives`. The builder adds the key
  points, a numbered list under the heading `## Keep: …`, and keeps all in the notebook's metadata. The
  objectives, verb first, end the core path as what the learner can do now.
* The heading `## Further` ends the core path. The builder tags the cells before it `core`, the others
  `further`. `--check` prints how much there is in each core path, and `CORE` says how much there may be.
* Cells tagged `plumbing` (imports, helpers, assertions) are folded. Cells tagged `nbval-check-output` print
  the same wherever they run, and nbval compares that.
* Neither code nor what it prints is wider than `MAX_COLUMNS`; `llmpar.lessons.say` breaks sentences there.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jupytext
import nbformat
import numpy as np
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from PIL import Image

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "llmpar"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
MAX_NOTEBOOK_BYTES = 500_000  # GitHub still renders that at once; a lesson with one figure has about 50 kB
MAX_TOTAL_BYTES = 5_600_000
COLOURS = 48  # of a stored picture: nobody sees the difference, and it has a fifth less bytes
LARGE = 16  # of them are those of the largest areas, as they are: a pale ground would become white
CELL_TIMEOUT_S = 600  # a lesson takes a minute on two idle cores; this only ends a hang
MAX_KERNEL_BYTES = 1_000_000_000  # what is promised to learners on a small machine
MAX_CELL_LINES, MAX_COLUMNS = 25, 88  # what a browser 1200 px wide shows without a scroll bar
CORE = {
    "words before the first picture": range(61),
    "words": range(901),  # of markdown: what is read in five minutes
    "asserts in view": range(3),
    "pictures": range(4, 99),
    "lines printed": range(26),
}
"""What a core path may have, in numbers: trouble and a picture first, and little to read between them."""
NUM_OBJECTIVES, NUM_KEYPOINTS = range(2, 5), range(3, 6)
PEAK = """import pathlib, re, resource
account = pathlib.Path("/proc/self/status")  # Linux: getrusage begins with the size of who started the kernel
largest = int(re.search(r"VmHWM:\\s*(\\d+)", account.read_text())[1]) * 1024 if account.exists() else 0
print(largest or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"""
"""Code that prints the largest resident size that the kernel has had, in bytes."""
MODULES = """import json, sys
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "llmpar")))"""
"""Code that prints the modules of the package that the kernel has imported."""
COMMAND = re.compile(r"subprocess|sys\.executable|^[!%]", re.M)
"""What starts other processes, which may import any module."""
FIGURE_REPR = re.compile(r"<Figure size .*>")


def sources(folder: Path = HERE) -> list[Path]:
    """List the lesson sources in order."""
    return sorted((folder / "src").glob("[0-9][0-9]*_*.py"))


def target(source: Path) -> Path:
    """Name the notebook that a source is built into."""
    return source.parent.parent / f"{source.stem}.ipynb"


def read_source(source: Path) -> nbformat.NotebookNode:
    """Read a py:percent file as a notebook without outputs, with cell ids that depend on the text alone."""
    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    header = notebook.metadata.get("llmpar")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    if header is not None:
        notebook.metadata["llmpar"] = nbformat.from_dict(header | {"keypoints": keypoints(notebook)})
        add_objectives(notebook)
        mark_parts(notebook)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell, cell_id in zip(notebook.cells, cell_ids(notebook), strict=True):
        cell.id = cell_id
    return notebook


def keypoints(notebook: nbformat.NotebookNode) -> list[str]:
    """Find the key points of a lesson in its text."""
    text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown") + "\n\n"
    points = re.search(r"^## Keep: [^\n]*\n\n(.*?)\n\n", text, re.S | re.M)
    found = re.split(r"^\d\. ", points[1], flags=re.M)[1:] if points else []
    return [" ".join(point.split()) for point in found]


def add_objectives(notebook: nbformat.NotebookNode) -> None:
    """End the core path of a lesson with its objectives: what the learner can do now."""
    about = notebook.metadata["llmpar"]
    able = [f"- {text[:1].lower()}{text[1:]}" for text in about.get("objectives", ())]
    ends = [place for place, cell in enumerate(notebook.cells) if is_further(cell)]
    if able and ends:
        cell = nbformat.v4.new_markdown_cell("\n".join(["**You can now**", "", *able]))
        cell.metadata["tags"] = ["objectives"]
        notebook.cells.insert(ends[0], cell)


def is_further(cell: nbformat.NotebookNode) -> bool:
    """Tell whether a cell is the heading that ends the core path."""
    return cell.cell_type == "markdown" and cell.source.split("\n")[0] == "## Further"


def mark_parts(notebook: nbformat.NotebookNode) -> None:
    """Tag each cell as `core` or `further`, and fold the plumbing."""
    part = "core"
    for cell in notebook.cells:
        part = "further" if is_further(cell) else part
        tags = cell.metadata.get("tags", [])
        cell.metadata["tags"] = [part, *tags]
        if "plumbing" in tags:
            cell.metadata["jupyter"] = {"source_hidden": True}


def cell_ids(notebook: nbformat.NotebookNode) -> list[str]:
    """Derive one id per cell from its type and source; repeated cells are numbered."""
    seen: Counter[str] = Counter()
    ids = []
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        ids.append(digest + (f"-{seen[digest]}" if seen[digest] else ""))
        seen[digest] += 1
    return ids


@contextlib.contextmanager
def kernel(folder: Path) -> Iterator[Callable[[nbformat.NotebookNode], nbformat.NotebookNode]]:
    """Start a fresh kernel in `folder`, on the CPU, without the user's own Jupyter settings; give the
    function that runs a notebook in it, in an empty namespace, and notes in its metadata `peak_bytes`, the
    largest resident size so far, and `modules`, those of the package that are imported."""
    with tempfile.TemporaryDirectory() as scratch:
        env = {
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # whatever the caller uses
            "JAX_COMPILATION_CACHE_DIR": str(HERE.parent / ".jax_cache"),
            "IPYTHONDIR": scratch,
            "JUPYTER_CONFIG_DIR": scratch,
            "JUPYTER_RUNTIME_DIR": scratch,
            "LLMPAR_ANSWERS": str(Path(scratch) / "answers.jsonl"),  # nobody has answered anything
            "LLMPAR_OPEN": "1",  # but all pictures are stored
        }
        client = NotebookClient(
            nbformat.v4.new_notebook(),
            timeout=CELL_TIMEOUT_S,
            kernel_name="python3",
            record_timing=False,
            store_widget_state=False,
            # Errors only: ipykernel 7 warns about every TCP kernel.
            extra_arguments=["--IPKernelApp.log_level=40"],
            resources={"metadata": {"path": str(folder)}},
        )

        def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
            client.nb = notebook
            done = client.execute(cleanup_kc=False)
            last = [nbformat.v4.new_code_cell(source) for source in (PEAK, MODULES, "%reset -f")]
            client.nb = nbformat.v4.new_notebook(cells=last)
            client.execute(cleanup_kc=False)
            done.metadata["peak_bytes"] = int(last[0].outputs[0].text)
            done.metadata["modules"] = json.loads(last[1].outputs[0].text)
            return done

        with client.setup_kernel(env=os.environ | env):
            yield execute


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop what changes from run to run: time stamps, widget views, the cuts between pieces of one printed
    text."""
    kept = {key: value for key, value in notebook.metadata.items() if key == "llmpar"}
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}} | kept)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET_VIEW, None)
                keep_svg(output)
            cell.outputs = join_streams([o for o in cell.outputs if o.get("data", True)])
            describe_pictures(cell)
    return notebook


def keep_svg(output: nbformat.NotebookNode) -> None:
    """Keep an SVG beside a PNG packed, for the site: readers of the notebook see the PNG."""
    data = output.get("data", {})
    if "image/png" in data and (svg := data.pop("image/svg+xml", None)):
        packed = gzip.compress(svg.encode(), mtime=0)
        output.metadata.setdefault("image/png", {})["svg"] = base64.b64encode(packed).decode()


def describe_pictures(cell: nbformat.NotebookNode) -> None:
    """Give every picture of a cell its words as alt text: its own, the cell's `alt="…"`, its text twin, or
    what is printed."""
    printed = " ".join(output.text for output in cell.outputs if output.output_type == "stream")
    for output in cell.outputs:
        if "image/png" in output.get("data", {}):
            own = output.metadata.setdefault("image/png", {})
            plain = FIGURE_REPR.sub("", output.data.get("text/plain", ""))
            words = (own.get("alt"), cell.metadata.get("alt"), plain, printed)
            own["alt"] = next((" ".join(text.split()) for text in words if text and text.strip()), "")


def slim_pictures(notebook: nbformat.NotebookNode) -> None:
    """Store each picture of a notebook in `COLOURS` colours, where it has more of them."""
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            image = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB")
            if image.getcolors(COLOURS) is None:
                image = in_few_colours(image)
                image.save(stored := io.BytesIO(), "PNG", optimize=True)
                output.data["image/png"] = base64.b64encode(stored.getvalue()).decode()


def in_few_colours(image: Image.Image) -> Image.Image:
    """Give each pixel of an image the nearest of `COLOURS` colours."""
    red, green, blue = np.moveaxis(np.asarray(image, np.int32), 2, 0)
    found, place, areas = np.unique(red << 16 | green << 8 | blue, return_inverse=True, return_counts=True)
    colours = np.stack([found >> 16, found >> 8 & 255, found & 255], 1)
    spread = image.quantize(COLOURS - LARGE, Image.Quantize.MAXCOVERAGE).getpalette()
    palette = np.concatenate([colours[np.argsort(-areas)[:LARGE]], np.reshape(spread, (-1, 3))])
    nearest = ((colours[:, None] - palette) ** 2).sum(2).argmin(1)
    few = Image.fromarray(nearest[place].reshape(red.shape).astype(np.uint8), "P")
    few.putpalette(palette.astype(np.uint8).tobytes())
    return few


def join_streams(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Join neighbouring pieces of the same stream: where a stream is cut depends on timing."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if (
            joined
            and output.output_type == "stream" == joined[-1].output_type
            and output.name == joined[-1].name
        ):
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def is_checked(cell: nbformat.NotebookNode) -> bool:
    """Tell whether nbval compares the outputs of this cell."""
    return "nbval-check-output" in cell.metadata.get("tags", [])


def faults(notebook: nbformat.NotebookNode) -> list[str]:
    """List what is wrong with a built notebook, one sentence each. Most are things that nbval passes over in
    silence.

    A picture needs its twin in words (in its own text/plain, printed by the same cell, or as `alt="…"` on the
    cell's first line), which `tidy` makes its alt text: that is what a screen reader reads.
    """
    found = []
    if notebook.metadata.get("kernelspec") != KERNEL:
        found.append(f"the kernelspec is not {KERNEL['name']!r} as the builder writes it")
    if "widgets" in notebook.metadata:
        found.append("widget state is stored: a reader sees an error instead of the picture")
    if [cell.get("id") for cell in notebook.cells] != cell_ids(notebook):
        found.append("cell ids do not follow from the sources: build it with notebooks/build.py")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("execution counts are not 1, 2, 3, …: nbval never compares a cell that has none")
    first = code[0].source if code else ""
    if "use_devices(" not in first or re.search(
        r"^\s*(import|from) jax\b", first.partition("use_devices(")[0], re.M
    ):
        found.append("the first code cell does not call use_devices() before it imports jax")
    if not any(is_checked(cell) or re.search(r"^\s*assert\b", cell.source, re.M) for cell in code):
        found.append("nothing is asserted and no output is checked")
    for number, cell in enumerate(code, 1):
        found += [f"code cell {number}: {fault}" for fault in cell_faults(cell)]
        pictures = [output for output in cell.outputs if "image/png" in output.get("data", {})]
        if not all(output.metadata.get("image/png", {}).get("alt") for output in pictures):
            found.append(f"code cell {number}: a picture without alt text: build it with notebooks/build.py")
    return found + form_faults(notebook)


def cell_faults(cell: nbformat.NotebookNode) -> list[str]:
    """List what is wrong with one code cell."""
    found = []
    if is_checked(cell) and not cell.outputs:
        found.append("marked for checking but without outputs: nbval would pass it whatever it prints")
    if cell.source.rstrip().endswith(";"):
        found.append("ends with ';': the output is shown all the same under nbval; end with plt.show()")
    texts, pictures = [cell.metadata.get("alt", "")], 0
    for output in cell.outputs:
        data = output.get("data", {})
        if output.output_type == "error" and "raises-exception" not in cell.metadata.get("tags", []):
            found.append(f"a stored error, {output.ename}")
        if output.get("name") == "stderr":
            found.append(f"text on stderr: {output.text.strip()[:200]!r}")
        if WIDGET_VIEW in data:
            found.append("a stored widget view: a reader sees an error instead of the picture")
        if "image/svg+xml" in data and "image/png" not in data:
            found.append("an SVG without a PNG: an untrusted JupyterLab shows only its text")
        text = output.get("text", "") or data.get("text/plain", "")
        if "image/png" not in data and (wide := [x for x in text.splitlines() if len(x) > MAX_COLUMNS]):
            found.append(f"prints {len(wide[0])} columns, more than {MAX_COLUMNS}: {wide[0].strip()}")
        pictures += "image/png" in data or "image/svg+xml" in data
        texts += [] if FIGURE_REPR.fullmatch(text.strip()) else [text]
        if re.search(r"\b0x[0-9a-f]{6,}|/tmp/|\.ipython/|ipykernel_\d", text):
            found.append(
                "an output names a memory address or a temporary file, which differs from run to run"
            )
    if pictures and not "".join(texts).strip():
        found.append("a picture without words: print or show its meaning in the same cell")
    return found


def form_faults(notebook: nbformat.NotebookNode) -> list[str]:
    """List where a lesson leaves the form that all lessons share: its header, its parts, and what fits on a
    screen."""
    about, cells = notebook.metadata.get("llmpar", {}), notebook.cells
    found = [f"the header has no {key}" for key in ("teaching", "exercises") if not about.get(key)]
    found += ["the header does not say what the lesson needs"] * (not isinstance(about.get("needs"), list))
    found += ["the header has no question"] * (not about.get("question"))
    for key, allowed in (("objectives", NUM_OBJECTIVES), ("keypoints", NUM_KEYPOINTS)):
        if (there := len(about.get(key, ()))) not in allowed:
            found.append(f"{there} {key}; {allowed[0]} to {allowed[-1]} are wanted")
    if sum(map(is_further, cells)) != 1:
        found.append("one markdown cell must begin with the heading '## Further'")
    for place, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), 1):
        lines = cell.source.splitlines()
        if len(lines) > MAX_CELL_LINES and "plumbing" not in cell.metadata.get("tags", []):
            found.append(f"code cell {place}: {len(lines)} lines, more than {MAX_CELL_LINES}")
        if mark := re.search(r"#\s*(NBVAL|PYTEST_VALIDATE)_\w+", cell.source):
            found.append(f"code cell {place}: {mark[0]!r} is a comment; say it as a tag, nbval-check-output")
        if wide := [line for line in lines if len(line) > MAX_COLUMNS]:
            found.append(
                f"code cell {place}: {len(wide[0])} columns, more than {MAX_COLUMNS}: {wide[0].strip()}"
            )
    return found


def core_path(notebook: nbformat.NotebookNode) -> dict[str, int]:
    """Count what a built lesson has in its core path, by the names of `CORE`, but not its objectives.

    Words are those of the markdown: what has a letter or a digit between two spaces, tables included, fenced
    code and formulas not. Printed is each line that a cell puts out beside its pictures, folded or not.
    """
    found = dict.fromkeys(CORE, 0)
    for cell in notebook.cells:
        if "core" not in cell.metadata.get("tags", []):
            continue
        if "objectives" in cell.metadata.tags:
            continue
        if cell.cell_type == "markdown":
            found["words"] += num_words(cell.source)
            if not found["pictures"]:
                found["words before the first picture"] = found["words"]
            continue
        if "plumbing" not in cell.metadata.tags:
            found["asserts in view"] += len(re.findall(r"^\s*assert\b", cell.source, re.M))
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                found["pictures"] += 1
            else:
                found["lines printed"] += len((output.get("text") or data.get("text/plain", "")).splitlines())
    return found


def core_faults(notebook: nbformat.NotebookNode) -> list[str]:
    """List where the core path of a built lesson has more than `CORE` allows, or fewer pictures."""
    return [
        f"{number:,} {what} in the core path; {CORE[what][0]} to {CORE[what][-1]} are wanted"
        for what, number in core_path(notebook).items()
        if number not in CORE[what]
    ]


def num_words(markdown: str) -> int:
    """Count the words of a markdown text; code in fences and formulas are none."""
    prose = re.sub(r"^```.*?^```|\$\$.*?\$\$", "", markdown, flags=re.S | re.M)
    return sum(any(sign.isalnum() for sign in word) for word in prose.split())


def out_of_step(source: Path) -> str | None:
    """Say how a notebook differs from its source, or None. Looks at sources only; nbval looks at outputs."""
    built = target(source)
    if not built.exists():
        return f"{built.name} has not been built"
    notebook, expected = nbformat.read(built, as_version=4), read_source(source)
    keys = ("cell_type", "source", "metadata", "id")
    here, there = (
        (nb.metadata.get("llmpar"), [{k: cell.get(k) for k in keys} for cell in nb.cells])
        for nb in (notebook, expected)
    )
    return None if here == there else f"{built.name} is out of step with src/{source.name}"


def problems(source: Path) -> list[str]:
    """List what is wrong with one committed notebook, without running it."""
    step = out_of_step(source)
    if step:
        return [step]
    built = target(source)
    size = built.stat().st_size
    found = [f"{size:,} bytes, more than {MAX_NOTEBOOK_BYTES:,}"] if size > MAX_NOTEBOOK_BYTES else []
    notebook = nbformat.read(built, as_version=4)
    found += faults(notebook) + core_faults(notebook)
    return [f"{built.name}: {fault}" for fault in found]


def table(chosen: list[Path]) -> str:
    """What each built core path has, beside what it may have."""
    lines = [f"{'lesson':<26}" + "".join(f"{what:>{len(what) + 3}}" for what in CORE)]
    for source in chosen:
        counts = core_path(nbformat.read(target(source), as_version=4))
        lines.append(f"{source.stem:<26}" + "".join(f"{n:>{len(what) + 3},}" for what, n in counts.items()))
    most = (f"{at[0]} or more" if at[0] else f"at most {at[-1]}" for at in CORE.values())
    wanted = (f"{words:>{len(what) + 3}}" for what, words in zip(CORE, most, strict=True))
    return "\n".join([*lines, f"{'wanted':<26}" + "".join(wanted)])


def house_problems(folder: Path = HERE) -> list[str]:
    """List what is wrong with the folder as a whole: notebooks without a source, and the sum of the sizes."""
    built = sorted(folder.glob("*.ipynb"))
    known = {source.stem for source in sources(folder)}
    found = [f"{path.name} has no source in src/" for path in built if path.stem not in known]
    total = sum(path.stat().st_size for path in built)
    if total > MAX_TOTAL_BYTES:
        found.append(f"the notebooks have {total:,} bytes together, more than {MAX_TOTAL_BYTES:,}")
    return found


def with_old_outputs(source: Path) -> nbformat.NotebookNode | None:
    """Take the outputs of the built notebook where no line of code has changed since."""
    new, code = read_source(source), lambda nb: [cell for cell in nb.cells if cell.cell_type == "code"]
    old = nbformat.read(target(source), as_version=4) if target(source).exists() else new
    if [cell.source for cell in code(new)] != [cell.source for cell in code(old)] or old is new:
        return None
    for cell, before in zip(code(new), code(old), strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    return new


def build(source: Path, force: bool = True) -> list[str]:
    """Execute one source and write its notebook; return its faults, in which case nothing is written. Without
    ``force`` the code runs only where it has changed."""
    try:
        notebook = None if force else with_old_outputs(source)
        if notebook is None:
            print(f"running {source.name}", flush=True)
            with kernel(source.parent.parent) as execute:
                notebook = execute(read_source(source))
    except (CellExecutionError, DeadKernelError, TimeoutError) as error:
        return [f"{source.name}: {error}"]
    peak = notebook.metadata.get("peak_bytes", 0)  # none where no code ran
    modules = notebook.metadata.get("modules")
    found = faults(tidy(notebook)) + core_faults(notebook)
    if peak > MAX_KERNEL_BYTES:
        found.append(f"the kernel took {peak / 1e9:.2f} GB, more than {MAX_KERNEL_BYTES / 1e9:g}")
    if not found:
        slim_pictures(notebook)
        nbformat.validate(notebook)
        target(source).write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
        if modules is not None:
            note_run(source, modules)
    return [f"{source.name}: {fault}" for fault in found]


def runs(folder: Path = HERE) -> dict[str, dict]:
    """What is noted of the last run of each lesson: ``{name: {"digest": ..., "modules": [...]}}``."""
    file = folder / "runs.json"
    return json.loads(file.read_text()) if file.exists() else {}


def note_run(source: Path, modules: list[str]) -> None:
    """Note with which modules a lesson ran; one that starts processes ran with all of them."""
    notebook, folder = target(source), source.parent.parent
    code = [cell.source for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    modules = ["llmpar.*"] if any(map(COMMAND.search, code)) else modules
    new = {source.stem: {"digest": digest(notebook, modules), "modules": modules}}
    with open(folder / "runs.json", "a+") as file:
        with contextlib.suppress(ImportError, OSError):  # two builders may run side by side
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        noted = json.loads(file.read() or "{}") | new
        known = {name: noted[name] for name in sorted(noted) if (source.parent / f"{name}.py").exists()}
        file.truncate(0)
        file.write(json.dumps(known, indent=1) + "\n")


def has_run(source: Path) -> bool:
    """Tell whether the built lesson ran with the modules, the data beside them and the versions of now."""
    noted = runs(source.parent.parent).get(source.stem)
    return noted is not None and noted["digest"] == digest(target(source), noted["modules"])


def digest(notebook: Path, modules: list[str]) -> str:
    """Hash what a run of a notebook depends on. Of a module's text that is its syntax tree, without
    docstrings where the notebook does not read them."""
    files = {file for name in modules if (file := module_file(name)).exists()}
    files = set(PACKAGE.rglob("*.py")) if modules == ["llmpar.*"] else files
    folders = {file.parent for file in files}
    data = {file for at in folders for file in at.iterdir() if file.is_file() and file.suffix != ".py"}
    data = {file for file in data if file.suffix != ".md" or notebook.name.startswith(file.stem)}
    parts = [f"{sys.version_info[:2]} jax {importlib.metadata.version('jax')}", notebook.read_text()]
    reads_docs = "__doc__" in parts[1]
    parts += [syntax(file.read_text(), reads_docs) for file in sorted(files)]
    parts += [file.read_text() for file in sorted(data)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def syntax(text: str, docstrings: bool) -> str:
    """Write the syntax tree of a module's text, which many lessons import."""
    tree = ast.parse(text)
    return ast.dump(tree if docstrings else WithoutDocstrings().visit(tree))


class WithoutDocstrings(ast.NodeTransformer):
    """Leaves out the strings that are statements."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        value = node.value
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        return None if is_text else node


def module_file(name: str) -> Path:
    """Name the file of a module of the package."""
    at = PACKAGE.joinpath(*name.split(".")[1:])
    return at / "__init__.py" if at.is_dir() else at.with_suffix(".py")


def main(argv: list[str] | None = None) -> int:
    """Build or check the notebooks; 0 when all is well, 1 with one sentence per problem."""
    parser = argparse.ArgumentParser(description="Build the lessons from notebooks/src, or check them.")
    parser.add_argument(
        "lessons", nargs="*", metavar="NN", help="only these, by the beginning of their names"
    )
    parser.add_argument("--check", action="store_true", help="build nothing, only look")
    parser.add_argument("--force", action="store_true", help="also build what is in step already")
    options = parser.parse_args(argv)
    chosen = [s for s in sources() if not options.lessons or s.stem.startswith(tuple(options.lessons))]
    if options.lessons and not chosen:
        there = ", ".join(source.stem for source in sources())
        print(
            f"no lesson begins with {' or '.join(options.lessons)}; there are {there or 'none'}",
            file=sys.stderr,
        )
        return 1
    found = []
    for source in chosen:  # one at a time: two kernels with eight devices each would starve one another
        if options.check:
            found += problems(source)
        elif options.force or out_of_step(source):
            found += build(source, force=options.force)
    found += house_problems()
    if options.check and all(target(source).exists() for source in chosen):
        print(table(chosen))
    print(
        "\n".join(found) or f"{len(chosen)} notebooks are in step", file=sys.stderr if found else sys.stdout
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
