"""Conversations to tokens, the same for training and for serving: what is asked is what was trained."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from llmpar.files import read_text

Message = Mapping[str, Any]
ROLES = ("system", "user", "assistant")


class Chat:
    """How a model writes conversations, ``[{"role": …, "content": …}, …]``.

    With a chat template beside its ``tokenizer.json`` (``chat_template.jinja``, or in
    ``tokenizer_config.json``) they are rendered as `transformers` renders them, in Jinja's sandbox; today's
    date alone is not given, so that a run that resumes reads what it read. Otherwise they are plain: the
    start token, then for each message its role, a line break, its content, and the end token. A special
    token that a message spells out stays text.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        special: dict[int, str] = {}
        self._template: Any = None
        if hasattr(tokenizer, "hub") and (text := _template_of(tokenizer)):
            import tokenizers

            self._template = _compiled(text, tokenizer.name)
            self._hub = tokenizers.Tokenizer.from_str(tokenizer.hub.to_str())  # knows special tokens in text
            added = tokenizer.hub.get_added_tokens_decoder()
            special = {number: token.content for number, token in added.items() if token.special}
            texts = sorted(filter(None, special.values()), key=len, reverse=True)
            self._spelled = "|".join(map(re.escape, texts)) or "(?!)"
        self._ends = tokenizer.end_ids | special.keys()

    @functools.cached_property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer: the tokenizer's, and what the template writes behind one."""
        ids, answer = self.tokens([{"role": role, "content": "x"} for role in ROLES[1:]], ask=False)
        return self.tokenizer.end_ids | {*ids[answer][-1:].tolist()} & self._ends

    def tokens(
        self, messages: Sequence[Any], ask: bool = True
    ) -> tuple[Int32[np.ndarray, " s"], Bool[np.ndarray, " s"]]:
        """The ids of a conversation, and which of them are an answer: what the assistant says and the token
        that ends it.

        ``ask``: an answer is to come, and its beginning follows. An answer does not count that the template
        writes otherwise than it would be asked for: of a conversation whose earlier answers it writes anew,
        without their thoughts say, only the last one does.
        """
        messages = check_messages(messages)
        write: Any = self._plain
        encode: Any = list
        seams: list[int] = []
        if self._template is not None:
            content = "".join(message["content"] for message in messages)
            mark = next(x for x in map(chr, range(0xF0000, 0x10FFFF)) if x not in content)  # private use
            marked = lambda x: x | {"content": re.sub(self._spelled, f"{mark}\\g<0>{mark}", x["content"])}
            messages, write = [*map(marked, messages)], self._render
            cut = lambda text: itertools.pairwise([0, *seams, len(text)])
            encode = lambda text: [i for a, b in cut(text) for i in self._encode(text[a:b], mark)]
        whole, answers = write(messages, ask), []
        for i, message in enumerate(messages, 1):
            if message["role"] == "assistant":
                asked, told = write(messages[: i - 1], True), write(messages[:i], False)
                if whole[: len(asked)] == asked and whole[: len(told)] == told:
                    answers.append((asked, told))
                    if (ids := encode(asked)) != encode(whole)[: len(ids)]:
                        seams.append(len(asked))  # a token would reach from what is asked into the answer
        ids = encode(whole)
        is_answer = np.zeros(len(ids), bool)
        for asked, told in answers:
            begin, end = len(encode(asked)), _common(encode(told), ids)
            ends = [n + 1 for n in range(begin, end) if ids[n] in self._ends]  # not a line break behind it
            is_answer[begin : max(ends, default=end)] = True
        return np.array(ids, np.int32), is_answer

    def _plain(self, messages: Sequence[Message], ask: bool) -> list[int]:
        encode, end = self.tokenizer.encode, min(self.tokenizer.end_ids)
        ids = [self.tokenizer.start_id]
        for message in messages:
            for text in (f"{message['role']}\n", message["content"]):
                ids += encode(text).tolist()
            ids.append(end)
        return ids + encode("assistant\n").tolist() * ask

    def _render(self, messages: Sequence[Message], ask: bool) -> str:
        given = dict(self.tokenizer.special, messages=messages, add_generation_prompt=ask)
        try:
            return self._template.render(given)
        except Exception as error:  # a template may do anything
            what = f"the chat template of '{self.tokenizer.name}' refuses these messages: {error}"
            raise ValueError(f"{what}; give such as it takes") from error

    def _encode(self, text: str, mark: str) -> list[int]:
        """The ids of a rendered text, in which a message's own special tokens stand between marks."""
        ids: list[int] = []
        for n, piece in enumerate(re.split(f"{mark}({self._spelled}){mark}|{mark}", text)):
            if piece:
                hub = self.tokenizer.hub if n % 2 else self._hub
                found = hub.encode(piece, add_special_tokens=False).ids
                if n % 2 and not self._ends.isdisjoint(found):
                    raise ValueError(f"a message spells out the special token '{piece}'; leave it out")
                ids += found
        return ids


def check_messages(messages: Any) -> list[dict[str, str]]:
    """The roles and contents of a conversation's messages; refuses what is none."""
    like = f'each must look like {{"role": "user", "content": "…"}}, with a role of {", ".join(ROLES)}'
    found = []
    for number, message in enumerate(messages if isinstance(messages, list | tuple) else [messages], 1):
        told = message if isinstance(message, Mapping) else {}
        role, content = told.get("role"), told.get("content")
        if role not in ROLES or not isinstance(content, str) or re.search("[\ud800-\udfff]", content):
            raise ValueError(f"message {number} is {message!r:.60}; {like}")
        found.append({"role": role, "content": content})
    if not found or found[0]["role"] == "assistant":
        raise ValueError("a conversation begins with a message of the role system or user; give one")
    return found


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of their first ids two texts share."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _template_of(tokenizer: Any) -> str | None:
    file = tokenizer.beside("chat_template.jinja")
    if file.is_file():
        return read_text(file, "chat template")
    found = tokenizer.about("tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several by name
        named = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _compiled(text: str, name: str):
    """The template in an environment like that of `transformers`."""
    try:
        import jinja2.sandbox
    except ImportError as error:
        what = f"the chat template of '{name}' needs the package jinja2, which is not installed"
        raise ValueError(f"{what}; install the extra llmpar[hf]") from error

    def refuse(words):
        raise jinja2.TemplateError(words)

    def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        how = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(x, ensure_ascii=ensure_ascii, **how)

    room = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    room.filters["tojson"], room.globals["raise_exception"] = to_json, refuse
    # the tag that shows trainers an answer: we find them by themselves
    tag = lambda found: f"{found[1]}{'endif' if found[2] else 'if true'}{found[3]}"
    try:
        return room.from_string(re.sub(r"(\{%-?\s*)(end)?generation(\s*-?%\})", tag, text))
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of '{name}' is none: {error}; mend it") from error
