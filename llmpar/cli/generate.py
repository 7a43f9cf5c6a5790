"""``llmpar generate``: continue a text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from llmpar.cli import options
from llmpar.cli.options import MAX_SEED, Folder, Name, fits_host, give, join, say, start
from llmpar.config import preset


@dataclass(frozen=True)
class Generate:
    """Continue a text, with a cache of keys and values that is cut over a mesh.

    llmpar generate "def " --checkpoints kept --mesh "sp=4 tp=2"

    Attributes:
        prompt: the text to continue.
        checkpoints: folder that `llmpar train --checkpoints` wrote; random weights where it is left out.
        model: a preset's name, or the path of a config.json or its folder; left out, the
            checkpoint's, or tiny.
        mesh: sizes of the axes; sp cuts the cache's positions, tp its heads.
        devices: CPU devices to simulate where there is no accelerator.
        tokens: how many to add at most; a token that ends a text ends it here.
        temperature: 0 takes the likeliest token, more draws from a flatter distribution.
        seed: of drawing.
        tokenizer: 'bytes', or the path of a Hugging Face tokenizer.json; left out, the checkpoint's, or
            bytes.
        dtype: of weights and cache.
        json: print one JSON document on stdout.
    """

    prompt: Annotated[str, tyro.conf.Positional] = "def "
    checkpoints: Folder = None
    model: Name = None
    mesh: str = "sp=-1"
    devices: int = 8
    tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
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
        from llmpar.training import data
        from llmpar.training.checkpoint import Checkpoints
        from llmpar.weights import described, init_params

        join()
        start()
        request = Request((0,), self.tokens, self.temperature, seed=self.seed)
        devices = use_devices(self.devices, at_least=1)
        keep = Checkpoints(self.checkpoints) if self.checkpoints is not None else None
        about = keep.about() if keep else {}
        config = about["config"] if keep and self.model is None else preset(self.model or "tiny")
        tokenizer = data.tokenizer_of(about.get("made"), self.tokenizer)
        if keep and self.tokenizer is None and "tokenizer" not in about["made"]:
            say("the checkpoint does not say its tokenizer: taken to be 'bytes'")
        data.check_vocab(tokenizer, config.vocab_size)
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
        place = lambda weight: sharding(mesh, plan.resolve().stored(weight.dims))
        abstract_of = lambda weight: jax.ShapeDtypeStruct(weight.shape, "float32", sharding=place(weight))
        abstract = jax.tree.map(abstract_of, described(config))
        if keep:
            params = keep.params(abstract, config)
        else:
            say("no --checkpoints: the weights are random, and so will be the text")
            cut = jax.tree.map(lambda x: x.sharding, abstract)
            params = jax.jit(lambda: init_params(config, self.seed), out_shardings=cut)()
        say("compiling …")
        (made,) = generate(Engine(config, plan, mesh, params, 1, length), [request])
        text = tokenizer.decode(made)
        document = {"prompt": self.prompt, "text": text, "tokens": made, "mesh": plan.mesh.sizes}
        give(document, self.json, [self.prompt + text])
