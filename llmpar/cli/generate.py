"""``llmpar generate``: continue a text."""

import pathlib
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from llmpar.cli.options import MAX_SEQ_LEN, Output, Seed, give, start_jax, still_at_work
from llmpar.cli.weights import ModelOptions
from llmpar.files import Allowed
from llmpar.launch.agreed import flat
from llmpar.plan.presets import folder_of

MOST_TOKENS = 1 << 15
"""Tokens of a prompt, where the model does not say for how many it was made: 1,024 steps."""


@dataclass(frozen=True)
class Generate(Output, ModelOptions):
    """Continue a text, with a cache of keys and values that is cut over a mesh.

    llmpar generate "def " --checkpoints kept --mesh "sp=4 tp=2"

    Attributes:
        prompt: the text to continue.
        tokens: how many to add at most; a token that ends a text ends it here.
        temperature: 0 takes the likeliest token, more draws from a flatter distribution.
        seed: of drawing.
    """

    prompt: Annotated[str, tyro.conf.Positional] = "def "
    tokens: Annotated[int, Allowed(int, 1, MAX_SEQ_LEN)] = 64
    temperature: float = 0.0
    seed: Seed = 0

    def run(self) -> None:
        """Load the weights, read the prompt, add tokens, and print."""
        from llmpar.launch.joined import barrier, initialize
        from llmpar.training import hugging_face as hf
        from llmpar.training.checkpoint import kept_in

        initialize()
        kept = self.checkpoints and kept_in(pathlib.Path(self.checkpoints))
        barrier({"command": "generate"} | flat(self) | {"kept": kept})
        if any("\ud800" <= x <= "\udfff" for x in self.prompt):
            raise ValueError(
                "the prompt is no text: it holds bytes that are not UTF-8; give it in UTF-8"
            )
        from llmpar.serve.engine import Request, generate
        from llmpar.training.apart import open_chat

        start_jax()
        request = Request((0,), self.tokens, self.temperature, seed=self.seed)
        plan, (config, tokenizer, load, notes) = self.plan(), self.opened(self.seed)
        weights = self.from_ and hf.fingerprint(folder_of(self.from_))
        barrier(
            {"model": config, "tokenizer": tokenizer.identity["fingerprint"], "weights": weights}
        )
        if others := plan.mesh.live("pp", "dp", "fsdp", "ep"):
            raise ValueError(
                f"mesh '{plan.mesh}' has {', '.join(others)}, but a prompt is one row, and goes"
                " through no pipeline; use sp and tp"
            )
        tokens = tokenizer.start_id, *open_chat(tokenizer).encode_all([self.prompt])[0]
        if len(tokens) > (most := config.context_length or MOST_TOKENS):
            raise ValueError(
                f"a prompt of {len(tokens):,} tokens does not fit into the {most:,} positions of"
                f" '{config.name}'; use a shorter one"
            )
        request = replace(request, tokens=tokens, ends=tokenizer.end_ids)
        length = len(request.tokens) + self.tokens - 1
        if config.context_length and length > config.context_length:
            notes.append(
                f"'{config.name}' was made for {config.context_length:,} tokens, and these may be {length:,}"
            )
        engine = self.engine(plan, config, load, notes, 1, length)
        usual = f"once it is compiled, each of {length:,} tokens looks at those before it"
        with still_at_work("generating", usual, every_s=20):
            (made,) = generate(engine, [request])
        text = tokenizer.decode(made)
        document = {"prompt": self.prompt, "text": text, "tokens": made, "mesh": plan.mesh.sizes}
        give(document, self.json, [self.prompt + text])
