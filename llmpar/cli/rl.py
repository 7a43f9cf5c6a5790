"""``llmpar rl``: learn by rewards, with the sampler on one mesh and the trainer on another.

sample    the engine answers each prompt several times, at temperature 1
reward    the share of right tokens: digits are to be written in reverse, which one line verifies
learn     rewards less the mean of their group, over its deviation, are advantages (GRPO: Shao et al. 2024);
          the trainer takes a step of the clipped surrogate (`llama.clipped_surrogate`)
send      every few steps the sampler gets the weights: they take the arrow between the two meshes

In a job of several processes each computes on its own devices, of one mesh or of both. Weights go between
processes by the plan of the arrow; answers go from the sampler's first process to all.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmpar.cli.options import Output, Seed, check_range, give, inform, start_jax
from llmpar.launch import joined, signals
from llmpar.launch.agreed import flat
from llmpar.plan.mesh_shape import MeshShape, parse_mesh

DIGITS, END = 2, 10  # of a prompt; the token behind them
PROMPTS, GROUP = 32, 8  # of a step; answers to each, which are compared with one another
_STUCK_S = 600.0  # without a step, after which a job of several processes ends


@dataclass(frozen=True)
class Rl(Output):
    """Learn by rewards, with a trainer and a sampler on meshes of their own.

    llmpar rl --trainer "fsdp=2 tp=2" --sampler tp=4
    llmpar launch local --processes 2 --devices 4 -- rl

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
    seed: Seed = 0

    def run(self) -> dict:
        """Learn, and print rewards and what a transfer of the weights sends."""
        from llmpar.parallel.mesh import use_devices

        joined.initialize()
        joined.barrier({"command": "rl"} | flat(self))
        check_range("send_every", self.send_every, 1, self.steps)
        use_devices()
        start_jax()
        rewards, of_many = list[float](), joined.is_joined()
        with joined.Watchdog(_STUCK_S if of_many else 0) as watchdog:
            for row in self.learn():
                watchdog.feed()
                rewards.append(row["reward"])
                if len(rewards) % 20 == 0:
                    inform(
                        f"step {len(rewards)}: reward {row['reward']:.3f},"
                        f" {row['exact']:.0%} all right"
                    )
                if of_many and joined.asked_to_stop(len(rewards)):
                    signals.end("ends after this step, and keeps nothing", 128 + signal.SIGTERM)
        sent = f"the sampler got {row['sent_bytes']:,.0f} B each time, what it lacked and no more"
        return give(row | {"rewards": rewards}, self.json, [sent])

    def settle(self, num_devices: int) -> tuple[MeshShape, MeshShape]:
        """Return the trainer's mesh and the sampler's; refuse those that so many devices cannot have."""
        trainer = parse_mesh(self.trainer, num_devices)
        if trainer.size == num_devices or trainer.pp > 1:
            raise ValueError(
                f"the trainer's mesh '{self.trainer}' has {trainer.size} of {num_devices} devices; leave"
                " devices for the sampler, and use no pipeline, whose stages would order layers anew"
            )
        return trainer, parse_mesh(self.sampler, num_devices - trainer.size)

    def learn(self) -> Iterator[dict[str, float]]:
        """Yield for each step the mean ``reward`` (1 at best), the share of ``exact`` answers, the ``loss``,
        and of the last transfer of the weights ``sent_bytes``, of all processes, and their lower bound,
        ``bound_bytes``. A process without a device of the trainer has no loss."""
        import jax
        import optax
        from jax.experimental.multihost_utils import broadcast_one_to_all

        from llmpar.parallel.mesh import make_mesh, ordered_devices
        from llmpar.plan.plan import Plan
        from llmpar.plan.presets import preset
        from llmpar.serve.engine import Engine
        from llmpar.training.step import Step

        config = replace(preset("tiny"), vocab_size=16, num_layers=2)
        devices = ordered_devices()
        plan, serving = map(Plan, self.settle(len(devices)))
        trainer = make_mesh(plan.mesh, devices, alone=False)
        others = [device for device in devices if device not in {*trainer.devices.flat}]
        sampler = make_mesh(serving.mesh, others, alone=False)
        step = Step(config, replace(plan, zero=3), trainer, optax.adam(1e-3))
        rows = PROMPTS * GROUP
        move = _mover(step, serving, sampler)
        state = step.init(self.seed) if move.senders else step.abstract_state
        engine = None
        is_source = jax.process_index() == sampler.devices.flat[0].process_index
        joined.barrier()  # before a first exchange, for which Gloo waits 30 s
        for number in range(self.steps):
            if number % self.send_every == 0:
                params, sent_bytes = _send(move, state.params)
                if move.receivers:
                    engine = engine or Engine(
                        config, serving, sampler, params, rows, 2 * DIGITS, queue=rows
                    )
                    engine.decoder.params = params
            random = np.random.default_rng((self.seed, number))
            digits = random.integers(10, size=(PROMPTS, DIGITS)).repeat(GROUP, 0)
            seeds = random.integers(1 << 32, size=rows)
            drawn = _answers(engine, digits, seeds)
            if number == 0:
                joined.barrier()
            drawn = broadcast_one_to_all(drawn, is_source)
            rewards = (drawn[..., 0] == digits[:, ::-1]).mean(1).reshape(PROMPTS, GROUP)
            row = {"reward": rewards.mean(), "exact": (rewards == 1).mean()}
            if move.senders:
                place = lambda x: jax.make_array_from_callback(
                    x.shape, step.batch_sharding, x.__getitem__
                )
                batch = jax.tree.map(place, _batch(digits, drawn, rewards))
                state, metrics = step.run(state, batch)
                row |= metrics
            row |= {"sent_bytes": sent_bytes, "bound_bytes": move.plan.bound}
            yield {name: float(value) for name, value in row.items()}


def _mover(step: Any, serving: Any, sampler: Any) -> Any:
    """Return what carries all weights from the mesh of a step to the sampler's."""
    import jax

    from llmpar.model.weights import weights_tree
    from llmpar.parallel.mesh import platform_of, split_axes
    from llmpar.plan.serving import serving_plan
    from llmpar.plan.two_meshes import two_meshes
    from llmpar.serve.two_meshes import Mover

    config, devices = step.config, platform_of(sampler)
    served = serving_plan(serving, config, PROMPTS * GROUP, 2 * DIGITS, devices)
    wanted = weights_tree(config, lambda weight: served.stored(weight.dims))
    arrows = jax.tree.map(lambda a, b: f"{a} @train -> {b} @serve", step.stored, wanted)
    shapes = [weight.shape for weight in jax.tree.leaves(step.abstract_state.params)]
    meshes = {"train": step.mesh, "serve": split_axes(sampler, served.mesh)}
    return Mover(two_meshes(jax.tree.leaves(arrows), meshes, shapes))


def _send(move: Any, params: Any) -> tuple[Any, int]:
    """Send the weights to the sampler. Return them there, and the bytes that all processes sent; ValueError
    if these are not the bytes that the sampler lacks."""
    from jax.experimental.multihost_utils import process_allgather

    moved = move(params)
    sent_bytes = int(process_allgather(np.int32(move.sent_bytes)).sum())
    if sent_bytes != move.plan.bound:
        raise ValueError(
            f"a transfer of the weights sent {sent_bytes:,} B, not {move.plan.bound:,}"
        )
    return moved, sent_bytes


def _answers(engine: Any, digits: Any, seeds: Any) -> Any:
    """Return tokens and log-probabilities of the answers to prompts; zeros in a process without ``engine``,
    which has no device of the sampler."""
    from llmpar.serve.engine import Request, answer_all

    drawn = np.zeros((*digits.shape, 2), np.float32)
    if engine:
        request = lambda row, seed: Request((*row, END), DIGITS, 1.0, seed=int(seed))
        drawn[:] = [
            [(event.token, event.logprob) for event in events]
            for events in answer_all(engine, map(request, digits.tolist(), seeds))
        ]
    return drawn


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
