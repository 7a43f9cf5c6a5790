"""Documents in files of text and of JSONL, and in the sources of Python's standard library."""

import codecs
import contextlib
import glob
import itertools
import json
import os
import pathlib
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from llmpar.files import check_ordinary
from llmpar.training.chat import Chat, check_messages

MEMORY_PER_BYTE = 12  # measured: the text, its tokens, and what is in between
LIBRARY_LIMIT_BYTES = 4 << 20  # about 250 files: read and encoded in well under a second
# Left out: packages of others, tests, tables that are no prose (code pages, an index of help texts), local
# settings.
SKIPPED_FOLDERS = (
    "site-packages dist-packages test tests idlelib idle_test encodings pydoc_data".split()
)
SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
ANSWERS = ("answer", "completion", "response")  # what the answer to a line's prompt may be called


class Conversation(NamedTuple):
    """Messages with at least one answer, and the line that they are from."""

    messages: list[dict[str, str]]
    where: str

    def tokens(self, chat: Chat) -> tuple[np.ndarray, np.ndarray]:
        """Return its ids, and which of them count."""
        try:
            ids, counted = chat.tokens(self.messages, ask=False)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error
        if not counted.any():
            raise ValueError(
                f"{self.where}: the chat template writes none of its answers as they would be asked for;"
                " leave the line out, or mend the template"
            )
        return ids, counted


def read_texts(
    data: Sequence[str], limit_bytes: int | None
) -> tuple[list[str | Conversation], str]:
    """Read documents of files, or of the standard library, up to the limit, and say what was read."""
    files = find_files(data) if data else library_files()
    source = " ".join(data) or f"the standard library of Python {platform.python_version()}"
    if not data and not any(f.endswith(".py") for f in files):
        source += ", which comes without its sources here,"
    limit = limit_bytes or (1 << 62 if data else LIBRARY_LIMIT_BYTES)
    _check_memory(source, min(limit, sum(os.path.getsize(f) for f in files if os.path.exists(f))))
    texts: list[str | Conversation] = []
    size = num_read = 0
    for text in itertools.chain.from_iterable(read_documents(file, limit - size) for file in files):
        num_read += 1
        if isinstance(text, Conversation):
            size += sum(len(message["content"].encode()) for message in text.messages)
            if size <= limit:
                texts.append(text)
        else:
            raw = text.encode()[: limit - size]
            size += len(raw)
            # the limit may fall inside a character
            texts += filter(None, [raw.decode(errors="ignore")])
        if size >= limit:
            break
    if not texts:
        raise ValueError(
            f"{source} has no text: {len(files)} files, {num_read} empty documents; give other --data"
        )
    limited = f", up to limit_bytes {limit}" if size >= limit else ""
    return (
        texts,
        f"{source} ({len(files)} files; {len(texts)} documents, {size} bytes read{limited})",
    )


def find_files(patterns: Sequence[str]) -> list[str]:
    """Return the files that paths and globs name: patterns as given, the files of each sorted, none twice."""
    paths: dict[str, None] = {}
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        if os.path.isdir(path):
            raise ValueError(
                f"data '{pattern}' is a folder; name its files: '{os.path.join(pattern, '**', '*.txt')}'"
            )
        matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
        matches = [f for f in matches if not os.path.isdir(f)]
        for file in filter(os.path.exists, matches):
            check_ordinary(file, "data file")
        if not matches:
            raise ValueError(
                f"data '{pattern}', seen from the folder '{os.getcwd()}', matches no file; give a file or a"
                " glob such as 'texts/**/*.txt'"
            )
        paths |= dict.fromkeys(matches)
    return list(paths)


def library_files(root: str = "") -> list[str]:
    """Return the licence, where one is installed, then the sorted sources of this Python's standard
    library."""
    root = root or sysconfig.get_paths()["stdlib"]
    sources = []
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in SKIPPED_FOLDERS]
        files = [f for f in files if f.endswith(".py") and not f.startswith(SKIPPED_FILES)]
        sources += [os.path.join(folder, f) for f in files]
    licences = [
        os.path.join(d, f)
        for d in (root, os.path.dirname(root))
        for f in ("LICENSE.txt", "LICENSE")
    ]
    return [f for f in licences if os.path.isfile(f)][:1] + sorted(sources)


def _document(line: str, where: str) -> str | Conversation:
    """Parse a line of JSONL."""
    row = json.loads(line)
    answers = [name for name in ANSWERS if name in row and "prompt" in row]
    forms = [name for name in ("text", "messages") if name in row] + answers
    if len(forms) > 1:
        raise ValueError(f"it has {' and '.join(forms)}: leave all but one out")
    if not answers and "messages" not in row:
        row["text"].encode()  # fails for what is no string, and for half of a surrogate pair
        return row["text"]
    pairs = (
        zip(("user", "assistant"), (row["prompt"], row[answers[0]]), strict=True) if answers else ()
    )
    messages = check_messages([dict(role=r, content=c) for r, c in pairs] or row["messages"])
    contents = [
        message["content"].strip() for message in messages if message["role"] == "assistant"
    ]
    if not all(contents) or not contents:
        raise ValueError(f"it has {'an empty answer' if contents else 'no answer'}: leave it out")
    return Conversation(messages, where)


def read_documents(file: str, limit_bytes: int) -> Iterator[str | Conversation]:
    """Return the documents of one file: a text, read little farther than ``limit_bytes``, or a JSONL's
    lines."""
    lines = file.endswith((".jsonl", ".ndjson"))
    try:
        with open(file, "rb") as opened:
            raw = opened.read(-1 if lines else min(limit_bytes + 4, os.path.getsize(file)))
            # does not mind a last character that is cut
            decoder = codecs.getincrementaldecoder("utf-8")()
            text = decoder.decode(raw, final=not opened.read(1)).removeprefix("\ufeff")
    except OSError as error:
        raise ValueError(
            f"cannot read data file '{file}': {error.strerror}; check its path and permissions"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data file '{file}' is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset"
            f" {error.start}; unpack it if it is compressed, convert it if it is in another encoding"
        ) from None
    if not lines:
        yield text
        return
    # not splitlines: JSON strings may hold U+2028
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"data file '{file}', line {number}"
        try:
            yield _document(line, where)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            own = {
                UnicodeEncodeError: "half of a surrogate pair",
                AttributeError: "its text is no string",
                KeyError: "it has neither text nor messages, nor a prompt with its answer",
                RecursionError: "nested too deeply",
            }
            why = own.get(
                type(error), f"{type(error).__name__}: {error}".removeprefix("ValueError: ")
            )
            raise ValueError(
                f'{where}, is no document ({why}); each line must look like {{"text": "…"}},'
                ' {"prompt": "…", "answer": "…"} or {"messages": […]}'
            ) from None


def host_bytes() -> int:
    """Return the memory of this machine, or of the container that this runs in; 0 where it is not known."""
    sizes = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(ValueError, OSError):
        sizes.append(int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes, default=0)


def _check_memory(source: str, num_bytes: int) -> None:
    """Refuse a text that needs more memory than there is."""
    memory, need = host_bytes(), MEMORY_PER_BYTE * num_bytes
    if 0 < memory < need:
        raise ValueError(
            f"{source} would take {need / 2**30:,.1f} GiB of memory ({MEMORY_PER_BYTE} bytes a byte of text;"
            f" nothing is streamed), and this machine has {memory / 2**30:,.1f} GiB; use --limit-bytes"
            f" {memory // MEMORY_PER_BYTE}, or less data"
        )
