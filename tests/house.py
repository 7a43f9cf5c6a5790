"""Measure statements, not lines, of each folder against its budget: python tests/house.py [PATH]."""

import ast
import functools
import pathlib
import sys
from collections import Counter, defaultdict

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMPACT = "plan parallel kernels model pipeline training".split()
"""The package of the card, in the order of its imports: it is read in an afternoon."""
BESIDE = set(
    "training.hugging_face training.quantized training.trackers training.chat training.folder_lock "
    "training.text_files training.apart training.tokenizers plan.config_json plan.families plan.running "
    "plan.presets plan.serving plan.timetable plan.torch_orders parallel.devices".split()
)
"""Files of these folders that no strategy needs: formats and services of others, names of models, serving."""
BUDGETS = {
    "plan": 2_690,
    "parallel": 1_051,
    "kernels": 530,
    "model": 1_185,
    "pipeline": 318,
    "training": 2_497,
    "predict": 2_821,
    "planner": 2_077,
    "draw": 2_797,
    "inspect": 4_258,
    "explore": 1_665,
    "serve": 934,
    "launch": 1_219,
    "lessons": 1_709,
    "cli": 2_302,
    "top": 146,
}
"""Statements that a folder may have, with some air; they are meant to be lowered."""
LIMITS = {
    "statements of the compact package": 6_294,
    "statements": 28_199,
    "functions over 45 statements": 0,
    "characters of a mean line": 48,
    "public names with two homes": 18,
    "files at the top": 3,
    "files with a banned name": 0,
}
BANNED = set("told said asked held here there how way turn walk meet room mine some found".split())
"""No names: each meant many things here, and a reader could not know which."""


@functools.cache
def parse(root: pathlib.Path) -> dict[str, ast.Module]:
    """Parse every file of the package by its name: ``"plan.layout"``, ``"draw"`` for a folder's own file."""
    package, trees = root / "llmpar", {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        trees[name] = ast.parse(path.read_text(), str(path))
    return trees


def folder_of(name: str) -> str:
    folder = name.split(".")[0]
    return folder if folder in BUDGETS else "top"


def statements(node: ast.AST) -> int:
    """Count the statements of a file or of a function, inner ones included."""
    return sum(isinstance(child, ast.stmt) for child in ast.walk(node))


def by_folder(trees: dict[str, ast.Module]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, tree in trees.items():
        counts[folder_of(name)] += statements(tree)
    return counts


def large_functions(trees: dict[str, ast.Module], limit: int = 45) -> list[str]:
    """List functions with more statements than the limit, as ``file.name (count)``."""
    large = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and statements(node) - 1 > limit:
                large.append(f"{name}.{node.name} ({statements(node) - 1})")
    return large


def public_names(tree: ast.Module) -> set[str]:
    """List the names that a file defines at its top level without an underscore."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        names |= {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def two_homes(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    homes = defaultdict(list)
    for file, tree in trees.items():
        for name in public_names(tree):
            homes[name].append(file)
    return {name: files for name, files in sorted(homes.items()) if len(files) > 1}


def names_in(tree: ast.AST) -> set[str]:
    """List the names that a file gives: to variables, parameters, fields, functions and classes."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
            ):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
    return names


def banned_names(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    used = {file: sorted(names_in(tree) & BANNED) for file, tree in trees.items()}
    return {file: names for file, names in used.items() if names}


def mean_line(root: pathlib.Path) -> float:
    """Return the characters of a mean line, without its indentation; empty lines do not count."""
    texts = [path.read_text() for path in (root / "llmpar").rglob("*.py")]
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return sum(map(len, lines)) / len(lines)


def measure(root: pathlib.Path = ROOT) -> dict[str, float]:
    trees = parse(root)
    compact = [tree for name, tree in trees.items() if folder_of(name) in COMPACT and name not in BESIDE]
    return {
        "statements of the compact package": sum(map(statements, compact)),
        "statements": sum(map(statements, trees.values())),
        "functions over 45 statements": len(large_functions(trees)),
        "characters of a mean line": mean_line(root),
        "public names with two homes": len(two_homes(trees)),
        "files at the top": len(list((root / "llmpar").glob("*.py"))),
        "files with a banned name": len(banned_names(trees)),
    }


def report(root: pathlib.Path = ROOT) -> str:
    trees = parse(root)
    counts = by_folder(trees)
    cells = [f"{folder} {counts[folder]:,} of {budget:,}" for folder, budget in BUDGETS.items()]
    lines = ["statements: " + ", ".join(cells[:8]), "            " + ", ".join(cells[8:])]
    lines += [f"{what}: {value:,.0f} of {LIMITS[what]:,}" for what, value in measure(root).items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(pathlib.Path(*sys.argv[1:]) if sys.argv[1:] else ROOT))
