"""Pack Python for the browser into the one file that a saved page takes along.

    python .ci/runtime.py node_modules/pyodide llmpar/explore/static/python.json

Pyodide is CPython compiled to WebAssembly. Each part is gzip'd and written in letters. Of the standard
library, what talks to a network, to a terminal, to a database or to other processes stays behind, and what
nobody runs in a page.
"""

import base64
import gzip
import io
import json
import sys
import zipfile
from pathlib import Path

PARTS = {"start": "pyodide.mjs", "glue": "pyodide.asm.mjs", "machine": "pyodide.asm.wasm"}
WITHOUT = """
    _pyrepl antigravity bdb cProfile cmd code compileall configparser ctypes curses doctest email ftplib
    http imaplib mailbox modulefinder multiprocessing netrc nturl2path optparse pdb pickletools plistlib
    poplib profile pstats pty pyclbr pydoc smtplib socketserver sqlite3 tabnanny this trace turtle unittest
    uuid wave webbrowser wsgiref xml xmlrpc zipapp
""".split()
ENCODINGS = "__init__ aliases ascii cp437 idna latin_1 unicode_escape utf_16 utf_32 utf_8 utf_8_sig".split()


def kept(name: str) -> bool:
    """Tell whether a file of the standard library goes along."""
    first, _, rest = name.partition("/")
    known = rest.removesuffix(".py") in ENCODINGS
    return known if first == "encodings" else first.removesuffix(".py") not in WITHOUT


def library(path: Path) -> bytes:
    """The standard library as a zip without compression: the whole is compressed, and better."""
    made = io.BytesIO()
    with zipfile.ZipFile(path) as given, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as small:
        for name in filter(kept, given.namelist()):
            small.writestr(zipfile.ZipInfo(name), given.read(name))
    return made.getvalue()


def main(folder: Path, out: Path) -> None:
    """Write the file, and say how large its parts are."""
    parts = {name: (folder / file).read_bytes() for name, file in PARTS.items()}
    parts["library"] = library(folder / "python_stdlib.zip")
    about = json.loads((folder / "pyodide-lock.json").read_text())["info"]
    parts["lock"] = json.dumps({"info": about, "packages": {}}).encode()
    made = {name: base64.b64encode(gzip.compress(data, 9, mtime=0)).decode() for name, data in parts.items()}
    licence = (Path(__file__).parent.parent / "LICENSE-RUNTIME").read_text()
    out.write_text(json.dumps({"licence": licence} | made))
    sizes = ", ".join(f"{name} {len(text) / 1e6:.2f}" for name, text in made.items())
    print(f"{out}: Python {about['python']} in {out.stat().st_size / 1e6:.2f} MB ({sizes})")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
