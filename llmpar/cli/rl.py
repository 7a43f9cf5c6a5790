"""``llmpar rl``: learn by rewards, with the sampler on one mesh and the trainer on another.

sample    the engine answers each prompt several times, at temperature 1
reward    the share of right tokens: digits are to be written in reverse, which one line verifies
learn     rewards less the mean of their group, over its deviation, are advantages (GRPO: Shao et al. 2024);
          the trainer takes a step of the clipped surrogate (`llama.clipped_surrogate`)
send      every few steps the sampler gets the weights: they take the arrow between the two meshes
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmpar.cli.options import Output, check_range, give, inform, start_jax

DIGITS, END = 2, 10  # of a prompt; the token behind them
PROMPTS, GROUP = 32, 8  # of a step; answers to each, which are compared with one another


@dataclass(frozen=True)
class Rl(Output):
    """Learn by rewards, with a trainer and a sampler on meshes of their own.

    llmpar rl --trainer "fsdp=2 tp=2" --sampler tp=4

    Attributes:
        trainer: its mesh, on the first devices.
        sampler: its mesh, on the devices behind them.
        steps: of the trainer.
        send_every: the sampler gets the weights before each so many steps.
        seed: of weights, prompts and answers.
    """

    trainer: str = "fsdp=2 tp=2"
    sampler: str = "tp=4"
    steps: int = 240
    send_every: int = 2
    seed: int = 0

    def run(self) -> dict:
        """Learn, and print rewards and what a transfer of the weights sends."""
        from llmpar.parallel.mesh import use_devices

        check_range("steps", self.steps, 1, 1 << 20)
        check_range("send_every", self.send_every, 1, self.steps)
        use_devices()
        start_jax()
        rewards = list[float]()
        for row in self.learn():
            rewards.append(row["reward"])
            if len(rewards) % 20 == 0:
                inform(
                    f"step {len(rewards)}: reward {row['reward']:.3f}, {row['exact']:.0%} all right"
                )
        if row["sent_bytes"] != row["bound_bytes"]:
            raise ValueError(
                f"a transfer sent {row['sent_bytes']:,.0f} B, not {row['bound_bytes']:,.0f}"
            )
        sent = f"the sampler got {row['sent_bytes']:,.0f} B each time, what it lacked and no more"
        return give(row | {"rewards": rewards}, self.json, [sent])

    def learn(self) -> Iterator[dict[str, float]]:
        """Yield for each step the mean ``reward`` (1 at best), the share of ``exact`` answers, the ``loss``,
        and of the last transfer of the weights ``sent_bytes`` and their lower bound, ``bound_bytes``."""
        import jax
        import optax

        from llmpar.model.weights import weight_dims
        from llmpar.parallel.mesh import make_mesh, ordered_devices
        from llmpar.plan.plan import Plan
        from llmpar.plan.presets import preset
        from llmpar.plan.two_meshes import two_meshes
        from llmpar.serve.engine import Engine, Request, answer_all
        from llmpar.serve.two_meshes import Mover
        from llmpar.training.step import Step

        config = replace(preset("tiny"), vocab_size=16, num_layers=2)
        trainer = make_mesh(self.trainer, devices := ordered_devices())
        if trainer.size == len(devices) or trainer.shape["pp"] > 1:
            raise ValueError(
                f"the trainer's mesh '{self.trainer}' has {trainer.size} of {len(devices)} devices; leave"
                " devices for the sampler, and use no pipeline, whose stages would order layers anew"
            )
        sampler = make_mesh(self.sampler, devices[trainer.size :])
        step = Step(config, Plan(self.trainer, zero=3), trainer, optax.adam(1e-3))
        state, plan, rows = step.init(self.seed), Plan(self.sampler), PROMPTS * GROUP
        engine = Engine(config, plan, sampler, state.params, rows, 2 * DIGITS, queue=rows)
        wanted = jax.tree.map(engine.decoder.plan.stored, weight_dims(config))
        arrows = jax.tree.map(lambda a, b: f"{a} @train -> {b} @serve", step.stored, wanted)
        shapes = [weight.shape for weight in jax.tree.leaves(state.params)]
        move = Mover(
            two_meshes(jax.tree.leaves(arrows), {"train": trainer, "serve": sampler}, shapes)
        )
        for number in range(self.steps):
            if number % self.send_every == 0:
                engine.decoder.params = move(state.params)
            random = np.random.default_rng((self.seed, number))
            digits = random.integers(10, size=(PROMPTS, DIGITS)).repeat(GROUP, 0)
            request = lambda row, seed: Request((*row, END), DIGITS, 1.0, seed=int(seed))
            seeds = random.integers(1 << 32, size=rows)
            drawn = np.array(
                [
                    [(event.token, event.logprob) for event in events]
                    for events in answer_all(engine, map(request, digits.tolist(), seeds))
                ]
            )
            rewards = (drawn[..., 0] == digits[:, ::-1]).mean(1).reshape(PROMPTS, GROUP)
            batch = jax.device_put(_batch(digits, drawn, rewards), step.batch_sharding)
            state, metrics = step.run(state, batch)
            row = {"reward": rewards.mean(), "exact": (rewards == 1).mean()} | metrics
            row |= {"sent_bytes": move.sent_bytes, "bound_bytes": move.plan.bound}
            yield {name: float(value) for name, value in row.items()}


def _batch(digits: Any, drawn: Any, rewards: Any) -> dict[str, Any]:
    """Return a batch of prompts, answers (tokens, log-probabilities) and rewards; answers' tokens count."""
    advantages = rewards - rewards.mean(1, keepdims=True)
    advantages /= rewards.std(1, keepdims=True) + 1e-4
    tokens = np.insert(np.concatenate([digits, drawn[..., 0]], 1), DIGITS, END, 1).astype(np.int32)
    positions = np.arange(2 * DIGITS, dtype=np.int32) + 0 * tokens[:, 1:]
    behind = lambda x: np.pad(x + 0 * digits, ((0, 0), (DIGITS, 0))).astype(np.float32)
    return {
        "tokens": tokens[:, :-1],
        "targets": np.where(positions < DIGITS, -1, tokens[:, 1:]),
        "positions": positions,
        "segments": 0 * positions,
        "logprobs": behind(drawn[..., 1]),
        "advantages": behind(advantages.reshape(-1, 1)),
    }
