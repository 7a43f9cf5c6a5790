"""The house rules: imports go down, models know no mesh axis, the core stays short, lists agree."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import llmpar

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llmpar"

# The core is flat: it is read like a paper. Half of it decides and needs no JAX, the other half runs.
THINKS = set(
    """
    notation files hugging_face config schedules timetable plan sequence_order execution refusals
    kernels.tiles
""".split()
)
RUNS = set(
    """
    channels placement mesh block par overlap readings attention moe model weights split stage
    pipeline step optimizer kernels
""".split()
)
CORE = {name.split(".")[0] for name in THINKS | RUNS}
# Around it stand wings with one question each. A wing names those that it may ask; the core asks none.
WINGS = {
    "training": set(),  # a run around the step
    "predict": set(),  # what would it cost?
    "draw": {"predict"},  # show a value
    "inspect": {"predict", "draw"},  # what did the compiler make of it?
    "serve": {"training"},  # answer requests
    "launch": set(),  # on a cluster
    "explore": {"predict", "draw", "inspect"},  # the same in the reader's hands
    "exercises": {"training", "predict", "draw", "inspect", "launch"},  # judge an answer
    "cli": set("training predict draw inspect serve launch explore exercises".split()),  # from a terminal
}
NO_JAX_WINGS = {"predict", "draw"}
NO_JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
MODEL_TEXT = ("model", "attention", "moe")
MODEL_TEXT += ("kernels.flash", "kernels.flash_tpu", "kernels.grouped")
MESH_AXES = {"pp", "dp", "fsdp", "ep", "sp", "tp"}
# The part of the core that states and executes the strategies.
PAPER = set(
    "notation plan block par sequence_order attention moe model weights split stage pipeline step".split()
)
# Statements, not lines: a budget of lines taught to write denser lines, not fewer ideas. One sum for each
# folder, with some air; the package has one besides, below their sum. They are meant to be lowered.
BUDGETS = {
    "paper": 2_240,
    "core": 4_140,  # the paper and what is beside it
    "kernels": 500,
    "training": 1_690,
    "predict": 3_070,  # a layer in time, what a reader could do next, and where numbers come from
    "draw": 2_630,
    "inspect": 2_160,
    "explore": 1_450,
    "serve": 750,  # a step, an engine, a server
    "launch": 1_230,
    "exercises": 1_390,
    "cli": 1_960,
    "package": 20_800,  # with LoRA, Hugging Face folders, trackers, a server, any program, slots for experts
}
# In pieces, so that this file obeys its own rule.
REGISTRY_HOSTS = [name + ".org" for name in ("pypi", "pythonhosted", "npmjs", "anaconda", "proxy.golang")]
REGISTRY_HOSTS += ["anaconda" + ".com", "unpkg" + ".com", "jsdelivr" + ".net", "cdnjs" + ".cloudflare"]
HOME = re.compile(r"(?<![\w.])(?:/ho" + r"me/\w|/Us" + r"ers/\w|[A-Z]:\\Us" + r"ers\\|/ro" + r"ot/)")


@functools.cache
def trees():
    """Parse every file of the package, once: ``"par"``, ``"draw.scene"``, ``"draw"`` for a front door."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {name_of(path): ast.parse(path.read_text(), str(path)) for path in paths}


def name_of(path):
    """Name a file of the package as imports do, below the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(name, tree):
    """List what a file imports, as (names inside this package, top names outside it).

    A picture of oneself is exempt: `_repr_svg_` and its kin may draw; Jupyter calls them, nothing that
    computes does.
    """
    known, inside, outside, queue = set(trees()), set(), set(), [tree]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_repr_"):
            continue
        queue += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["llmpar", *name.split(".")][: -node.level or None] if node.level else []
            base = ".".join([*base, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in names:
            top, *rest = target.split(".")
            if top != "llmpar":
                outside.add(top)
                continue
            found = [".".join(rest[:n]) for n in (2, 1) if ".".join(rest[:n]) in known]
            inside.add(found[0] if found else "__init__")
    return inside, outside


def project():
    """Read pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def repository_files():
    """List the repository's text files, tracked or not yet, with what they say; no embedded pictures."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        path = ROOT / name
        if path.is_file() and b"\0" not in (content := path.read_bytes()):  # a zero byte: not text
            yield name, re.sub(r'"image/png": "[^"]*"', "", content.decode())


def test_every_file_is_in_the_core_or_in_a_wing():
    folders = {name.split(".")[0] for name in trees()} - {"__init__", "__main__"}
    assert folders <= CORE | set(WINGS), (
        "add the new file to the core or to a wing, here and in docs/house.md"
    )
    assert folders >= CORE, "a file of the core is gone; take it out here and in docs/house.md"


def forbidden_imports(sources):
    """Name every import that leaves the core for a wing, climbs from one wing to another that did not invite
    it, or takes from the package's front door what has a file of its own."""
    for name, tree in sources.items():
        wing = name.split(".")[0]
        for other in sorted(imports(name, tree)[0]):
            there = other.split(".")[0]
            if other == "__init__":
                if name != "__main__" and wing != "cli" and wing != "explore":
                    yield f"{name} imports from llmpar itself; name the file"
            elif there in WINGS and wing in CORE:
                yield f"{name} is in the core and imports {other}, a wing"
            elif there in WINGS and wing in WINGS and there != wing and there not in WINGS[wing]:
                yield f"{name} imports {other}, which its wing may not ask"


def test_the_core_imports_no_wing_and_wings_ask_only_whom_they_may():
    assert list(forbidden_imports(trees())) == []


@pytest.mark.parametrize(
    "name, text",
    [
        ("notation", "from llmpar.draw import scene"),
        ("model", "import llmpar.inspect.hlo"),
        ("par", "from llmpar import predict"),
        ("par", "from .inspect import hlo"),
        ("draw.scene", "from ..inspect import hlo"),
        ("predict.traffic", "def f():\n    from llmpar.draw import layouts"),
        ("mesh", "def f():\n    from llmpar.cli import main"),
        ("mesh", "from llmpar import __version__"),
    ],
)
def test_a_forbidden_import_is_seen(name, text):
    assert len(list(forbidden_imports({name: ast.parse(text)}))) == 1


def test_no_imports_go_in_a_circle():
    """A wing's front door counts as its files do: what it offers it imports."""
    below = {name: imports(name, tree)[0] - {"__init__", name} for name, tree in trees().items()}
    while below:
        free = {name for name, others in below.items() if not others & set(below)}
        assert free, f"these files import one another in a circle: {sorted(below)}"
        below = {name: others for name, others in below.items() if name not in free}


def thinks(name):
    """Tell whether a file belongs to the half without JAX."""
    return name in THINKS or name.split(".")[0] in NO_JAX_WINGS


def test_what_thinks_imports_no_jax():
    for name, tree in trees().items():
        inside, outside = imports(name, tree)
        if thinks(name):
            assert not outside & NO_JAX, name
            assert not [other for other in inside if other in RUNS], (
                f"{name} needs no JAX, and imports what does"
            )


def loaded_by(statement):
    """List the top-level modules that a statement loads in a fresh interpreter."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_import_llmpar_is_light():
    heavy = {"IPython", "ipykernel", "ipywidgets", "anywidget", "jupyterlab", "jupyter_server", "matplotlib"}
    assert not loaded_by("import llmpar") & heavy
    files = [name for name in trees() if thinks(name)]
    assert not loaded_by("; ".join(f"import llmpar.{name}" for name in files)) & {"jax", "flax", *heavy}


def test_the_front_door_offers_what_the_files_have():
    assert not loaded_by("import llmpar") & NO_JAX
    assert sorted(llmpar.__all__) == llmpar.__all__ and set(llmpar.__all__) <= set(dir(llmpar))
    for name in llmpar.__all__:
        offered = getattr(llmpar, name)
        assert offered is getattr(sys.modules[offered.__module__], name) and offered.__name__ == name
    with pytest.raises(AttributeError, match="llmpar has no 'Mesh'; it has MeshExplorer, Plan, Step, "):
        llmpar.Mesh  # noqa: B018
    with pytest.raises(ImportError):
        from llmpar import Mesh  # noqa: F401


def axis_words(tree):
    """Find the mesh axes that occur as words in strings; docstrings may talk about them."""
    # a string that nobody takes
    talk = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    spoken = [(node.lineno, re.findall("[a-z]+", node.value)) for node in strings if id(node) not in talk]
    return {(line, word) for line, words in spoken for word in words if word in MESH_AXES}


def test_the_model_names_no_mesh_axis():
    for name, tree in trees().items():
        if name in MODEL_TEXT:
            assert not axis_words(tree), (
                f"{name} names a mesh axis; let it say which dim moves, the plan where to"
            )


def test_a_mesh_axis_in_a_model_is_seen():
    planted = (
        '"""Over tp."""\ndef f(par, x):\n    "cut by dp"\n    return par.move(x, f"b s d +tp -> {x} b'
        ' s/sp d")'
    )
    assert axis_words(ast.parse(planted)) == {(4, "tp"), (4, "sp")}


def statements_of(sources):
    """Count the statements of every room, of the paper and of the package, from {a file's name: its tree}."""
    counts = dict.fromkeys(BUDGETS, 0)
    for name, tree in sources.items():
        room = name.split(".")[0] if name.split(".")[0] in BUDGETS else "core"
        for what in (room, "package", *["paper"] * (name in PAPER)):
            counts[what] += sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
    return counts


def test_every_room_stays_within_its_statements():
    """Compact is a feature: the paper is read in one afternoon."""
    counts = statements_of(trees())
    over = {room: (count, BUDGETS[room]) for room, count in counts.items() if count > BUDGETS[room]}
    assert not over, over


def test_statements_are_counted_for_the_room_and_for_the_paper():
    texts = {"par": "a\nb; c\n", "optimizer": "a\n", "cli.train": "if a:\n\n    b\n"}
    counts = statements_of({name: ast.parse(text) for name, text in texts.items()})
    assert {room: n for room, n in counts.items() if n} == {"paper": 3, "core": 4, "cli": 2, "package": 6}


def test_every_text_that_an_error_is_planted_in_stands_once_in_the_package():
    """tests/mutants.txt; `python tests/mutants.py` plants them."""
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    lines = (ROOT / "tests" / "mutants.txt").read_text().splitlines()[1:]
    planted = {line: line.split(" ; ")[0] for line in lines}
    assert [line for line, old in planted.items() if sum(text.count(old) for text in texts) != 1] == []


def undocumented(name, tree):
    """Name the public functions and classes without a docstring, and the file if it has none."""
    if ast.get_docstring(tree) is None:
        yield name
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if ast.get_docstring(node) is None:
                yield f"{name}.{node.name}"


def test_public_names_are_documented():
    assert [missing for name, tree in trees().items() for missing in undocumented(name, tree)] == []


def test_an_undocumented_name_is_seen():
    tree = ast.parse('"""A file."""\ndef f(): ...\nclass C:\n    """A class."""\ndef _g(): ...')
    assert list(undocumented("file", tree)) == ["file.f"]


def addresses(text):
    """Find package registries and home directories in a text."""
    return [host for host in REGISTRY_HOSTS if host in text] + HOME.findall(text)


def test_no_file_names_a_registry_or_a_home_directory():
    assert {name: found for name, text in repository_files() if (found := addresses(text))} == {}


def test_a_registry_and_a_home_directory_are_seen():
    planted = (
        "https://files.pythonhosted" + ".org/x",
        "see /ho" + "me/ada",
        "'/ro" + "ot/.venv'",
        "C:\\Us" + "ers\\ada",
    )
    assert all(addresses(text) for text in planted)
    assert not addresses("the root/leaf of /usr/lib, a tree's /roots/, src/home/index")


def requirement(text):
    """Split 'name>=1.2,<3' into its name and bounds."""
    name, _, bounds = re.fullmatch(r"([A-Za-z0-9_.-]+)(\[\w+\])?\s*>=\s*([\d.]+(?:,<[\d.]+)?)", text).groups()
    return name, bounds


def test_environment_yml_repeats_the_dependencies_and_the_extra_lab():
    """The same names and bounds under conda-forge's names. This does not prove that conda can solve it."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == "llmpar" and environment["channels"] == ["conda-forge", "nodefaults"]
    *conda, pip = environment["dependencies"]
    assert pip == {"pip": ["-e ."]}
    conda.remove("pip")
    conda.remove("python =3.12")  # one that constraints.txt knows; the newest may be too new for the rest
    conda_name = {"matplotlib": "matplotlib-base"}  # without Qt
    listed = project()["project"]["dependencies"] + project()["project"]["optional-dependencies"]["lab"]
    pyproject = map(requirement, listed)
    wanted = {conda_name.get(name, name): bound for name, bound in pyproject}
    assert dict(map(requirement, conda)) == wanted


def test_extra_dev_repeats_the_groups():
    groups = project()["dependency-groups"]

    def members(name):
        for item in groups[name]:
            yield from members(item["include-group"]) if isinstance(item, dict) else [item]

    extras = project()["project"]["optional-dependencies"]
    assert sorted(extras["dev"]) == sorted(members("dev"))
    assert {*extras["hf"], *extras["serve"]} <= {*extras["dev"]}, (
        "the tests read safetensors, and ask a server"
    )
    assert sorted(extras["lab"]) == sorted(members("lab")) and set(extras["lab"]) <= set(extras["dev"])


def test_a_rank_of_a_job_installs_no_notebook():
    """What draws in a browser, makes a PNG or sends a notebook's functions is in the extra lab."""
    plain = {requirement(text)[0] for text in project()["project"]["dependencies"]}
    lab = {requirement(text)[0] for text in project()["project"]["optional-dependencies"]["lab"]}
    notebooks = {"jupyterlab", "ipywidgets", "anywidget", "nbval", "matplotlib", "cloudpickle"}
    assert not plain & lab and lab == notebooks
    assert not plain & {
        requirement(text)[0] for text in project()["project"]["optional-dependencies"]["serve"]
    }


def test_constraints_pin_every_dependency_without_addresses():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pin = re.compile(r'([a-z0-9-]+)==[\w.]+(?: ; python_version (?:<|>=) "3\.12")?')
    assert [line for line in lines if not pin.fullmatch(line)] == []
    pinned = {pin.fullmatch(line)[1] for line in lines}
    extras = project()["project"]["optional-dependencies"]
    assert {requirement(text)[0] for text in project()["project"]["dependencies"] + extras["dev"]} <= pinned
