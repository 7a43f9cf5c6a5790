"""``llmpar generate``: continue a text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from llmpar.cli import options
from llmpar.cli.options import MAX_SEED, Folder, From, Name, fits_host, give, join, say, start
from llmpar.cli.weights import opened


@dataclass(frozen=True)
class Generate:
    """Continue a text, with a cache of keys and values that is cut over a mesh.

    llmpar generate "def " --checkpoints kept --mesh "sp=4 tp=2"

    Attributes:
        prompt: the text to continue.
        checkpoints: folder that `llmpar train --checkpoints` wrote.
        from_: folder of a Hugging Face model (config.json, safetensors, tokenizer.json), or the name of a
            downloaded one. Without it and checkpoints weights are random.
        model: a preset's name, or the path of a config.json or its folder; left out, the
            checkpoint's, or tiny.
        mesh: sizes of the axes; sp cuts the cache's positions, tp its heads.
        devices: CPU devices to simulate where there is no accelerator.
        tokens: how many to add at most; a token that ends a text ends it here.
        temperature: 0 takes the likeliest token, more draws from a flatter distribution.
        seed: of drawing.
        best: take the checkpoint with the lowest held-out loss, not the newest.
        tokenizer: 'bytes', or the path of a Hugging Face tokenizer.json; left out, the model's, or bytes.
        dtype: of weights and cache.
        json: print one JSON document on stdout.
    """

    prompt: Annotated[str, tyro.conf.Positional] = "def "
    checkpoints: Folder = None
    from_: From = None
    model: Name = None
    mesh: str = "sp=-1"
    devices: int = 8
    tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    best: bool = False
    tokenizer: Name = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    json: bool = False

    def run(self) -> None:
        """Restore the weights, take the prompt in, add tokens, and print."""
        options.check_range("tokens", self.tokens, 1, options.MAX_SEQ_LEN)
        options.check_range("seed", self.seed, 0, MAX_SEED)
        if any("\ud800" <= x <= "\udfff" for x in self.prompt):
            raise ValueError("the prompt is no text: it holds bytes that are not UTF-8; give it in UTF-8")
        import jax

        from llmpar.mesh import make_mesh, sharding, use_devices
        from llmpar.notation import parse_mesh
        from llmpar.plan import Plan
        from llmpar.serve.engine import Engine, Request, generate
        from llmpar.weights import described

        join()
        start()
        request = Request((0,), self.tokens, self.temperature, seed=self.seed)
        devices = use_devices(self.devices, at_least=1)
        config, tokenizer, load, said = opened(
            self.checkpoints, self.from_, self.model, self.tokenizer, self.seed, self.best
        )
        plan = Plan(parse_mesh(self.mesh, len(devices)), zero=0, dtype=self.dtype)
        if others := plan.mesh.live("pp", "dp", "fsdp", "ep"):
            why = "a prompt is one row, and goes through no pipeline"
            raise ValueError(f"mesh '{plan.mesh}' has {', '.join(others)}, but {why}; use sp and tp")
        mesh = make_mesh(plan.mesh)
        tokens = tokenizer.start_id, *tokenizer.encode(self.prompt)
        request = replace(request, tokens=tokens, ends=tokenizer.end_ids)
        length = len(request.tokens) + self.tokens - 1
        plan.serving(config, 1, length)
        fits_host(config, plan, 1, plan.mesh.sp, ("params",))
        if config.context_length and length > config.context_length:
            say(f"'{config.name}' was made for {config.context_length:,} tokens, and these may be {length:,}")
        for line in said:
            say(line)
        place = lambda weight: sharding(mesh, plan.resolve().stored(weight.dims))
        params = load(jax.tree.map(place, described(config)))
        say("compiling …")
        (made,) = generate(Engine(config, plan, mesh, params, 1, length), [request])
        text = tokenizer.decode(made)
        document = {"prompt": self.prompt, "text": text, "tokens": made, "mesh": plan.mesh.sizes}
        give(document, self.json, [self.prompt + text])
