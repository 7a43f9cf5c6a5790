"""Make fixtures/lora_llama.npz: the tiny Llama of hf_llama.npz, tuned by `peft` for three steps of AdamW.

python tests/make_lora_fixture.py, with torch, transformers and peft. B does not start at zero, so that one
step moves A too; ``logits`` are those with the adapters merged.
"""

import numpy as np
import peft
import torch
from make_hf_fixtures import FIXTURES, TABLE, make

LORA = dict(r=3, lora_alpha=6, target_modules="all-linear", lora_dropout=0.0)
ADAMW = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def loss_of(model, ids):
    logits = model(ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


if __name__ == "__main__":
    draw = np.random.default_rng(3)
    model = peft.get_peft_model(make("llama"), peft.LoraConfig(**LORA))
    ids = draw.integers(0, TABLE["sizes"]["vocab_size"], (8, 17), dtype=np.int32)
    weights = {}
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.requires_grad:
                value = np.round(64 * 0.2 * draw.standard_normal(weight.shape)) / 64
                weight.copy_(torch.tensor(value))
                weights["weight:" + path.removeprefix("base_model.model.")] = value.astype(np.float32)
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], **ADAMW)
    tokens, losses = torch.tensor(ids, dtype=torch.long), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model = model.merge_and_unload()
    with torch.no_grad():
        losses.append(loss_of(model, tokens).item())
        logits = model(tokens[:, :-1]).logits.numpy()
    versions = f"torch {torch.__version__}, peft {peft.__version__}"
    file = FIXTURES / "lora_llama.npz"
    np.savez_compressed(file, versions=versions, ids=ids, losses=losses, logits=logits, **weights)
    print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB, losses {losses}, {len(weights)} weights")
