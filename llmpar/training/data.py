"""Text to batches, in plain numpy: documents, tokenizers, packed rows.

The step's number alone decides the batch. There is no iterator to save, so a run that resumes at step k, on
whatever mesh, reads what the uninterrupted run would have read, and each process of a cluster makes only its
own rows.
"""

import codecs
import contextlib
import functools
import glob
import hashlib
import itertools
import json
import os
import pathlib
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, SupportsInt

import numpy as np
from jaxtyping import Int32

from llmpar.files import Allowed, check_fields, check_ordinary
from llmpar.training.apart import open_chat
from llmpar.training.chat import Chat, check_messages
from llmpar.training.token_files import FileTokenizer

_Batch = dict[str, Int32[np.ndarray, "b s"]]

MEMORY_PER_BYTE = 12  # measured: the text, its tokens, and what is in between
DOCUMENT_S = (
    60.0  # processor time that a chat template and a tokenizer may take for one conversation
)
LIBRARY_LIMIT_BYTES = 4 << 20  # about 250 files: read and encoded in well under a second
# Left out: packages of others, tests, tables that are no prose (code pages, an index of help texts), local
# settings.
SKIPPED_FOLDERS = (
    "site-packages dist-packages test tests idlelib idle_test encodings pydoc_data".split()
)
SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
ANSWERS = ("answer", "completion", "response")  # what the answer to a line's prompt may be called


@dataclass(frozen=True)
class DataConfig:
    """What text to read and how to cut it.

    Attributes:
        data: files or globs (``**`` recurses) of text, or of JSONL (.jsonl, .ndjson): a line is a text,
            ``{"text": …}``, or a conversation of whose tokens the answers alone count, ``{"prompt": …,
            "answer": …}`` (or completion, response) or ``{"messages": [{"role": …, "content": …}, …]}``;
            other keys are ignored. Empty: the licence and source files of the running Python's standard
            library.
        tokenizer: ``bytes``, or the path of a Hugging Face ``tokenizer.json``.
        start_token: the token of ``tokenizer.json`` that begins a document. None: what it puts first, or a
            usual name.
        limit_bytes: stop reading after so much text. None: read all of ``data``, or 4 MiB of the standard
            library.
        seq_len: tokens per row.
        batch_size: rows per step, over all devices.
        seed: decides the order of documents and rows.
        held_out: the last 1 of so many parts is kept out of training, whatever the seed; 0 keeps nothing out.
            Where there are conversations, no document is cut by it.
    """

    data: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    start_token: str | None = None
    limit_bytes: int | None = None
    seq_len: int = 256
    batch_size: int = 16
    seed: Annotated[int, Allowed(int, 0)] = 0
    held_out: Annotated[int, Allowed(int, 0)] = 20

    def __post_init__(self):
        check_fields(self)
        if self.held_out == 1:
            raise ValueError(
                "held_out 1 leaves nothing to train on; use 2 or more (the last 1 of so many parts), or 0"
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
            decoder = codecs.getincrementaldecoder(
                "utf-8"
            )()  # does not mind a last character that is cut
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
                RecursionError: "nested too deeply",
            }
            why = own.get(
                type(error), f"{type(error).__name__}: {error}".removeprefix("ValueError: ")
            )
            raise ValueError(
                f'{where}, is no document ({why}); each line must look like {{"text": "…"}},'
                ' {"prompt": "…", "answer": "…"} or {"messages": […]}'
            ) from None


class ByteTokenizer:
    """The 256 bytes of UTF-8, and a document-start token. Nothing is learned, nothing is downloaded."""

    name, vocab_size, start_id, end_ids, longest = "bytes", 257, 256, frozenset([256]), 1
    identity = {"name": "bytes", "fingerprint": "bytes"}

    def encode(self, text: str) -> Int32[np.ndarray, " s"]:
        """Return the bytes of a text, without the document-start token."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        """Encode several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text of token ids, without start tokens; broken UTF-8 and ids beyond 256 become
        U+FFFD."""
        kept = [number for number in map(int, ids) if number != self.start_id]
        raw = bytes(i if 0 <= i < 256 else 0xFF for i in kept)  # UTF-8 never has a 0xff
        return raw.decode(errors="replace")


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(name: str = "bytes", start_token: str | None = None) -> Tokenizer:
    """Open the tokenizer ``bytes``, or a Hugging Face ``tokenizer.json`` by its path."""
    if name != "bytes":
        return FileTokenizer(name, start_token)
    if start_token is not None:
        raise ValueError(
            f"start_token '{start_token}' is for a tokenizer.json: bytes have their own; leave it out"
        )
    return ByteTokenizer()


def tokenizer_of(made: dict | None, requested: str | None) -> Tokenizer:
    """Return the tokenizer of the run that ``made`` describes (`train.made_of`), if it does; refuse
    another."""
    kept = (made or {}).get("tokenizer")
    if kept is None:
        return open_tokenizer(requested or "bytes")
    tokenizer = open_tokenizer(requested or kept["name"], kept.get("start_token"))
    if tokenizer.identity["fingerprint"] != kept["fingerprint"]:
        raise ValueError(
            f"the checkpoint was trained with tokenizer '{kept['name']}', and '{tokenizer.name}' is another;"
            " give the file that it was trained with"
        )
    return tokenizer


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer with ids that a model of ``vocab_size`` embeddings lacks; fewer are fine."""
    if (size := tokenizer.vocab_size) > vocab_size:
        raise ValueError(
            f"tokenizer '{tokenizer.name}' has {size} tokens but the model's vocabulary has {vocab_size};"
            f" use a model with {size} or more, or a smaller tokenizer ('bytes' has 257)"
        )


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents end to end: document i begins at ``offsets[i]``, with its start token."""

    tokens: np.ndarray
    offsets: np.ndarray
    tokenizer: Tokenizer
    source: str
    counted: np.ndarray | None = None
    """Which tokens are to be learned, where there are conversations; None: all."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with any token, boundary, or token that counts."""
        parts = [self.tokens.astype("<i4"), self.offsets.astype("<i8")]
        parts += [] if self.counted is None else [self.counted]
        return hashlib.sha256(b"".join(x.tobytes() for x in parts)).hexdigest()[:16]


def host_bytes() -> int:
    """Return the memory of this machine, or of the container that this runs in; 0 where it is not known."""
    sizes = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(ValueError, OSError):
        sizes.append(int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes, default=0)


def read_corpus(config: DataConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read and tokenise; ``source`` says what was read and whether a limit stopped it. Empty documents are
    dropped.

    Documents are put in one fixed random order: what is held out is then like the rest, and the same for
    every seed.
    """
    tokenizer = tokenizer or open_tokenizer(config.tokenizer, config.start_token)
    texts, source = _read_texts(config)
    order = _shuffled(len(texts), np.random.PCG64(0))
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
    talks = sum(isinstance(text, Conversation) for text in texts)
    chat: Any = open_chat(tokenizer, DOCUMENT_S) if talks else None
    pieces, counts, partly = [], [], 0
    for first in range(0, len(order), 1024):
        part = [texts[i] for i in order[first : first + 1024]]
        plain = iter(tokenizer.encode_all([text for text in part if isinstance(text, str)]))
        for text in part:
            if isinstance(text, str):
                ids = np.concatenate([[tokenizer.start_id], next(plain)])
                counted = np.ones(len(ids) if talks else 0, bool)
            else:
                ids, counted = text.tokens(chat)
                answers = sum(message["role"] == "assistant" for message in text.messages)
                partly += int((counted[1:] & ~counted[:-1]).sum()) < answers
            pieces.append(ids.astype(dtype))
            counts.append(counted)
    lengths = [len(ids) for ids in pieces]
    if talks:
        source += f"; {talks} conversations: {sum(x.sum() for x in counts)} of {sum(lengths)} tokens count"
        source += (
            f", of {partly} not all answers, as the template writes earlier ones anew"
            if partly
            else ""
        )
        long = sum(n > config.seq_len for n in lengths)
        source += f", {long} documents are longer than a row of {config.seq_len}" if long else ""
    offsets, mask = np.cumsum([0, *lengths]), np.concatenate(counts) if talks else None
    return Corpus(np.concatenate(pieces), offsets, tokenizer, source, mask)


def _read_texts(config: DataConfig) -> tuple[list[str | Conversation], str]:
    """Read the documents up to the limit, and say what was read."""
    files = find_files(config.data) if config.data else library_files()
    source = " ".join(config.data) or f"the standard library of Python {platform.python_version()}"
    if not config.data and not any(f.endswith(".py") for f in files):
        source += ", which comes without its sources here,"
    limit = config.limit_bytes or (1 << 62 if config.data else LIBRARY_LIMIT_BYTES)
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


def _check_memory(source: str, num_bytes: int) -> None:
    """Refuse a text that needs more memory than there is."""
    memory, need = host_bytes(), MEMORY_PER_BYTE * num_bytes
    if 0 < memory < need:
        raise ValueError(
            f"{source} would take {need / 2**30:,.1f} GiB of memory ({MEMORY_PER_BYTE} bytes a byte of text;"
            f" nothing is streamed), and this machine has {memory / 2**30:,.1f} GiB; use --limit-bytes"
            f" {memory // MEMORY_PER_BYTE}, or less data"
        )


def _shuffled(n: int, bits: np.random.PCG64) -> np.ndarray:
    # numpy keeps a bit generator's raw numbers for ever, but not Generator.permutation's results (NEP 19)
    return np.argsort(bits.random_raw(n), kind="stable")


class Batches:
    """Batches as a function of the step. Nothing in it changes (an epoch's order is remembered, never
    needed).

    Every epoch lays the documents end to end in a new order, cuts rows of ``seq_len + 1`` that overlap by one
    token, and shuffles the rows. So each token is an input once per epoch, and a target once unless it begins
    a document; the tail, shorter than a row, is left out. Batches straddle epochs. The held-out part is never
    shuffled; a document may be cut in two by the split, but in a corpus with conversations.

    ``order`` says which position each place of a row holds, ``b s``, from the rows' segments, ``b s``
    (:func:`llmpar.training.balance.row_orders`); None: its own. Targets are formed before it is applied, so a
    step permutes nothing.
    """

    def __init__(
        self,
        corpus: Corpus,
        config: DataConfig,
        part: Literal["train", "held_out"] = "train",
        order: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        self.order = order
        self.corpus, self.config, self.part = corpus, config, part
        total, s = len(corpus.tokens), config.seq_len
        cut = total - (total // config.held_out if config.held_out else 0)
        if corpus.counted is not None and cut < total and len(corpus.offsets) > 2:
            cut = min(corpus.offsets[1:-1], key=lambda offset: abs(int(offset) - cut))
        begin, end = (0, cut) if part == "train" else (cut, total)
        inner = corpus.offsets[(begin < corpus.offsets) & (corpus.offsets < end)]
        self._bounds = np.concatenate([[begin], inner, [end]])
        self.num_rows = (end - begin - 1) // s  # per epoch
        what = f"the {part} part (held_out {config.held_out}) of {corpus.source}"
        if self.num_rows < 1:
            raise ValueError(
                f"seq_len {s} needs {s + 1} tokens, but {what} has {end - begin} of {total}; use a shorter"
                " seq_len, more data, or another held_out (--held-out 0 keeps nothing out)"
            )
        if corpus.counted is not None and not corpus.counted[begin:end].any():
            raise ValueError(f"{what} has no answer; give more data, or another held_out")
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffle)

    def batch(self, step: int) -> _Batch:
        """Return all rows of a step: tokens, targets (-1 where the next token is another document's or does
        not count), positions in the row, segments (documents, from 1 in each row)."""
        return self.local_batch(step, slice(None))

    def local_batch(self, step: int, rows: slice | Sequence[int] | np.ndarray) -> _Batch:
        """Return some of the rows of a step, numbered from 0, without making the others."""
        if step < 0:
            raise ValueError(f"step {step} has no batch; steps count from 0")
        size, s = self.config.batch_size, self.config.seq_len
        epochs, picks = np.divmod(step * size + np.arange(size)[rows], self.num_rows)
        tokens, documents = np.empty((2, len(picks), s + 1), np.int32)
        counted = np.ones(tokens.shape, bool)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            row_order, starts, shifts = self._epoch(int(epoch))
            places = row_order[picks[in_epoch], None] * s + np.arange(s + 1)
            documents[in_epoch] = numbers = np.searchsorted(starts, places, side="right") - 1
            tokens[in_epoch] = self.corpus.tokens[places + shifts[numbers]]
            if self.corpus.counted is not None:
                counted[in_epoch] = self.corpus.counted[places + shifts[numbers]]
        targets = counted[:, 1:] & (documents[:, 1:] == documents[:, :-1])
        batch = {
            "tokens": tokens[:, :-1],
            "targets": np.where(targets, tokens[:, 1:], np.int32(-1)),
            "positions": np.tile(np.arange(s, dtype=np.int32), (len(picks), 1)),
            "segments": documents[:, :-1] - documents[:, :1] + 1,
        }
        if self.order is None:
            return batch
        places = self.order(batch["segments"])
        if not np.array_equal(np.sort(places), batch["positions"]):
            raise ValueError(
                f"order {str(places):.60} is in each row no permutation of 0 to {s - 1}"
            )
        return {name: np.take_along_axis(x, places, 1) for name, x in batch.items()}

    def _shuffle(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the epoch's order of rows; and of its documents where each starts and how far its tokens
        are."""
        lengths = np.diff(self._bounds)
        documents, rows = np.arange(len(lengths)), np.arange(self.num_rows)
        if self.part == "train":
            bits = np.random.PCG64(np.random.SeedSequence((self.config.seed, epoch)))
            documents, rows = _shuffled(len(documents), bits), _shuffled(len(rows), bits)
        starts = np.cumsum(lengths[documents]) - lengths[documents]
        return rows, starts, self._bounds[documents] - starts
