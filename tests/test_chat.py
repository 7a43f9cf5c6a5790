"""Conversations to tokens: what `transformers` makes of them, and which tokens are answers."""

import json

import numpy as np
import pytest
from make_chat_fixtures import ANSWER, CONVERSATIONS, FIXTURE, LONG, SPECIAL, TEMPLATES, USER, write_tokenizer
from shared import CASES, TABLES

from llmpar.training.apart import Apart
from llmpar.training.chat import Chat
from llmpar.training.tokenizers import open_tokenizer


@pytest.fixture
def opened(tmp_path):
    """A tokenizer with one of the templates beside it, or another's text."""
    pytest.importorskip("tokenizers", reason="the extra llmpar[hf] is not installed")
    pytest.importorskip("jinja2", reason="the extra llmpar[hf] is not installed")

    def open_folder(name, template=None):
        write_tokenizer(tmp_path / name, name)
        if template is not None:
            (tmp_path / name / "chat_template.jinja").write_text(template)
        return open_tokenizer(str(tmp_path / name), SPECIAL[name][0])

    return open_folder


def answers(tokenizer, ids, is_answer):
    """The texts that count, special tokens too, one for each run."""
    edges = np.flatnonzero(np.diff(np.r_[False, is_answer, False]))
    pieces = (ids[begin:end] for begin, end in edges.reshape(-1, 2))
    if not hasattr(tokenizer, "hub"):
        return ["".join(chr(i) if i < 256 else "<end>" for i in piece) for piece in pieces]
    return [tokenizer.hub.decode(piece.tolist(), skip_special_tokens=False) for piece in pieces]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_models_template_gives_the_tokens_that_transformers_gives(opened, name):
    """Token by token, recorded by make_chat_fixtures.py: with merges over blanks, line breaks and bytes."""
    chat, recorded = Chat(opened(name)), json.loads(FIXTURE.read_text())
    for said, messages in CONVERSATIONS.items():
        for ask in (False, True):
            assert chat.tokens(messages, ask)[0].tolist() == recorded[f"{name} {said} {ask}"], (said, ask)


@pytest.mark.parametrize(
    "name, found",
    {
        "headers": ["It is four.<|eot_id|>", LONG.strip() + "<|eot_id|>"],
        "chatml": ["It is four.<|im_end|>", LONG + "<|im_end|>"],
        "thoughts": ["<think>\n\n</think>\n\n" + LONG + "<|im_end|>"],
        "brackets": ["It is four.</s>", LONG + "</s>"],
        "bytes": ["It is four.<end>", LONG.encode().decode("latin-1") + "<end>"],
    }.items(),
)
def test_an_answer_is_what_the_assistant_says_and_its_end(opened, name, found):
    """Not the line break behind the end; and no earlier answer that the template writes without thoughts."""
    tokenizer = open_tokenizer() if name == "bytes" else opened(name)
    chat = Chat(tokenizer)
    ids, is_answer = chat.tokens(CONVERSATIONS["turns"], ask=False)
    assert [text.strip(" ") for text in answers(tokenizer, ids, is_answer)] == found
    assert [ids[n] in tokenizer.end_ids for n in np.flatnonzero(is_answer)].count(True) == len(found)
    asked, nothing = chat.tokens(CONVERSATIONS["turns"][:3])
    assert ids[: len(asked)].tolist() == asked.tolist(), "what is asked is what was trained"
    assert is_answer[len(asked)] and not is_answer[len(asked) - 1]
    assert len(answers(tokenizer, asked, nothing)) == (name != "thoughts")


def test_no_token_reaches_from_what_is_asked_into_the_answer(opened):
    """Where two line breaks are one token at the end of a text and two before a word (GPT-2's rule)."""
    body = "{{ '<|im_start|>' + message.role + '\\n\\n' + message.content + '<|im_end|>' }}"
    ask = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
    tokenizer = opened("chatml", "{% for message in messages %}" + body + "{% endfor %}" + ask)
    chat, messages = Chat(tokenizer), CONVERSATIONS["turns"]
    ids, is_answer = chat.tokens(messages, ask=False)
    for n in (1, 3):
        asked, _ = chat.tokens(messages[:n])
        assert ids[: len(asked)].tolist() == asked.tolist() and is_answer[len(asked)]
    whole = chat._hub.encode(chat._render(messages, False), add_special_tokens=False).ids
    assert len(ids) < len(whole), "there was something to do"
    found = answers(tokenizer, ids, is_answer)
    assert found == [x["content"] + "<|im_end|>" for x in messages if x is ANSWER or x["content"] is LONG]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_message_cannot_forge_a_special_token(opened, name):
    tokenizer = opened(name)
    end = SPECIAL[name][1]
    pair = lambda one, two: [{"role": "user", "content": one}, {"role": "assistant", "content": two}]
    forged, plain = pair(f"a{end}b \U000f0000", f"c{end}d"), pair("ab \U000f0000", "cd")
    (ids, is_answer), (usual, _) = (Chat(tokenizer).tokens(x, ask=False) for x in (forged, plain))
    special = {number for number, x in tokenizer.hub.get_added_tokens_decoder().items() if x.special}
    assert [i for i in ids if i in special] == [i for i in usual if i in special]
    (answer,) = answers(tokenizer, ids, is_answer)
    assert answer.replace(" ", "").endswith(f"c{end}d{end}")


@pytest.mark.parametrize("files, ends", CASES["tokens_that_end"])
def test_the_files_beside_a_tokenizer_name_what_ends_an_answer(opened, tmp_path, files, ends):
    first = opened("chatml")
    for name, about in json.loads(files).items():
        (tmp_path / "chatml" / name).write_text(json.dumps(about))
    tokenizer = open_tokenizer(first.name, "<|endoftext|>")
    named = [first.hub.token_to_id(x) for x in SPECIAL["chatml"]]
    assert tokenizer.end_ids == {named[i] if i < 2 else i for i in ends}
    assert open_tokenizer().end_ids == {256} == Chat(open_tokenizer()).end_ids
    assert Chat(tokenizer).end_ids == tokenizer.end_ids | {named[1]}, "the template writes that one"


ALTERNATE = "the chat template of '.*brackets' refuses these messages: Roles must alternate: .*; give"
REFUSED = [
    ([USER, USER], ALTERNATE),
    (2 * [{"role": "user", "content": "</s>"}], 'alternate: .* "</s>"}; give'),
]


@pytest.mark.parametrize("messages, said", REFUSED)
def test_what_a_template_refuses_is_refused_in_a_sentence(opened, messages, said):
    with pytest.raises(ValueError, match=said) as caught:
        Chat(opened("brackets")).tokens(messages)
    assert "\n" not in str(caught.value)


NESTED = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "is none: it is nested too deeply; mend it"


@pytest.mark.parametrize("template, said", [*TABLES["templates_refused"], NESTED])
def test_a_template_is_a_strangers_program(opened, template, said):
    with pytest.raises(ValueError, match=said):
        Chat(opened("chatml", template)).tokens([USER])


def test_a_template_ends_with_its_time_memory_or_letters_and_the_next_call_is_answered(opened):
    wild = FIXTURE.with_name("chat").joinpath("wild.jinja").read_text()
    chat = Apart(tokenizer := opened("chatml", wild), 0.5)
    fine, spelled = {"role": "user", "content": "fine"}, "two<|im_end|>"
    want = Chat(tokenizer).tokens([fine])[0].tolist()
    said = {"loop": "did not end in 0.5 s of processor time", "fill": "need more than 1 GiB of memory"}
    for word, why in (said | {"print": "it writes more than 16,777,216 letters"}).items():
        with pytest.raises(ValueError, match=f"the chat template .*chatml' .*{why}"):
            chat.tokens([fine | {"content": word}])
        assert chat.tokens([fine])[0].tolist() == want
    assert chat.end_ids == Chat(tokenizer).end_ids
    (plain,), (found,) = tokenizer.encode_all([spelled]), chat.encode_all([spelled])
    assert found.tolist() == plain.tolist(), "a special token stays text there too"


@pytest.mark.parametrize("name", ["chatml", "bytes"])
def test_work_grows_with_a_conversation_as_its_text_does(opened, monkeypatch, name):
    """Letters that are encoded, of conversations of 16 and of 64 turns: not all of it for each answer."""
    tokenizer = open_tokenizer() if name == "bytes" else opened(name)
    chat, read = Chat(tokenizer), []
    if name == "bytes":
        encode_all = tokenizer.encode_all
        monkeypatch.setattr(tokenizer, "encode_all", lambda x: read.extend(map(len, x)) or encode_all(x))
    else:
        encode = chat._encode
        monkeypatch.setattr(chat, "_encode", lambda text: read.append(len(text)) or encode(text))
    counts = []
    for turns in (16, 64):
        read.clear()
        chat.tokens([USER, ANSWER] * turns)
        counts.append(sum(read))
    assert counts[1] <= 4 * counts[0]


@pytest.mark.parametrize("change, verb", CASES["tokenizers_that_fail"])
def test_what_a_tokenizer_raises_is_a_refusal_that_names_it(opened, tmp_path, change, verb):
    opened("chatml", "{{ messages[0].content }}")
    file, text = tmp_path / "chatml" / "tokenizer.json", "a" * 40 + "b"
    file.write_text(json.dumps(json.loads(file.read_text()) | json.loads(change)))
    tokenizer = open_tokenizer(str(file), SPECIAL["chatml"][0])
    asked = [lambda: tokenizer.decode(tokenizer.encode_all([text])[0])]
    if "decoder" not in change:
        asked += [lambda: Chat(tokenizer).tokens([USER | {"content": text}])]
    for ask in asked:
        with pytest.raises(ValueError, match=f"tokenizer '{file}' cannot {verb}: .*; mend it"):
            ask()
