"""Conversations to tokens, the same for training and for serving: what is asked is what was trained."""

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
MARK = "\ud800"  # stands around a special token that a message spells out; itself no message holds it


class Chat:
    """How a model writes conversations, ``[{"role": …, "content": …}, …]``.

    With a chat template beside its ``tokenizer.json`` (``chat_template.jinja``, or in
    ``tokenizer_config.json``) they are rendered as `transformers` renders them, in Jinja's sandbox; today's
    date alone is not given, so that a run that resumes reads what it read. Otherwise they are plain: the
    start token, then for each message its role, a line break, its content, and the end token. A special
    token that a message spells out stays text.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer, self._ends = tokenizer, tokenizer.end_ids
        self._template: Any = _template_of(tokenizer) if hasattr(tokenizer, "hub") else None
        if self._template is not None:
            import tokenizers

            self._hub = tokenizers.Tokenizer.from_str(tokenizer.hub.to_str())  # knows special tokens in text
            added = tokenizer.hub.get_added_tokens_decoder()
            special = {number: token.content for number, token in added.items() if token.special}
            self._ends |= special.keys()
            texts = sorted(filter(None, special.values()), key=len, reverse=True)
            self._spelled = "|".join(map(re.escape, texts)) or "(?!)"

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
        seams: list[int] = []
        write: Any = self._plain
        encode: Any = list
        if self._template is not None:
            marked = lambda text: re.sub(self._spelled, f"{MARK}\\g<0>{MARK}", text)
            messages = [message | {"content": marked(message["content"])} for message in messages]
            write, encode = self._render, lambda text: self._encode(text, seams)
        whole, spans = write(messages, ask), []
        ids = encode(whole)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                asked, told = write(messages[:i], True), write(messages[: i + 1], False)
                if whole[: len(asked)] == asked and whole[: len(told)] == told:
                    begin = len(before := encode(asked))
                    if before != ids[:begin]:  # a token would reach from what is asked into the answer
                        seams.append(len(asked))
                        ids = encode(whole)
                    answer = encode(told)
                    while answer != ids[: len(answer)]:  # a token reaches from the answer into what follows
                        answer.pop()
                    ends = [n + 1 for n in range(begin, len(answer)) if answer[n] in self._ends]
                    spans.append(slice(begin, max(ends, default=len(answer))))  # not a line break behind it
        is_answer = np.zeros(len(ids), bool)
        for span in spans:
            is_answer[span] = True
        return np.array(ids, np.int32), is_answer

    def _plain(self, messages: Sequence[Message], ask: bool) -> list[int]:
        encode = lambda text: self.tokenizer.encode(text).tolist()
        ids, end = [self.tokenizer.start_id], min(self.tokenizer.end_ids)
        for message in messages:
            ids += [*encode(f"{message['role']}\n"), *encode(message["content"]), end]
        return ids + encode("assistant\n") * ask

    def _render(self, messages: Sequence[Message], ask: bool) -> str:
        try:
            return self._template.render(self.tokenizer.special, messages=messages, add_generation_prompt=ask)
        except Exception as error:  # a template may do anything
            why = str(error).replace(MARK, "")
            what = f"the chat template of '{self.tokenizer.name}' refuses these messages: {why}"
            raise ValueError(f"{what}; give such as it takes") from error

    def _encode(self, text: str, seams: Sequence[int]) -> list[int]:
        """The ids of a rendered text, cut at the seams and around marked special tokens, which stay text."""
        ids: list[int] = []
        for begin, end in itertools.pairwise([0, *seams, len(text)]):
            for n, piece in enumerate(re.split(f"{MARK}({self._spelled}){MARK}|{MARK}", text[begin:end])):
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


def _template_of(tokenizer: Any) -> Any:
    """The template beside a tokenizer, if there is one, in an environment like that of `transformers`."""
    file, text = tokenizer.beside("chat_template.jinja"), tokenizer.about("tokenizer_config.json")
    text = read_text(file, "chat template") if file.is_file() else text.get("chat_template")
    if isinstance(text, list):  # several by name
        text = {x.get("name"): x.get("template") for x in text if isinstance(x, dict)}.get("default")
    if not text or not isinstance(text, str):
        return None
    try:
        import jinja2.sandbox
    except ImportError as error:
        what = f"the chat template of '{tokenizer.name}' needs the package jinja2, which is not installed"
        raise ValueError(f"{what}; install the extra llmpar[hf]") from error

    def refuse(words):
        raise jinja2.TemplateError(words)

    to_json = lambda x, ensure_ascii=False, **how: json.dumps(x, ensure_ascii=ensure_ascii, **how)
    blocks = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
    room = jinja2.sandbox.ImmutableSandboxedEnvironment(**blocks)
    room.filters["tojson"], room.globals["raise_exception"] = to_json, refuse
    # the tag that shows trainers an answer: we find them by themselves
    tag = lambda found: f"{found[1]}{'endif' if found[2] else 'if true'}{found[3]}"
    try:
        return room.from_string(re.sub(r"(\{%-?\s*)(end)?generation(\s*-?%\})", tag, text))
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of '{tokenizer.name}' is none: {error}; mend it") from error
