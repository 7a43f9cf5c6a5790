"""Text to batches. A corpus whose tokens are their own addresses lets any row be checked alone."""

import dataclasses
import functools
import json
import os
import platform
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from llmpar.training import text_files
from llmpar.training.balance import row_orders
from llmpar.training.data import Batches, Corpus, DataConfig, read_corpus
from llmpar.training.tokenizers import ByteTokenizer, open_tokenizer, tokenizer_of

PINNED_FIRSTS, PINNED_FINGERPRINT = [122, 531, 238, 696, 30], "b17273b56be68de9"


def config(**changes):
    return DataConfig(**{"seq_len": 16, "batch_size": 5, "held_out": 4, **changes})


@pytest.fixture
def corpus():
    """Token i is the number i; 40 documents of 1 to 60 tokens: longer than a row, or a start token alone."""
    lengths = 1 + np.arange(40) ** 3 * 7 % 60
    lengths[[3, 4]] = 1
    tokens = np.arange(lengths.sum(), dtype=np.int32)
    return Corpus(tokens, np.cumsum([0, *lengths]), ByteTokenizer(), "addresses")


def faults(batch, corpus, seq_len=16):
    """What is wrong with a batch of addresses: every array is rebuilt from the tokens alone."""
    assert all(x.dtype == np.int32 and x.shape == batch["tokens"].shape for x in batch.values())
    found = set()
    owner = np.searchsorted(corpus.offsets, np.arange(len(corpus.tokens)), side="right") - 1
    back = np.argsort(batch["positions"], axis=1)
    row = {name: np.take_along_axis(x, back, axis=1) for name, x in batch.items()}
    if not (row["positions"] == np.arange(seq_len)).all():
        found.add("positions")
    for tokens, targets, segments in zip(row["tokens"], row["targets"], row["segments"], strict=True):
        doc = owner[tokens]
        inside = doc[1:] == doc[:-1]
        follow = tokens[1:][inside] == tokens[:-1][inside] + 1
        if not (follow.all() and np.isin(tokens[1:][~inside], corpus.offsets).all()):
            found.add("tokens")
        if not (targets[:-1] == np.where(inside, tokens[1:], -1)).all():
            found.add("targets")
        ends = tokens[-1] + 1 in corpus.offsets
        if targets[-1] != (-1 if ends else tokens[-1] + 1):
            found.add("targets")
        if segments[0] != 1 or not (np.diff(segments) == ~inside).all():
            found.add("segments")
    return found


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def in_order(name):
    return functools.partial(row_orders, name, n=4)


@pytest.mark.parametrize("name", ["own", "contiguous", "zigzag", "striped", "random", "balanced"])
def test_no_target_crosses_documents_and_segments_change_exactly_there(corpus, name):
    mixed = np.random.default_rng(1).permutation(16)
    orders = {"own": None, "random": lambda rows: np.tile(mixed, (len(rows), 1))}
    order = orders.get(name, in_order(name))
    # without a held-out part, so that no document is cut
    stream, plain = (Batches(corpus, config(held_out=0), order=o) for o in (order, None))
    assert stream.num_rows > 2 * 16
    batches = [stream.batch(step) for step in range(40)]
    assert [faults(batch, corpus) for batch in batches] == [set()] * 40
    for step, batch in enumerate(batches):
        natural = plain.batch(step)
        places = order(natural["segments"]) if order else natural["positions"]
        assert same(batch, {k: np.take_along_axis(x, places, 1) for k, x in natural.items()})
    orders = {tuple(map(int, row)) for batch in batches for row in batch["positions"]}
    assert len(orders) > 10 if name == "balanced" else len(orders) == 1
    assert sum((batch["targets"] == -1).sum() for batch in batches) > 50, "there was something to get wrong"
    assert max(batch["segments"].max() for batch in batches) > 2


@pytest.mark.parametrize("part", ["train", "held_out"])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_token_is_an_input_once_per_epoch_apart_from_the_tail(corpus, part, epoch):
    stream = Batches(corpus, config(batch_size=1), part)
    rows = [stream.batch(epoch * stream.num_rows + i)["tokens"][0] for i in range(stream.num_rows)]
    seen = np.sort(np.concatenate(rows))
    total = len(corpus.tokens)
    cut = total - total // 4
    mine = np.arange(cut) if part == "train" else np.arange(cut, total)
    assert len(np.unique(seen)) == len(seen)
    assert np.isin(seen, mine).all()
    assert 1 <= len(mine) - len(seen) <= 16  # the last row needs one more token, as its last target


def test_held_out_rows_are_the_same_for_all_seeds_and_epochs_and_never_trained_on(corpus):
    held = [Batches(corpus, config(batch_size=1, seed=seed), "held_out") for seed in (0, 7)]
    n = held[0].num_rows
    assert all(same(held[0].batch(i), held[1].batch(i + n)) for i in range(n))
    train = Batches(corpus, config(batch_size=1))
    trained = {t for i in range(3 * train.num_rows) for t in train.batch(i)["tokens"][0]}
    trained |= {t for i in range(3 * train.num_rows) for t in train.batch(i)["targets"][0]}
    assert not trained & {t for i in range(n) for t in held[0].batch(i)["tokens"][0]}


def test_the_order_is_pinned_so_that_other_versions_read_the_same(corpus):
    """Documents and rows of the second epoch; another seed has another order."""
    batch, other = (Batches(corpus, config(seed=seed)).batch(11) for seed in (0, 4))
    assert batch["tokens"][:, 0].tolist() == PINNED_FIRSTS and not same(batch, other)
    assert corpus.fingerprint == PINNED_FINGERPRINT


def test_resuming_at_step_k_equals_running_through(corpus):
    through = Batches(corpus, config())
    run = [through.batch(step) for step in range(60)]
    assert 60 * 5 > 3 * through.num_rows
    for k in (0, 1, 17, 59):
        resumed = Batches(corpus, config())
        assert all(same(resumed.batch(step), run[step]) for step in range(k, 60))
    for step in (59, 3, 40, 0):  # looking back leaves no trace, nor does what a reader writes into a batch
        batch = through.batch(step)
        assert same(batch, run[step])
        for x in batch.values():
            x[:] = 99
        assert same(through.batch(step), run[step])
    with pytest.raises(ValueError, match="step -1 has no batch"):
        through.batch(-1)


def test_processes_that_take_their_rows_have_the_batch_between_them(corpus):
    stream = Batches(corpus, config(batch_size=8))
    for step in range(20):
        whole = stream.batch(step)
        halves = [Batches(corpus, config(batch_size=8)).batch(step, slice(i, i + 4)) for i in (0, 4)]
        assert same(whole, {k: np.concatenate([h[k] for h in halves]) for k in whole})
        picked = stream.batch(step, [6, 1])
        assert same(picked, {k: x[[6, 1]] for k, x in whole.items()})
    with pytest.raises(IndexError):
        stream.batch(0, [8])
    single = Batches(corpus, config(batch_size=1))
    for size in (5, 2 * single.num_rows + 3):  # a batch of two epochs, too, has the rows in their order
        stream = Batches(corpus, config(batch_size=size))
        assert stream.num_rows % size
        for step in range(12):
            rows = [single.batch(step * size + i) for i in range(size)]
            assert same(stream.batch(step), {k: np.concatenate([r[k] for r in rows]) for k in rows[0]})


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def documents(corpus):
    """The texts of a corpus, sorted; each begins with its only start token."""
    pieces = np.split(corpus.tokens, corpus.offsets[1:-1])
    assert all(p[0] == corpus.tokenizer.start_id and corpus.tokenizer.start_id not in p[1:] for p in pieces)
    return sorted(corpus.tokenizer.decode(p[1:]) for p in pieces)


def test_the_default_text_is_the_standard_library_cut_at_the_limit():
    corpus = read_corpus(DataConfig())
    assert np.array_equal(corpus.tokens, read_corpus(DataConfig()).tokens)
    assert corpus.tokens.dtype == np.uint16
    num_documents = len(corpus.offsets) - 1
    num_bytes = len(corpus.tokens) - num_documents
    assert 1 << 19 < num_bytes <= 4 << 20
    assert str(num_bytes) in corpus.source and platform.python_version() in corpus.source
    texts = documents(corpus)
    assert len(texts) == num_documents
    with open(os.path.join(sysconfig.get_paths()["stdlib"], "argparse.py"), encoding="utf-8") as source:
        assert source.read() in texts
    small = read_corpus(DataConfig(limit_bytes=1000))
    assert len(small.tokens) - len(small.offsets) + 1 == 1000 and "up to limit_bytes 1000" in small.source
    batch = Batches(corpus, DataConfig()).batch(0)
    assert batch["tokens"].shape == (16, 256) and batch["tokens"].max() <= 256


def library(root):
    names = "b.py a.py json/__init__.py json/tool.py json/notes.txt _sysconfigdata__x.py sitecustomize.py "
    names += "site-packages/numpy/x.py test/test_a.py json/tests/t.py idlelib/x.py encodings/cp1.py "
    for name in (names + "pydoc_data/topics.py __pycache__/a.pyc").split():
        write(root / name, f"# {name}\n")
    return root


def test_the_library_is_its_licence_and_sources_sorted_without_tests_and_packages(tmp_path, monkeypatch):
    root, walk = library(tmp_path / "lib"), os.walk
    backwards = lambda top: ((d, inside, sorted(files)[::-1]) for d, inside, files in walk(top))
    monkeypatch.setattr(os, "walk", backwards)  # a file system lists a folder in the order it likes
    names = ["a.py", "b.py", "json/__init__.py", "json/tool.py"]
    assert text_files.library_files(str(root)) == [str(root / n) for n in names]
    beside = write(tmp_path / "LICENSE", "the licence")
    assert text_files.library_files(str(root))[0] == beside
    inside = write(root / "LICENSE.txt", "the licence")
    assert text_files.library_files(str(root)) == [inside] + [str(root / n) for n in names]


def test_a_python_without_sources_says_so_and_uses_its_licence(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"library .* without its sources here, has no text: .*--data"):
        read_corpus(DataConfig())
    write(tmp_path / "LICENSE.txt", "do as you like")
    corpus = read_corpus(DataConfig())
    assert documents(corpus) == ["do as you like"] and "without its sources" in corpus.source
    assert "without its sources" not in read_corpus(DataConfig(data=(str(tmp_path / "*.txt"),))).source


def test_globs_recurse_and_take_no_file_twice(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "deep/d.md", "odd[1].txt"):
        write(tmp_path / name, name)
    monkeypatch.chdir(tmp_path)
    found = text_files.find_files(("deep/**/*.txt", "**/*.txt", "b.txt"))
    assert found == ["deep/er/c.txt", "a.txt", "b.txt", "odd[1].txt"]
    assert text_files.find_files(("odd[1].txt",)) == ["odd[1].txt"]
    assert text_files.find_files(("deep/*",)) == ["deep/d.md"]  # a folder that a glob matches is passed over
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert text_files.find_files(("~/b.txt",)) == [str(tmp_path / "b.txt")]
    assert documents(read_corpus(DataConfig(data=("**/*.txt",)))) == sorted(found)


def test_jsonl_has_one_document_a_line(tmp_path):
    texts = ["first\nwith a line break", "zweites: \u00fc \u2028 \U0001f600", "third"]
    lines = [json.dumps({"text": t, "meta": 1}, ensure_ascii=i != 1) for i, t in enumerate(texts)]
    text = "\ufeff{}\r\n\n{}\n{}\n".format(*lines) + '{"text": ""}'
    path = write(tmp_path / "x.jsonl", text)
    corpus = read_corpus(DataConfig(data=(path,)))
    assert documents(corpus) == sorted(texts)
    assert len(corpus.tokens) == 3 + sum(len(t.encode()) for t in texts)
    for name, content, said in (  # counted from the file's beginning; other refusals are in bad_inputs.toml
        ("bad.txt", b"\xef\xbb\xbfab\xc3", "byte 0xc3 at offset 5"),
        ("bad.jsonl", b'{"text": "a"}\n\x1f\x8b', "byte 0x8b at offset 15"),
    ):
        with pytest.raises(ValueError, match=said):
            read_corpus(DataConfig(data=(write(tmp_path / name, content),)))
    # the same bytes under another name are one text
    other = write(tmp_path / "x.txt", "\n".join(lines))
    assert documents(read_corpus(DataConfig(data=(other,)))) == ["\n".join(lines)]


def test_the_limit_counts_bytes_over_files_and_cuts_no_character(tmp_path):
    paths = tuple(write(tmp_path / f"{i}.txt", "aü" * 3) for i in range(3))  # 9 bytes each
    assert documents(read_corpus(DataConfig(data=paths))) == ["aü" * 3] * 3
    assert documents(read_corpus(DataConfig(data=paths, limit_bytes=14))) == ["aüa", "aü" * 3]
    assert documents(read_corpus(DataConfig(data=paths, limit_bytes=9))) == ["aü" * 3]
    behind = write(tmp_path / "behind.txt", b"\xff")  # is never opened
    assert documents(read_corpus(DataConfig(data=(*paths, behind), limit_bytes=27))) == ["aü" * 3] * 3


def test_the_corpus_is_put_in_a_mixed_order(tmp_path):
    paths = tuple(write(tmp_path / f"{i:02}.txt", f"{i:02}") for i in range(50))
    corpus = read_corpus(DataConfig(data=paths))
    numbers = [int(corpus.tokenizer.decode(p[1:])) for p in np.split(corpus.tokens, corpus.offsets[1:-1])]
    assert sorted(numbers) == list(range(50)) and np.abs(np.diff(numbers)).mean() > 10
    assert numbers[-5:] == [5, 38, 9, 27, 26]  # what is held out stays so in other versions


def written(rng):
    """Lines of every form; the bytes of each, and whether they count."""
    lines, want = [], []
    text = lambda: "".join(rng.choice([*"abc dé", "\n", '"'], rng.integers(1, 30)))
    for _ in range(60):
        one, two = text(), text() + "."
        kind = rng.integers(3)
        if kind == 0:
            lines.append({"text": one, "meta": 1})
            want.append([(256, True)] + [(b, True) for b in one.encode()])
            continue
        messages = [("system", text())] * int(rng.integers(2)) * int(kind == 1)
        messages += [("user", one), ("assistant", two)]
        if kind == 1:
            messages *= int(rng.integers(1, 3))
            lines.append({"messages": [{"role": role, "content": content} for role, content in messages]})
        else:
            lines.append({"prompt": one, str(rng.choice(text_files.ANSWERS)): two})
        told = [(256, False)]
        for role, content in messages:
            told += [(b, False) for b in f"{role}\n".encode()]
            told += [(b, role == "assistant") for b in [*content.encode(), 256]]
        want.append(told)
    return lines, want


def test_random_conversations_become_the_tokens_and_targets_of_a_plain_re_computation(tmp_path):
    lines, want = written(np.random.default_rng(0))
    path = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, lines)))
    corpus = read_corpus(DataConfig(data=(path,), seq_len=40))
    pairs = list(zip(corpus.tokens.tolist(), corpus.counted.tolist(), strict=True))
    found = [pairs[a:b] for a, b in zip(corpus.offsets, corpus.offsets[1:], strict=False)]
    assert sorted(found) == sorted(want)
    assert f"{sum('text' not in x for x in lines)} conversations: {corpus.counted.sum()} of" in corpus.source
    assert f"{sum(len(x) > 40 for x in want)} documents are longer than a row of 40" in corpus.source


@pytest.mark.parametrize("name", ["own", "zigzag", "balanced"])
def test_what_does_not_count_is_no_target_and_all_else_is_as_it_was(corpus, name):
    """Tokens are their own addresses, so that a target says whether it counts."""
    counted = np.random.default_rng(0).random(len(corpus.tokens)) < 0.4
    masked = dataclasses.replace(corpus, counted=counted)
    order = None if name == "own" else in_order(name)
    plain, some = (Batches(x, config(held_out=0), order=order) for x in (corpus, masked))
    for step in range(30):
        batch, want = some.batch(step), plain.batch(step)
        want["targets"] = np.where(counted[want["targets"]] & (want["targets"] >= 0), want["targets"], -1)
        assert same(batch, want)
    assert corpus.fingerprint == PINNED_FINGERPRINT != masked.fingerprint
    moved = dataclasses.replace(corpus, counted=np.roll(counted, 1))
    assert len({corpus.fingerprint, masked.fingerprint, moved.fingerprint}) == 3


def test_conversations_are_held_out_whole(corpus):
    """At the boundary that is nearest to where texts would be cut; alike for training and evaluation."""
    masked = dataclasses.replace(corpus, counted=np.ones(len(corpus.tokens), bool))
    total = len(corpus.tokens)
    for held_out in (2, 4, 7):
        parts = [Batches(masked, config(held_out=held_out), part) for part in ("train", "held_out")]
        ends = [part._bounds[[0, -1]].tolist() for part in parts]
        cut = ends[0][1]
        assert ends == [[0, cut], [cut, total]] and cut in corpus.offsets[1:-1]
        asked = total - total // held_out
        assert abs(cut - asked) == np.abs(corpus.offsets - asked).min()
    assert Batches(masked, config(held_out=0))._bounds[-1] == total
    with pytest.raises(ValueError, match=r"the train part \(held_out 4\) .* has no answer; give"):
        Batches(dataclasses.replace(corpus, counted=np.arange(total) > total - 9), config())


def test_the_limit_cuts_no_conversation(tmp_path):
    rows = [{"prompt": "aaaa", "answer": "bbbb"}] * 3
    path = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    corpus = read_corpus(DataConfig(data=(path,), limit_bytes=20))
    assert len(corpus.offsets) == 3
    assert (np.diff(corpus.offsets) == len("user\naaaaassistant\nbbbb") + 3).all()


def test_too_little_data_for_a_row_is_refused_with_both_numbers(tmp_path):
    path = write(tmp_path / "x.txt", "a" * 99)  # 100 tokens with the start
    corpus = read_corpus(DataConfig(data=(path,)))
    assert Batches(corpus, DataConfig(seq_len=99, held_out=0)).num_rows == 1
    for seq_len, part, held_out, tokens in ((100, "train", 0, 100), (64, "held_out", 4, 25)):
        says = rf"seq_len {seq_len} needs {seq_len + 1} tokens, but the {part} part .* has {tokens} of 100"
        with pytest.raises(ValueError, match=says):
            Batches(corpus, DataConfig(seq_len=seq_len, held_out=held_out), part)


@pytest.fixture
def make_tokenizer(tmp_path):
    """Writes a byte-level BPE such as GPT-2's and Llama 3's, trained on a few words."""
    hf = pytest.importorskip("tokenizers", reason="the extra llmpar[hf] is not installed")

    def make(special=("<|endoftext|>",), first="", **more):
        tokenizer = hf.Tokenizer(hf.models.BPE())
        tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = hf.decoders.ByteLevel()
        alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
        options = {"vocab_size": 300, "special_tokens": [*special], "initial_alphabet": alphabet}
        trainer = hf.trainers.BpeTrainer(show_progress=False, **options)
        tokenizer.train_from_iterator(["hello world, hello words"] * 5, trainer)
        if first:
            template = dict(single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))])
            tokenizer.post_processor = hf.processors.TemplateProcessing(**template)
        if more.get("truncate"):
            tokenizer.enable_truncation(4)
            tokenizer.enable_padding(length=8)
        path = tmp_path / "tokenizer.json"
        tokenizer.save(str(path))
        return str(path)

    return make


def test_a_tokenizer_json_packs_like_bytes_do(make_tokenizer, tmp_path):
    path = make_tokenizer(first="<|endoftext|>", truncate=True)
    tokenizer = open_tokenizer(path)
    text = "hello world, ünïcode and more than four tokens"
    forged = "one<|endoftext|>two"
    ids, plain = tokenizer.encode_all([text, forged])
    assert ids.dtype == np.int32 and 4 < len(ids) < len(text.encode())
    assert tokenizer.decode(ids) == text and tokenizer.start_id not in ids
    assert tokenizer.decode([tokenizer.start_id, *ids]) == text
    assert tokenizer.start_id not in plain and tokenizer.decode(plain) == forged
    texts = [f"hello {i}" for i in range(1030)]  # more than are encoded at a time
    lines = write(tmp_path / "x.jsonl", "\n".join(json.dumps({"text": t}) for t in texts))
    settings = config(data=(lines,), tokenizer=path)
    corpus = read_corpus(settings)
    assert documents(corpus) == sorted(texts)
    assert open_tokenizer(str(tmp_path)).start_id == tokenizer.start_id  # the folder will do
    batch = Batches(corpus, settings).batch(0)
    assert ((batch["tokens"] == tokenizer.start_id)[:, 1:] == (np.diff(batch["segments"]) == 1)).all()


def test_the_document_start_is_what_was_asked_then_what_the_template_puts_first_then_a_usual_name(
    make_tokenizer,
):
    path = make_tokenizer(special=("<pad>", "<s>", "<|endoftext|>", "<odd>"), first="<odd>")
    assert open_tokenizer(path).start_id == 3
    assert open_tokenizer(path, "<pad>").start_id == 0
    assert open_tokenizer(make_tokenizer(special=("<pad>", "<s>"))).start_id == 1
    path = make_tokenizer(special=("<pad>",))
    with pytest.raises(ValueError, match=r"lacks <\|begin_of_text\|>, .*; name a token it has as"):
        open_tokenizer(path)
    with pytest.raises(ValueError, match=r"lacks <nope>; name a token it has as start_token"):
        open_tokenizer(path, "<nope>")
    assert read_corpus(DataConfig(tokenizer=path, start_token="<pad>", limit_bytes=999)).tokens[0] == 0


def test_the_size_of_a_vocabulary_with_gaps_is_its_largest_id_plus_one(make_tokenizer):
    path = make_tokenizer()
    with open(path, encoding="utf-8") as file:
        raw = json.load(file)
    size = len(raw["model"]["vocab"])
    assert open_tokenizer(path).vocab_size == size
    raw["model"]["vocab"]["gap"] = 70_000
    write(Path(path), json.dumps(raw))
    tokenizer = open_tokenizer(path)
    assert tokenizer.vocab_size == 70_001
    assert read_corpus(DataConfig(tokenizer=tokenizer.name, limit_bytes=999)).tokens.dtype == np.int32


def test_a_tokenizer_is_known_by_what_is_in_it(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    names = "a.json", "same.json", "other.json"
    for name in names:
        words = {"<s>": 0, "x" if name == "other.json" else "y": 1}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>")).save(str(tmp_path / name))
    kept, same, other = (open_tokenizer(str(tmp_path / name)) for name in names)
    assert kept.identity["fingerprint"] == same.identity["fingerprint"] != other.identity["fingerprint"]
    made = {"tokenizer": kept.identity}
    assert tokenizer_of(made, None).name == str(tmp_path / "a.json")
    assert tokenizer_of(made, same.name).name == same.name
    for asked in (other.name, "bytes"):
        with pytest.raises(ValueError, match="trained with tokenizer '.*a.json', and '.*' is another; give"):
            tokenizer_of(made, asked)
    assert tokenizer_of(None, None).name == tokenizer_of({}, None).name == "bytes"


def test_of_a_large_file_no_more_is_read_than_the_limit(tmp_path):
    """A sparse file of a terabyte; the limit falls inside a character."""
    file = tmp_path / "large.txt"
    with open(file, "wb") as large:
        large.write("aé".encode() * 400)
        large.truncate(1 << 40)
    corpus = read_corpus(DataConfig(data=(str(file),), limit_bytes=101))
    assert corpus.tokens.tolist()[1:4] == [97, 0xC3, 0xA9] and 100 <= len(corpus.tokens) - 1 <= 101
    with pytest.raises(ValueError, match="take 12,288.0 GiB of memory .*; use --limit-bytes"):
        read_corpus(DataConfig(data=(str(file),)))
