"""Tokenizers: bytes, or the ``tokenizer.json`` of a Hugging Face model and what the files beside it say."""

import functools
import hashlib
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, SupportsInt

import numpy as np
from jaxtyping import Int32

from llmpar.files import check_ordinary, read_json
from llmpar.training.chat import calling


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``, or the folder of one. Text is data: no template is applied, and a
    special token spelled out in a text is encoded as plain text, so that no document can forge the beginning
    of another.
    """

    USUAL_STARTS = (
        "<|begin_of_text|>",
        "<|endoftext|>",
        "<s>",
        "<bos>",
        "[BOS]",
        "<|startoftext|>",
    )

    def __init__(self, path: str, start_token: str | None = None):
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(
                f"tokenizer '{path}' needs the package tokenizers, which is not installed; install the extra"
                " llmpar[hf], or use the tokenizer 'bytes'"
            ) from error
        self.file = file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        check_ordinary(file, "tokenizer")
        with calling(f"cannot read tokenizer '{file}'", "give 'bytes' or a tokenizer.json"):
            self.hub = tokenizers.Tokenizer.from_file(file)
        self.hub.no_truncation()
        self.hub.no_padding()
        vocab = self.hub.get_vocab(with_added_tokens=True)
        names = (start_token,) if start_token else self.USUAL_STARTS
        with calling(f"tokenizer '{file}' cannot encode the text"):
            starts = [] if start_token else self.hub.encode("").ids[:1]
        starts += [vocab[name] for name in names if name in vocab]
        if not starts:
            raise ValueError(
                f"tokenizer '{file}' lacks {', '.join(names)}; name a token it has as start_token"
                " (--start-token)"
            )
        self.hub.encode_special_tokens = True
        self.name, self.start_id = path, starts[0]
        self.vocab_size = max(vocab.values()) + 1  # ids may have gaps
        self.longest = max(map(len, vocab))  # letters, or bytes, that one token stands for at most
        content = pathlib.Path(file).read_bytes() + b"%d" % self.start_id
        digest = hashlib.sha256(content).hexdigest()[:16]
        self.identity = {
            "name": os.path.abspath(file),
            "fingerprint": digest,
            "start_token": start_token,
        }

    def beside(self, name: str) -> pathlib.Path:
        """Return a file in the same folder."""
        return pathlib.Path(self.file).with_name(name)

    def about(self, name: str) -> dict[str, Any]:
        """Read a JSON file in the same folder; empty where there is none."""
        file = self.beside(name)
        return read_json(file, "configuration") if file.is_file() else {}

    @functools.cached_property
    def special(self) -> dict[str, str]:
        """The texts of special tokens by name, ``bos_token`` say, as the files beside it name them."""
        named = self.about("special_tokens_map.json") | self.about("tokenizer_config.json")
        texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
        return {k: v for k, v in texts.items() if k.endswith("_token") and isinstance(v, str)}

    @functools.cached_property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer: all that the files beside it name; else the document's start."""
        kept = [
            self.about(name).get("eos_token_id")
            for name in ("generation_config.json", "config.json")
        ]
        numbers = [i for ids in kept for i in (ids if isinstance(ids, list) else [ids])]
        numbers.append(self.hub.token_to_id(self.special.get("eos_token", "")))
        known = (i for i in numbers if type(i) is int and 0 <= i < self.vocab_size)
        return frozenset(known) or frozenset([self.start_id])

    def encode_all(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        """Return the token ids of each text, without the document-start token; on all cores."""
        # it may have no token for what is unknown, say
        with calling(f"tokenizer '{self.name}' cannot encode the text"):
            encodings = self.hub.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, np.int32) for e in encodings]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text of token ids, without special tokens."""
        with calling(f"tokenizer '{self.name}' cannot decode its tokens"):
            return self.hub.decode([int(i) for i in ids], skip_special_tokens=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.hub.encode_special_tokens = True  # its package forgets it


class ByteTokenizer:
    """The 256 bytes of UTF-8, and a document-start token. Nothing is learned, nothing is downloaded."""

    name, vocab_size, start_id, end_ids, longest = "bytes", 257, 256, frozenset([256]), 1
    identity = {"name": "bytes", "fingerprint": "bytes"}

    def encode_all(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        """Return the bytes of each text, without the document-start token."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

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
    """Return the tokenizer of the run that ``made`` describes (`loop.made_of`), if it does; refuse
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
