"""The house rules: imports go down, models know no mesh axis, budgets hold, lists agree."""

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib

import house
import pytest
import yaml
from shared import CASES, ROOT

import llmpar
from llmpar.cli import doctor

PACKAGE = ROOT / "llmpar"

AROUND = {folder: set(names.split()) for folder, names in CASES["imports_around"].items()}
TOP = {"files"}  # beside the folders: what anyone may import
NO_JAX_FOLDERS = {"files", "plan", "predict", "draw", "planner"}
NO_JAX_FILES, WITH_JAX = {"kernels.tiles"}, {"planner.aot", "planner.targets"}
NO_JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
MODEL_TEXT = ("model.llama", "model.lora", "model.attention", "model.moe")
MODEL_TEXT += ("kernels.flash", "kernels.flash_tpu", "kernels.grouped")
MESH_AXES = {"pp", "dp", "fsdp", "ep", "sp", "tp"}
# In pieces, so that this file obeys its own rule.
REGISTRY_HOSTS = [name + ".org" for name in ("pypi", "pythonhosted", "npmjs", "anaconda", "proxy.golang")]
REGISTRY_HOSTS += ["anaconda" + ".com", "unpkg" + ".com", "jsdelivr" + ".net", "cdnjs" + ".cloudflare"]
HOME = re.compile(r"(?<![\w.])(?:/ho" + r"me/\w|/Us" + r"ers/\w|[A-Z]:\\Us" + r"ers\\|/ro" + r"ot/)")


trees = functools.partial(house.parse, ROOT)  # every file of the package, parsed once


def imports(name, tree):
    """List what a file imports of this package, and from outside; not for types alone, nor `_repr_svg_`."""
    known, inside, outside, queue = set(trees()), set(), set(), [tree]
    while queue:
        node = queue.pop()
        types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and name != "__init__"
        if types or isinstance(node, ast.FunctionDef) and node.name.startswith("_repr_"):
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


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES, EXTRAS = (PYPROJECT["project"][name] for name in ("dependencies", "optional-dependencies"))


def repository_files():
    """List the repository's text files with what they say."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        path = ROOT / name
        if path.is_file() and b"\0" not in (content := path.read_bytes()):  # a zero byte: not text
            yield name, re.sub(r'"image/png": "[^"]*"', "", content.decode())


def folder_of(name):
    """Name the folder of a file, or the file itself where it is in none."""
    return name.split(".")[0]


def test_every_file_is_in_a_folder_that_has_a_question():
    folders = {folder_of(name) for name in trees()} - {"__init__", "__main__"}
    assert folders == {*house.COMPACT, *AROUND, *TOP}, "name the new folder here and in docs/architecture.md"
    assert len(list(PACKAGE.glob("*.py"))) <= 3


def allowed_imports(folder):
    """Name the folders that a folder may import, besides itself."""
    if folder in TOP:
        return set()
    if folder in house.COMPACT:
        return TOP | set(house.COMPACT[: house.COMPACT.index(folder)])
    return TOP | set(house.COMPACT) | AROUND[folder]


def forbidden_imports(sources):
    """Name every import that climbs: out of the compact package, to a folder below, or to the front door."""
    for name, tree in sources.items():
        folder = folder_of(name)
        for other in sorted(imports(name, tree)[0]):
            if other == "__init__":
                if name != "__main__" and folder not in ("cli", "explore"):
                    yield f"{name} imports from llmpar itself; name the file"
            elif name in ("__init__", "__main__") or folder_of(other) == folder:
                continue
            elif folder_of(other) not in allowed_imports(folder):
                yield f"{name} imports {other}, which {folder}/ may not import"


def test_no_imports_go_in_a_circle():
    """A wing's front door counts as its files do: what it offers it imports."""
    below = {name: imports(name, tree)[0] - {"__init__", name} for name, tree in trees().items()}
    while below:
        free = {name for name, others in below.items() if not others & set(below)}
        assert free, f"these files import one another in a circle: {sorted(below)}"
        below = {name: others for name, others in below.items() if name not in free}


def needs_no_jax(name):
    """Tell whether a file promises to work without JAX."""
    return name in NO_JAX_FILES or folder_of(name) in NO_JAX_FOLDERS and name not in WITH_JAX


def test_what_plans_and_predicts_imports_no_jax():
    for name, tree in trees().items():
        inside, outside = imports(name, tree)
        if needs_no_jax(name):
            assert not outside & NO_JAX, name
            assert [other for other in inside if not needs_no_jax(other) and "." in other] == [], name


def loaded_by(statement):
    """List the top-level modules that a statement loads in a fresh interpreter."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_import_llmpar_is_light():
    heavy = {"IPython", "ipykernel", "ipywidgets", "anywidget", "jupyterlab", "jupyter_server", "matplotlib"}
    assert not loaded_by("import llmpar") & heavy
    files = [name for name in trees() if needs_no_jax(name)]
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
            assert not axis_words(tree), f"{name} names a mesh axis; let it say which dim moves"
    planted = '"""Over tp."""\ndef f(par, x):\n    "cut by dp"\n    return par.move(x, f"b s +tp -> b s/sp")'
    assert axis_words(ast.parse(planted)) == {(4, "tp"), (4, "sp")}


def test_every_folder_stays_within_its_statements_and_all_within_their_limits():
    """Compact is a feature: the compact package is read in one afternoon."""
    counts = house.by_folder(trees())
    assert {folder: n for folder, n in counts.items() if n > house.BUDGETS[folder]} == {}
    measured = house.measure(ROOT)
    over = {what: value for what, value in measured.items() if value > house.LIMITS[what]}
    assert not over, (house.large_functions(trees()), house.two_homes(trees()), house.banned_names(trees()))


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


def addresses(text):
    """Find package registries and home directories in a text."""
    return [host for host in REGISTRY_HOSTS if host in text] + HOME.findall(text)


def test_addresses_and_undocumented_names_are_seen():
    planted = ["https://files.pythonhosted" + ".org/x", "see /ho" + "me/ada", "'/ro" + "ot/.venv'"]
    planted += ["C:\\Us" + "ers\\ada"]
    assert all(addresses(text) for text in planted)
    assert not addresses("the root/leaf of /usr/lib, a tree's /roots/, src/home/index")
    tree = ast.parse('"""A file."""\ndef f(): ...\nclass C:\n    """A class."""\ndef _g(): ...')
    assert list(undocumented("file", tree)) == ["file.f"]


def requirement(text):
    """Split 'name>=1.2,<3' into its name and bounds."""
    name, _, bounds = re.fullmatch(r"([A-Za-z0-9_.-]+)(\[\w+\])?\s*>=\s*([\d.]+(?:,<[\d.]+)?)", text).groups()
    return name, bounds


def test_environment_yml_repeats_the_dependencies_and_the_extra_lab():
    """The same names and bounds under conda-forge's names."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == "llmpar" and environment["channels"] == ["conda-forge", "nodefaults"]
    *conda, pip = environment["dependencies"]
    assert pip == {"pip": ["-e ."]}
    conda.remove("pip")
    conda.remove("python =3.12")  # one that constraints.txt knows; the newest may be too new for the rest
    conda_name = {"matplotlib": "matplotlib-base"}  # without Qt
    listed = map(requirement, DEPENDENCIES + EXTRAS["lab"])
    wanted = {conda_name.get(name, name): bound for name, bound in listed}
    assert dict(map(requirement, conda)) == wanted


def test_extra_dev_repeats_the_groups_and_a_rank_of_a_job_installs_no_notebook():
    def members(name):
        for item in PYPROJECT["dependency-groups"][name]:
            yield from members(item["include-group"]) if isinstance(item, dict) else [item]

    assert all(sorted(EXTRAS[name]) == sorted(members(name)) for name in ("dev", "lab"))
    assert {*EXTRAS["hf"], *EXTRAS["serve"], *EXTRAS["lab"]} <= {*EXTRAS["dev"]}
    plain, lab = ({requirement(text)[0] for text in group} for group in (DEPENDENCIES, EXTRAS["lab"]))
    assert not plain & lab and "jupyterlab" in lab


def test_constraints_pin_every_dependency_without_addresses():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pin = re.compile(r'([a-z0-9-]+)==[\w.]+(?: ; python_version (?:<|>=) "3\.12")?')
    assert [line for line in lines if not pin.fullmatch(line)] == []
    pinned = {pin.fullmatch(line)[1] for line in lines}
    assert {requirement(text)[0] for text in DEPENDENCIES + EXTRAS["dev"]} <= pinned


OLDEST = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-min.txt").read_text(), re.M))


def test_the_oldest_versions_are_the_lower_bounds():
    """jaxlib is JAX's own; a bound may leave out the last zeros."""
    listed = DEPENDENCIES + EXTRAS["lab"] + EXTRAS["serve"]
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", text).groups() for text in listed)
    assert OLDEST.keys() - bounds == {"jaxlib"} and OLDEST["jax"] == OLDEST["jaxlib"]
    for name, bound in bounds.items():
        assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", OLDEST[name]), name


@pytest.mark.full
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="constraints-min.txt is for Python 3.11")
def test_the_oldest_versions_run_the_commands(tmp_path):
    """Installed into an environment of their own, which takes the network and minutes."""

    def run(*words, **how):
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, **how)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run(sys.executable, "-m", "venv", "old")
    python = tmp_path / "old" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints-min.txt", f"{ROOT}[lab,serve]")
    plain = {"PATH": str(python.parent), "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    llmpar = lambda *words: run(python, "-m", "llmpar", *words, env=plain)
    assert f"jax {OLDEST['jax']}, " in llmpar("doctor")
    assert "all-gather" in llmpar("inspect", "--mesh", "fsdp=2 tp=2", "--seq-len", "32")
    llmpar("train", "--mesh", "dp=2 tp=2", "--steps", "2", "--seq-len", "32", "--checkpoints", "kept")
    assert llmpar("generate", "--checkpoints", "kept", "--tokens", "4", "--mesh", "tp=2")
    see = "from llmpar import MeshExplorer; print(len(MeshExplorer(mesh='fsdp=2 tp=2')._repr_mimebundle_()))"
    assert run(python, "-c", see, env=plain)


@pytest.mark.parametrize("installed, said", CASES["jax_versions"])
def test_doctor_compares_versions_with_the_declared_bounds(monkeypatch, installed, said):
    """And names nothing of an extra that nobody asked for."""
    needs = ["jax<0.13,>=0.10.2", "pytest<1; extra == 'dev'", "matplotlib>=3.8.4; extra == 'lab'", "gone>=1"]
    version = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    here = lambda name: installed if name == "jax" else version(name)
    monkeypatch.setattr("importlib.metadata.version", here)
    assert doctor.misfits() == [said] * bool(said)


def test_doctor_refuses_a_flax_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax.nnx", None)
    said = r"^flax.nnx cannot be imported \(ModuleNotFoundError: .*\); if versions are the reason, python -m"
    with pytest.raises(ValueError, match=said):
        doctor.Doctor(json=True).run()


QUESTIONS = {"rules": ["ruff", "check", "."], "format": ["ruff", "format", "--check", "."], "types": ["mypy"]}


@pytest.mark.long
@pytest.mark.parametrize("words", QUESTIONS.values(), ids=QUESTIONS)
def test_what_make_lint_asks(words):
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
