"""``llmpar inspect``: predicted beside compiled, for one training step."""

from dataclasses import dataclass

from llmpar.cli.options import File, StepOptions, check_picture, give, save_picture, say, start


@dataclass(frozen=True)
class Inspect:
    """Compile one training step and show predicted beside compiled: bytes and collectives per axis, memory,
    FLOPs.

    llmpar inspect --mesh "dp=2 fsdp=2 tp=2" --zero 3

    Attributes:
        svg: also draw the bytes into this SVG (or PNG).
        types: also trace the step under --reading explicit, and show the plan's layouts beside JAX's types.
        tolerance: also show how far loss and gradients may be from those on another mesh, and which sums are
            why.
        json: print one JSON document on stdout.
    """

    svg: File = None
    types: bool = False
    tolerance: bool = False
    json: bool = False
    step: StepOptions = StepOptions()

    def run(self) -> dict:
        """Inspect, and print tables unless JSON was asked for."""
        check_picture(self.svg)
        import jax

        from llmpar.inspect import report
        from llmpar.inspect.spread import spread
        from llmpar.inspect.types import types

        start()
        config, plan = self.step.resolve()
        asked = config, plan, self.step.batch_size, self.step.seq_len
        rows = types(*asked) if self.types else []
        say(f"compiling a step of {config.name} on {plan.mesh} …")
        document = report.inspect(*asked)
        document |= {"types": rows} if self.types else {}
        document |= {"tolerance": spread(*asked, jax.default_backend())} if self.tolerance else {}
        save_picture(self.svg, "the bytes", lambda: report.picture(document))
        return give(document, self.json, report.tables(document))
