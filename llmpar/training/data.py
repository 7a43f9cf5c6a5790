"""Text to batches, in plain numpy: documents as tokens, packed rows.

The step's number alone decides the batch. There is no iterator to save, so a run that resumes at step k, on
whatever mesh, reads what the uninterrupted run would have read, and each process of a cluster makes only its
own rows.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Int32

from llmpar.files import Allowed, check_fields
from llmpar.training.apart import open_chat
from llmpar.training.text_files import Conversation, read_texts
from llmpar.training.tokenizers import Tokenizer, open_tokenizer

# processor time that a chat template and a tokenizer may take for one conversation
DOCUMENT_S = 60.0


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


def read_corpus(config: DataConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read and tokenise; ``source`` says what was read and whether a limit stopped it. Empty documents are
    dropped.

    Documents are put in one fixed random order: what is held out is then like the rest, and the same for
    every seed.
    """
    tokenizer = tokenizer or open_tokenizer(config.tokenizer, config.start_token)
    texts, source = read_texts(config.data, config.limit_bytes)
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

    def batch(
        self, step: int, rows: slice | Sequence[int] | np.ndarray = slice(None)
    ) -> dict[str, Int32[np.ndarray, "b s"]]:
        """Return a step's rows, or some of them without making the others: tokens, targets (-1 where the next
        token is another document's or does not count), positions in the row, segments (documents, from 1 in
        each row)."""
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
