# %% [markdown] tags=["slide", "divider"] minutes=1 section="Experts"
# ## Where are we: one layer, many experts
#
# <footer>Lesson <code>notebooks/09_experts</code></footer>

# %%
from deck import where

where("experts")

# %% [markdown] tags=["notes"]
# A checkpoint: who is lost says so now. **Ask:** four stages, twelve microbatches, 1F1B: which share is idle? (3 of 15.)

# %% [markdown] tags=["slide", "short"] minutes=3 section="Experts"
# ## Experts: the tokens travel
#
# A router sends every token to $a$ of $e$ experts: **two all-to-alls forward, two backward.**
#
# <footer>Shazeer et al. 2017; Lepikhin et al. 2020 (GShard) · lesson <code>notebooks/09_experts</code> · <code>llmpar inspect --model tiny-moe --mesh ep=8</code></footer>

# %% place="tall"
import jax
import jax.numpy as jnp
import numpy as np
import optax
from deck import draw, show, steps, where

from llmpar.inspect.census import census_table
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.model import moe
from llmpar.parallel.mesh import make_mesh, use_devices
from llmpar.parallel.modes import Solo
from llmpar.plan.model_config import ExpertConfig
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict import formulas, traffic
from llmpar.training.step import Step

use_devices()
MODEL, PLAN, BATCH, SEQ = preset("tiny-moe"), Plan("ep=8"), 16, 32
step = Step(MODEL, PLAN, make_mesh(PLAN.mesh), optax.sgd(0.1))
traced = step.run.trace(step.abstract_state, step.abstract_batch(BATCH, SEQ)).jaxpr
sent = census_table(census_jaxpr(traced, PLAN.mesh.sizes))["ep", "all-to-all"]
told = traffic.step_traffic(PLAN.resolve(MODEL), BATCH, SEQ)["ep", "all-to-all"]
assert sent["count"] == told.count == 4 * MODEL.num_layers and sent["bytes_sent"] == told.bytes_sent

HOW, RANKS = ExpertConfig(8, 2), 4


def visits(skew):
    """What a random router chooses for 4 ranks of 64 tokens; ``skew`` makes expert 0 hotter.
    rows[rank][expert]"""
    logits = np.random.default_rng(3).standard_normal((RANKS, 64, 8)) + skew * (np.arange(8) == 0)
    chosen = np.asarray(moe.choose_experts(HOW, moe.affinities(HOW, jnp.asarray(logits, jnp.float32)))[1])
    return [[int((mine == e).sum()) for e in range(8)] for mine in chosen]


THREE = ExpertConfig(3, 2)  # with four the letters are too small for a room
scores = np.random.default_rng(2).standard_normal((3, 3, 3)).astype(np.float32)
weights, chosen = moe.choose_experts(THREE, moe.affinities(THREE, jnp.asarray(scores)))
way = dict(chosen=np.asarray(chosen).tolist(), slots=3, weights=np.asarray(weights)[0, 0].round(2).tolist())
steps(
    *(draw.dispatch(**way, stages=n) for n in range(1, 6)),
    title="Three ranks, three tokens and an expert on each",
)

# %% [markdown] tags=["notes"]
# Each rank of `ep` holds some experts, whole: the parameters of $e$ feed-forwards, and for each token the work of $a$ of them. The
# exchanges are those of each layer.
#
# What a random router chose, `a` = 2. Five presses: tokens; slots, some of them empty; at the experts; back; weighed and added up.
# Follow the token with the thick border. A row of slots is what one rank sends to another, empty slots included.
#
# **Ask:** which gradients need no sum over `ep`? Those of the experts: no other rank of `ep` has them. Everything dense is summed over
# it, as over any axis of the batch.
#
# **Misunderstanding:** that expert parallelism sends nothing, since experts stay where they are. The tokens do not: 2·a·tokens·d
# (N−1)/N elements per layer forward, the same again backward. Counts and bytes here are read from the traced step, and predicted.
#
# **Source:** Mixtral 8x7B (Jiang et al. 2024): 46.7 billion parameters, 12.9 of them active. Batches must be e/a times as large for
# data parallelism to hide (Austin et al. 2025).

# %%
mixtral = preset("mixtral-8x7b")
assert (round(mixtral.num_params / 1e9, 1), round(mixtral.active_params / 1e9, 1)) == (46.7, 12.9)
assert formulas.dp_min_tokens(990e12, 400e9, experts=128, topk=4) == 79_200

# %% [markdown] tags=["slide"] minutes=2
# ## A hot expert: room, drops, balance
#
# All ranks wait for the busiest one. A **capacity** drops tokens that come late; **dropless** sends a buffer for the worst
# case; a **balance loss**, or a **bias** that follows the load, makes hot experts rarer.
#
# <footer>Fedus et al. 2021; DeepSeek-V3 2024 · <code>notebooks/09_experts</code> · <code>llmpar train --model tiny-moe --mesh ep=4</code></footer>

# %%
hot, room = visits(1.5), formulas.expert_capacity(64 * RANKS, 8, 1.25, 2)
dropped = np.maximum(0, np.array(hot) - room // RANKS).sum() / np.sum(hot)
assert room == 80 and 0.1 < dropped < 0.25
show(draw.expert_loads(hot, room // RANKS))

# %% [markdown] tags=["notes"]
# Four ranks of 64 tokens and eight experts, expert 0 more attractive. A capacity factor of 1.25 is 20 slots for each expert on every
# rank. What finds none is left out (hatched): such a choice adds nothing to its token. White slots are empty, and travel.
#
# **Ask:** what does dropless cost? In fixed shapes, slots for all that *could* come: one from each token for each rank, where a token
# travels once. Empty slots travel, and are left out before experts multiply. GPUs and TPUs can exchange the full slots alone.
#
# **Misunderstanding:** that a balance loss is free. It pulls the router away from what the data wants; the bias of DeepSeek-V3 has no
# gradient: it takes part in choosing, not in weighing.
#
# **Source:** balance loss e/a Σ f P: Fedus et al. 2021, eq. 4, row by row in DeepSeek-V3; the bias: Wang et al. 2024.

# %%
even = ExpertConfig(8, 2, aux_loss=1.0)
spread = (
    1e-4 * jnp.asarray(np.eye(8)[np.arange(64) % 8] + np.eye(8)[(np.arange(64) + 1) % 8], jnp.float32)[None]
)

assert abs(float(jax.jit(lambda x: moe.route(even, Solo(), x)[2]["loss"].mean())(spread)) - 1) < 1e-3
