"""Conversations to tokens, the same for training and for serving: a prompt looks as in training."""

import contextlib
import functools
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from llmpar.files import read_text

Message = Mapping[str, Any]
ROLES = ("system", "user", "assistant")
# stands around a special token that a message spells out; itself no message holds it
_MARK = "\ud800"
# What a template writes at most: four letters for each byte that the server reads of a request.
_MOST_LETTERS = 1 << 24


class Chat:
    """How a model writes conversations, ``[{"role": …, "content": …}, …]``.

    With a chat template beside its ``tokenizer.json`` (``chat_template.jinja``, or in
    ``tokenizer_config.json``) they are rendered as `transformers` renders them, in Jinja's sandbox; today's
    date alone is not given, so that a run that resumes reads what it read. Otherwise they are plain: the
    start token, then for each message its role, a line break, its content, and the end token. A special
    token that a message spells out stays text.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer, self._ends, self._text = tokenizer, tokenizer.end_ids, ""
        if hasattr(tokenizer, "hub"):
            added = tokenizer.hub.get_added_tokens_decoder()
            special = {number: token for number, token in added.items() if token.special}
            self._text, self._ends = _template_text(tokenizer), self._ends | special.keys()
            texts = sorted(
                filter(None, (x.content for x in special.values())), key=len, reverse=True
            )
            self._spelled = "|".join(map(re.escape, texts)) or "(?!)"
            plain = (x for x in special.values() if not (x.lstrip or x.normalized or x.single_word))
            # what is before one does not change it
            self._parting = {token.content for token in plain}

    @functools.cached_property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer: the tokenizer's, and what the template writes behind one."""
        ids, answer = self.tokens([{"role": role, "content": "x"} for role in ROLES[1:]], ask=False)
        return self.tokenizer.end_ids | {*ids[answer][-1:].tolist()} & self._ends

    def tokens(
        self, messages: Sequence[Any], ask: bool = True, most: float = math.inf
    ) -> tuple[Int32[np.ndarray, " s"], Bool[np.ndarray, " s"]]:
        """Return the ids of a conversation, and which of them are an answer: the assistant's text and the
        token that ends it.

        ``ask``: an answer is to come, and its beginning follows. In more than ``most`` ids no answers are
        looked for. An answer counts only if the template writes it as it would when asking for it: where it
        rewrites earlier answers, without their thoughts say, only the last one counts.
        """
        messages = check_messages(messages)
        if not self._text:
            return self._plain(messages, ask)
        marked = lambda text: re.sub(self._spelled, f"{_MARK}\\g<0>{_MARK}", text)
        messages = [message | {"content": marked(message["content"])} for message in messages]
        seams, pieces, spans = list[int](), functools.cache(self._encode), list[slice]()
        encode = lambda text: [*itertools.chain(*map(pieces, self._parts(text, seams)))]
        ids = encode(whole := self._render(messages, ask))
        for i, message in enumerate(messages if len(ids) <= most else ()):
            if message["role"] == "assistant":
                prompt, answered = (
                    self._render(messages[:i], True),
                    self._render(messages[: i + 1], False),
                )
                if whole.startswith(prompt) and whole.startswith(answered):
                    begin = len(before := encode(prompt))
                    if before != ids[:begin]:  # a token would reach from the prompt into the answer
                        seams.append(len(prompt))
                        ids = encode(whole)
                    answer = encode(answered)
                    # a token reaches from the answer into what follows
                    while answer != ids[: len(answer)]:
                        answer.pop()
                    ends = [n + 1 for n in range(begin, len(answer)) if answer[n] in self._ends]
                    # not a line break behind it
                    spans.append(slice(begin, max(ends, default=len(answer))))
        is_answer = np.zeros(len(ids), bool)
        for span in spans:
            is_answer[span] = True
        return np.array(ids, np.int32), is_answer

    def _parts(self, text: str, seams: Sequence[int]) -> Iterator[str]:
        """Cut a text at the seams, and where a special token begins: what is before does not change what is
        behind. So a beginning of a text has the same parts, but for the last."""
        for first, last in itertools.pairwise([0, *seams, len(text)]):
            part = text[first:last]
            specials = re.finditer(f"{_MARK}(?:{self._spelled}){_MARK}|{self._spelled}", part)
            cuts = [match.start() for match in specials if match[0] in self._parting]
            yield from (part[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(part)]))

    def encode_all(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        """Encode texts that are no conversations."""
        return self.tokenizer.encode_all(texts)

    def close(self) -> None:
        """Do nothing: no process runs (`apart.Apart` has some)."""

    def _plain(self, messages: Sequence[Message], ask: bool) -> tuple[np.ndarray, np.ndarray]:
        texts = [
            text for message in messages for text in (f"{message['role']}\n", message["content"])
        ]
        pieces, end = (
            self.encode_all([*texts, *["assistant\n"] * ask]),
            [min(self.tokenizer.end_ids)],
        )
        parts, answers = list[Any]([[self.tokenizer.start_id]]), [False]
        for i, message in enumerate(messages):
            parts += [pieces[2 * i], pieces[2 * i + 1], end]
            answers += [False, *[message["role"] == "assistant"] * 2]
        parts, answers = parts + pieces[2 * len(messages) :], answers + [False] * ask
        return np.concatenate(parts).astype(np.int32), np.repeat(answers, [*map(len, parts)])

    def _render(self, messages: Sequence[Message], ask: bool) -> str:
        template, written = _compiled(self._text, self.tokenizer.name), ""
        names: dict[str, Any] = {"messages": messages, "add_generation_prompt": ask}
        try:
            for piece in template.generate(self.tokenizer.special, **names):
                written += piece
                if len(written) > _MOST_LETTERS:
                    raise ValueError(f"it writes more than {_MOST_LETTERS:,} letters")
            return written
        except MemoryError:
            raise
        except Exception as error:  # a template may do anything
            why = str(error).replace(_MARK, "") or type(error).__name__
            raise ValueError(
                f"the chat template of '{self.tokenizer.name}' refuses these messages: {why:.300}; give such"
                " as it takes"
            ) from error

    @functools.cached_property
    def _hub(self) -> Any:
        # knows special tokens in text
        return type(self.tokenizer.hub).from_str(self.tokenizer.hub.to_str())

    def _encode(self, text: str) -> list[int]:
        """Encode a rendered text, cut around marked special tokens, which stay text."""
        ids: list[int] = []
        for n, piece in enumerate(re.split(f"{_MARK}({self._spelled}){_MARK}|{_MARK}", text)):
            if piece:
                hub = self.tokenizer.hub if n % 2 else self._hub
                with calling(f"tokenizer '{self.tokenizer.name}' cannot encode the text"):
                    new_ids = hub.encode(piece, add_special_tokens=False).ids
                if n % 2 and not self._ends.isdisjoint(new_ids):
                    raise ValueError(
                        f"a message spells out the special token '{piece}'; leave it out"
                    )
                ids += new_ids
        return ids


@contextlib.contextmanager
def calling(what: str, use: str = "mend it, or use 'bytes'"):
    """Refuse in a sentence what the package of a tokenizer raises: a plain Exception, or a panic of Rust,
    which is none."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}; {use}") from error


def check_messages(messages: Any) -> list[dict[str, str]]:
    """Return the roles and contents of a conversation's messages; refuse anything else."""
    like = (
        f'each must look like {{"role": "user", "content": "…"}}, with a role of {", ".join(ROLES)}'
    )
    checked = []
    for number, message in enumerate(
        messages if isinstance(messages, list | tuple) else [messages], 1
    ):
        fields = message if isinstance(message, Mapping) else {}
        role, content = fields.get("role"), fields.get("content")
        if (
            role not in ROLES
            or not isinstance(content, str)
            or re.search("[\ud800-\udfff]", content)
        ):
            raise ValueError(f"message {number} is {message!r:.60}; {like}")
        checked.append({"role": role, "content": content})
    if not checked or checked[0]["role"] == "assistant":
        raise ValueError(
            "a conversation begins with a message of the role system or user; give one"
        )
    return checked


def _template_text(tokenizer: Any) -> str:
    """Return the template beside a tokenizer, if there is one."""
    file, text = tokenizer.beside("chat_template.jinja"), tokenizer.about("tokenizer_config.json")
    text = read_text(file, "chat template") if file.is_file() else text.get("chat_template")
    if isinstance(text, list):  # several by name
        text = {x.get("name"): x.get("template") for x in text if isinstance(x, dict)}.get(
            "default"
        )
    return text if isinstance(text, str) else ""


@functools.cache
def _compiled(text: str, name: str) -> Any:
    """Compile a template in an environment like that of `transformers`."""
    try:
        import jinja2.sandbox
    except ImportError as error:
        raise ValueError(
            f"the chat template of '{name}' needs the package jinja2, which is not installed; install the"
            " extra llmpar[hf]"
        ) from error

    def refuse(words):
        raise jinja2.TemplateError(words)

    to_json = lambda x, ensure_ascii=False, **options: json.dumps(
        x, ensure_ascii=ensure_ascii, **options
    )
    blocks = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(**blocks)
    environment.filters["tojson"], environment.globals["raise_exception"] = to_json, refuse
    # the tag that shows trainers an answer: we find them by themselves
    tag = lambda match: f"{match[1]}{'endif' if match[2] else 'if true'}{match[3]}"
    try:
        return environment.from_string(re.sub(r"(\{%-?\s*)(end)?generation(\s*-?%\})", tag, text))
    except RecursionError:
        why = "it is nested too deeply"
    except Exception as error:  # constants are computed here already
        why = str(error) or type(error).__name__
    raise ValueError(f"the chat template of '{name}' is none: {why:.300}; mend it")
