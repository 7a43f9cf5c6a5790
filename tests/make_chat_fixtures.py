"""Make fixtures/chat.json: what `apply_chat_template` makes of conversations with our own templates.

python tests/make_chat_fixtures.py, in an environment with transformers and jinja2.
"""

import json
import pathlib
import sys
import tempfile

FIXTURE = pathlib.Path(__file__).parent / "fixtures" / "chat.json"

NAMES = ("headers", "chatml", "thoughts", "brackets")
TEMPLATES = {name: FIXTURE.with_name("chat").joinpath(f"{name}.jinja").read_text() for name in NAMES}
SPECIAL = {
    "headers": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "chatml": ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    "thoughts": ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    "brackets": ("<s>", "</s>"),
}
"""First the token that begins a text, then the one that ends an answer."""

USER = {"role": "user", "content": "  Hello, what is\n\n  two + two? "}
LONG = "Four.\n\nOr 2², so to say:  4\n"
ANSWER = {"role": "assistant", "content": "It is four."}
CONVERSATIONS = {
    "ask": [USER],
    "told": [USER, ANSWER],
    "system": [{"role": "system", "content": " Be kind. "}, USER, ANSWER, USER],
    "turns": [USER, ANSWER, USER, {"role": "assistant", "content": LONG}],
}


def write_tokenizer(folder, name):
    """A model's tokenizer files: bytes with a few merges (as GPT-2's), or ▁ for spaces (as Llama 2's)."""
    import tokenizers as hf

    folder.mkdir(parents=True, exist_ok=True)
    merges = [("t", "w"), ("tw", "o"), ("H", "e"), ("l", "l")]
    if name == "brackets":
        letters = [chr(i) for i in range(33, 127)] + ["▁", "²"] + [f"<0x{i:02X}>" for i in range(256)]
        merges += [("▁", "tw"), ("▁", "I")]
    else:
        letters = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
        merges += [("Ġ", "tw"), ("Ċ", "Ċ"), ("Ġ", "Ġ")]
    words = [*letters, *("".join(pair) for pair in merges)]
    vocab = {word: i for i, word in enumerate(words)}
    made = hf.Tokenizer(hf.models.BPE(vocab, merges, byte_fallback=name == "brackets"))
    if name == "brackets":
        made.normalizer = hf.normalizers.Sequence(
            [hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")]
        )
        made.decoder = hf.decoders.Sequence([hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback()])
    else:
        made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        if name == "headers":  # a break belongs to what is before it, as Llama 3 splits a text
            split = hf.pre_tokenizers.Split(hf.Regex(r"\s*\n+|\s+(?!\S)|\s+| ?\S+"), "isolated")
            plain = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            made.pre_tokenizer = hf.pre_tokenizers.Sequence([split, plain])
        made.decoder = hf.decoders.ByteLevel()
    made.add_special_tokens([*SPECIAL[name]])
    made.save(str(folder / "tokenizer.json"))
    start, end = SPECIAL[name][:2]
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": start}
    about |= {"eos_token": {"__type": "AddedToken", "content": end}}
    if name == "brackets":
        about["chat_template"] = [{"name": "default", "template": TEMPLATES[name]}]
    else:
        (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def record():
    """Ids by template, conversation and whether an answer is asked for; None where the template refuses."""
    import jinja2
    import transformers

    found = {"versions": {"transformers": transformers.__version__}}
    for name in TEMPLATES:
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(pathlib.Path(folder), name)
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            for said, messages in CONVERSATIONS.items():
                for ask in (False, True):
                    ids = None
                    try:
                        ids = tokenizer.apply_chat_template(
                            messages, add_generation_prompt=ask, return_dict=False
                        )
                    except jinja2.TemplateError as error:
                        print(name, said, error, file=sys.stderr)
                    found[f"{name} {said} {ask}"] = ids
    return found


if __name__ == "__main__":
    FIXTURE.write_text(json.dumps(record(), separators=(",", ":")).replace('],"', '],\n"') + "\n")
