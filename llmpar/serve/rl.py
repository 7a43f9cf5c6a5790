"""Reinforcement learning on two meshes: a sampler answers, a check rewards, a trainer learns, and its weights
go back to the sampler.

    sample    the engine on one mesh answers each prompt several times, at temperature 1
    reward    the share of an answer's tokens that are right: a program can verify it, nobody judges
    learn     an advantage is the reward less the mean of its group, over the deviation (GRPO: Shao et al.
              2024), and a step on the other mesh takes the clipped surrogate (`llama.clipped_surrogate`)
    send      every few steps the weights take the arrow of two meshes, each byte that a device lacks once

The task: three digits, to be written in reverse. What is learned is that of one seed, the same on each run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from llmpar.model.weights import weight_dims
from llmpar.parallel.mesh import make_mesh, ordered_devices
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.plan.two_meshes import two_meshes
from llmpar.serve.engine import Engine, Request
from llmpar.serve.two_meshes import Mover
from llmpar.training.step import Step

DIGITS, EQUALS, VOCABULARY = 3, 10, 16
"""Digits of a prompt; the token behind them; tokens of the model."""


@dataclass(frozen=True)
class Rl:
    trainer: str = "fsdp=2 tp=2"
    sampler: str = "tp=4"
    steps: int = 150
    send_every: int = 2
    prompts: int = 16
    group: int = 8
    learning_rate: float = 3e-3
    seed: int = 0

    def run(self):
        config = replace(preset("tiny"), vocab_size=VOCABULARY, num_layers=2)
        devices = ordered_devices()
        plans = Plan(self.trainer, zero=3), Plan(self.sampler)
        n, m = (plan.mesh.size for plan in plans)
        trainer = make_mesh(plans[0].mesh, devices[:n])
        sampler = make_mesh(plans[1].mesh, devices[n:n+m])
        step = Step(config, plans[0], trainer, optax.adam(self.learning_rate))
        state = step.init(seed=self.seed)
        engine = Engine(config, plans[1], sampler, jax.device_get(state.params), slots=self.prompts*self.group, length=2*DIGITS+1, queue=self.prompts*self.group)
        flat = flatten_dict(state.params, sep=".")
        stored = flatten_dict(step.stored, sep=".")
        wants = flatten_dict(jax.tree.map(engine.decoder.plan.stored, weight_dims(config)), sep=".")
        plan = two_meshes([f"{stored[k]} @train -> {wants[k]} @serve" for k in flat], {"train": trainer, "serve": sampler}, [x.shape for x in flat.values()])
        move = Mover(plan)
        rng = np.random.default_rng(self.seed)
        for number in range(self.steps):
            if number % self.send_every == 0:
                from flax.traverse_util import unflatten_dict
                engine.decoder.params = unflatten_dict(move(flatten_dict(state.params, sep=".")), sep=".")
            digits = np.repeat(rng.integers(10, size=(self.prompts, DIGITS)), self.group, 0)
            made, logprobs = self.sample(engine, digits, number)
            rewards = (made == digits[:, ::-1]).mean(1)
            groups = rewards.reshape(-1, self.group)
            adv = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
            batch = self.batch(digits, made, logprobs, adv.reshape(-1, 1))
            state, metrics = step.run(state, jax.device_put(batch, step.batch_sharding))
            yield {"step": number, "reward": float(rewards.mean()), "exact": float((rewards==1).mean()), "loss": float(metrics["loss"])}

    def sample(self, engine, digits, number):
        seeds = np.random.default_rng((self.seed, number)).integers(1 << 31, size=len(digits))
        tickets = [engine.submit(Request((*map(int, row), EQUALS), DIGITS, 1.0, seed=int(s))) for row, s in zip(digits, seeds)]
        got = {t: [] for t in tickets}
        while engine.busy:
            for event in engine.step():
                got[event.ticket].append((event.token, event.logprob))
        a = np.array([got[t] for t in tickets])
        return a[..., 0].astype(np.int32), a[..., 1].astype(np.float32)

    def batch(self, digits, made, logprobs, adv):
        rows = np.concatenate([digits, np.full((len(digits), 1), EQUALS), made], 1).astype(np.int32)
        none = np.zeros((len(rows), DIGITS), np.float32)
        targets = np.where(np.arange(2*DIGITS) < DIGITS, -1, rows[:, 1:])
        positions = np.broadcast_to(np.arange(2*DIGITS, dtype=np.int32), targets.shape)
        return {"tokens": rows[:, :-1], "targets": targets.astype(np.int32), "positions": positions, "segments": positions*0,
            "logprobs": np.concatenate([none, logprobs], 1), "advantages": np.concatenate([none, np.repeat(adv, DIGITS, 1).astype(np.float32)], 1)}
