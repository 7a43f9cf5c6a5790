"""``llmpar demo``: train on 8 devices under three kinds of parallelism, read the program, draw, check."""

import pathlib
from dataclasses import dataclass, replace

from llmpar.cli.inspect import Inspect
from llmpar.cli.options import Output, StepOptions, check_picture, give, inform, installed, speaks
from llmpar.cli.train import Train
from llmpar.plan.mesh_shape import parse_mesh


@dataclass(frozen=True)
class Demo(Output):
    """Train on 8 devices under three kinds of parallelism, read the compiled program, draw, and check it all
    against one device.

    Attributes:
        out: folder for pictures and the log.
        steps: to train, on the mesh and again on one device.
    """

    out: str = "demo"
    steps: int = 60

    def run(self) -> dict:
        """Train on the mesh and on one device, inspect the step, draw three pictures, and compare.

        Raises:
            ValueError: the losses differ by more than 1e-3 nats, predicted and compiled bytes differ, or the
                loss has not fallen below 0.7 of the first.
        """
        import jax

        from llmpar import draw
        from llmpar.parallel.mesh import use_devices

        folder = pathlib.Path(self.out)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cannot make the folder '{self.out}' for pictures: {error.strerror}; give another --out"
            ) from error
        suffix = ".png" if installed("matplotlib") else ".svg"
        pictures = [str(folder / f"{name}{suffix}") for name in ("mesh", "loss")]
        for path in (*pictures, bytes_path := str(folder / "bytes.svg")):
            check_picture(path)
        present = len(use_devices(8, at_least=1))
        mesh = "dp=2 fsdp=2 tp=2" if present >= 8 else f"fsdp={present}"
        options = StepOptions(mesh=mesh)
        # accelerators multiply with fewer bits by default
        with jax.default_matmul_precision("highest"):
            many = Train(step=options, steps=self.steps, log=str(folder / "log.jsonl")).run()
            read = Inspect(step=options, svg=bytes_path).run()
            one = Train(step=replace(options, mesh="dp=1"), steps=self.steps).run()
        if speaks():
            draw.mesh(parse_mesh(mesh)).save(pictures[0])
            draw.loss_curve(many["losses"], reference=one["losses"]).save(pictures[1])
        gap = max(abs(a - b) for a, b in zip(many["losses"], one["losses"], strict=True))
        exact = all(row["predicted_bytes"] == row["compiled_bytes"] for row in read["collectives"])
        inform(
            f"pictures: {', '.join((*pictures, bytes_path))}",
            f"bytes sent: predicted {'=' if exact else '≠'} compiled, for {len(read['collectives'])}"
            " kinds of collective",
            f"loss: {mesh} and one device differ by at most {gap:.1e} nats over {self.steps} steps",
        )
        first, last = many["losses"][0], many["losses"][-1]
        fell = f"the loss fell from {first:.2f} to {last:.2f}, not below 0.7 of that; give it about 60 steps"
        checks = {
            "a predicted byte is not a compiled one": exact,
            "the mesh and one device differ by more than 1e-3 nats": gap <= 1e-3,
            fell: last <= 0.7 * first,
        }
        if failed := [sentence for sentence, passed in checks.items() if not passed]:
            raise ValueError(f"the demonstration failed: {'; '.join(failed)}")
        document = {"gap_nats": gap, "losses": many["losses"], "bytes_exact": exact}
        return give(document, self.json)
