# ---
# jupyter:
#   llmpar:
#     teaching: 30
#     exercises: 20
#     needs: ["01", "10"]
#     objectives:
#     - Ask the planner a whole question, and read its answer term by term.
#     - Find the first scheme to try by three inequalities, without a planner.
#     - Defend a plan by its losers, by what was compiled and by what was measured.
# ---

# %% [markdown]
# # 11 · Choose: plan, compile, defend
#
# You have a model, a machine and a budget. Each of the lessons before had one way to cut a step. Which mix is best? A
# **candidate** is a mesh and a plan for it: ZeRO stage, microbatches, recomputation. The **room** is the memory that a program
# may use. A candidate must be legal, must fit into the room, and should be fast.
#
# **Question.** Which mesh for my model and my machine, and how do I defend it before people who pay for it?
#
# Letters: `Ψ` parameters, `C` FLOP/s of a device, `β` bytes/s of its links.
#
# Axes, slow links first: `pp` pipeline stages, `dp` replicas, `fsdp` replicas with cut state, `ep` experts, `sp` sequence, `tp` tensor
# parallelism.
#
# A **census** counts what a compiled program sends; all words: [docs/words.md](../docs/words.md#words). The core path ends at *Further*.

# %% tags=["plumbing"]
from llmpar.mesh import use_devices

devices = use_devices()

# %% tags=["plumbing"]
import dataclasses
import json
import tempfile
from pathlib import Path

import jax
import optax

from llmpar import draw
from llmpar.config import preset
from llmpar.draw import scene
from llmpar.exercises import attempt, hint, met, say, say_command, solution
from llmpar.exercises.lesson import counting_text, trained, verdicts
from llmpar.plan import Plan
from llmpar.predict import formulas, measured, memory, planner, serving
from llmpar.predict.hardware import chip

# Accelerators round float32 products unless told not to.
jax.config.update("jax_default_matmul_precision", "highest")
h100 = chip("h100")

# %% [markdown]
# ## Predict
#
# Llama 3 8B on 16 H100s: two nodes. Weights and Adam's two moments are float32 here. **How many GiB of these does each device
# hold, with 16 replicas (`dp=16`), and fully sharded (`fsdp=16`)?**

# %%
replicas, sharded = ..., ...
attempt("11.replicas", {"dp=16": replicas, "fsdp=16": sharded})

# %%
state = {}
for mesh in ("dp=16", "fsdp=16"):
    given = memory.argument_bytes(Plan(mesh).resolve(preset("llama3-8b")), 64, 8192)
    state[mesh] = (given["params"] + given["optimizer"]) / 2**30
met("11.replicas", state, "predicted")

# %% [markdown]
# ## Plan
#
# A question names everything that is given. The planner tries every mesh of the devices, with each way to run it that could
# win. It needs no device and no JAX.

# %%
LLAMA, ROWS, SEQ = preset("llama3-8b"), 64, 8192
question = planner.Question(LLAMA, h100, 16, batch_size=ROWS, seq_len=SEQ)
answer = planner.decide(question, keep=6)
room = question.room_bytes / 2**30
print(f"{answer.num_priced:,} candidates priced; room {room:.1f} GiB")
for one in answer.plans:
    gib = one.total_bytes / 2**30
    print(f"{one.plan.mesh!s:<18} {one.time.step_s:.3f} s", end=" ")
    print(f"{gib:5.1f} GiB  {one.plan.remat}")
assert all(one.total_bytes <= question.room_bytes for one in answer.plans)

# %% [markdown]
# A step's time is a sum of named terms. What overlaps with computing is left out; what is exposed is a term.

# %%
SHOWN = ("products", "attention", "recomputation", "elementwise")
SHOWN += ("tensor-parallel links",)


def folded(terms):
    """The largest terms by name, and the sum of the others."""
    named = {name: terms[name] for name in SHOWN if name in terms}
    return named | {"the rest": sum(terms.values()) - sum(named.values())}


rows = [(str(one.plan.mesh), folded(one.time.terms)) for one in answer.plans[:4]]
scene.show(draw.time_bars(rows, title="A step of Llama 3 8B on 16 H100s, by term"))

# %% [markdown]
# ## Why the others lost
#
# A choice is defended by its losers. Each one says which term made it slow, or which inequality it breaks.

# %%
found = planner.document(answer)
for row in found["plans"][1:]:
    print(f"{row['mesh']:<18} {row['why']}")

# %% [markdown]
# And what does not fit is refused with the inequality:

# %%
try:
    planner.decide(dataclasses.replace(question, fixed={"dp": 16}))
except ValueError as refusal:
    say(refusal)

# %% [markdown]
# ## The same by hand
#
# Three rules get you far, and each is one inequality.

# %%
state = 12 * LLAMA.num_params / 2**30
print(
    f"1. replicas: {state:.0f} GiB of state",
    "<" if state < room else ">",
    f"{room:.0f}",
)
peak, links = h100.flops_per_s, h100.link_bytes_per_s
tokens, hides = ROWS * SEQ // 16, formulas.dp_min_tokens(peak, links)
print(f"2. fsdp in a node hides: {tokens:,} tokens per GPU > C/β = {hides:,.0f}")
most = formulas.tp_max_degree(LLAMA.ffn_width, peak, links)
print(f"3. tp hides up to {most:.0f} devices")
best = answer.plans[0].plan
assert state > room and best.mesh.fsdp > 1 and tokens > hides

# %% [markdown]
# ### Exercise (core): which scheme?
#
# Answer with the axis that one would add first: `"dp"`, `"fsdp"`, `"tp"` or `"pp"`. The training state fits on one GPU; it
# fits into a node's memory, but not on one GPU; a single layer is larger than what a GPU can gather.

# %%
on_gpu, in_node, wide_layers = ..., ..., ...
schemes = {"fits on a GPU": on_gpu, "fits in a node": in_node}
attempt("11.schemes", schemes | {"layers wider than a node's memory": wide_layers})

# %% [markdown]
# ## Compile
#
# A plan is a promise. The compiler knows whether it holds. `llmpar compile` asks the compiler of a cluster that is not here
# (seconds for GPUs; it wants the extra `aot-gpu`). In this lesson the small model stands for the large one, on the devices
# that are here: the four verdicts.

# %%
config = dataclasses.replace(preset("tiny"), num_layers=2)
N = max(n for n in (1, 2, 4, 8) if n <= len(devices))
text, adam = counting_text(2 * N, 64), optax.adamw(1e-2)

tp = 2 if N > 1 else 1
chosen = Plan(f"fsdp={N // tp} tp={tp}", tp_sequence=tp > 1)
print("Two programs are compiled and run: about 10 s.")
run = trained(config, chosen, text, adam, 2)
alone = trained(config, Plan("dp=1"), text, adam, 2)
verdicts({"the plan": run}, alone)
gate = run.state.params["blocks"]["ffn"]["gate"]
print(f"gate is stored as {chosen.resolve(config).stored('ffn l d m')}:", end=" ")
print(f"{gate.addressable_shards[0].data.shape} of {gate.shape}")

# %% [markdown]
# For the real question these two lines compile it for the cluster, and train it there:

# %%
for name in ("compile", "train"):
    say_command(found["plans"][0][name])
    print()

# %% [markdown]
# ## Defend
#
# What if the machine were another? The planner answers, so that nobody buys links where products are slow.

# %%
for row in found["sensitivity"]:
    print(f"{row['what']:<26} x {row['ratio']:.2f}")
budget = planner.budget(question, answer.plans[0], tokens=1e12, price=2.0)
print(f"1T tokens: {budget['days']:.0f} days,", end=" ")
print(f"cost {budget['cost']:,.0f} at 2 a GPU hour")

# %% [markdown]
# Three sentences defend a plan: what it is and what it costs; the nearest loser and its term; what was compiled or measured.
#
# ## Five lines
#
# 1. Legal, fits, fast: in this order.
# 2. Cut as little as memory demands; keep talkative axes inside a node.
# 3. A loser that names its term is an argument; a rank without reasons is not.
# 4. Bytes and arguments are exact; temporaries and seconds are estimates: compile, then measure.
# 5. Serving is limited by reading memory; its best mesh is not that of training.
#
# **One thing to remember: the loser's term.** It says what to buy, or what to change.

# %%
worst = found["plans"][-1]
print(f"{worst['mesh']}: {worst['why']}")

# %% [markdown]
# ## Further
#
# Are the seconds right? Where the data sheet misleads, and another question: serving.
#
# ## Hold it against measurements
#
# Times are a model's, and a model can be wrong. This one has twelve constants for each chip, fitted on published runs. Put
# your own runs into a file, and see: here are four meshes of one GPT on 64 A100s (vTrain, Bang et al. 2024).

# %%
meshes = [[1, 64, 1, 8], [2, 32, 1, 8], [4, 16, 1, 16], [8, 8, 1, 16]]
inputs = dict(h=3072, layers=30, heads=32, seq=2048, batch=512, gpus=64)
inputs |= dict(chip="A100-80, NVLink, 800 Gb/s per node of 8", full_recompute=True)
inputs |= dict(columns=["tp", "dp", "pp", "micro_batch"], configs=meshes)
print(json.dumps(inputs)[:79], "…")

# %% [markdown]
# The form is described in `llmpar/predict/measured.py`; a group with an unknown key is refused by name.

# %%
MS = [3566.5, 3975.2, 4492.1, 5017.8]
run = dict(id="vtrain.four", what="four meshes", inputs=inputs, expected={"ms": MS})
run |= dict(source="vTrain, Megatron-DeepSpeed", tolerance={"ms": {"rel": 0.2}})
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "ours.json"
    file.write_text(json.dumps([run]))
    compared = measured.against(file)
for row in compared["rows"]:
    s, seen = row["predicted"]["step_s"], row["measured"]["step_s"]
    print(f"{row['mesh']:<12} predicted {s:.2f} s, measured {seen:.2f} s:", end=" ")
    print(f"{s / seen - 1:+.0%}")
assert compared["groups"][0]["spearman"] > 0.9

# %% [markdown]
# ### Exercise (stretch): a slow network
#
# Sixteen nodes of four A100s (312 TFLOP/s each); 100 Gb/s leave a **node**. How many tokens per GPU does FSDP over all of
# them need, before its gathers hide behind computing?

# %%
tokens_per_gpu = ...
attempt("11.slow_network", tokens_per_gpu)

# %% [markdown]
# ### Exercise (expert): what the data sheet hides
#
# On H100s large products reach 75.2 % of peak, and collectives between nodes 43.2 % of the ports' rate (both fitted). By which
# factor does that change the threshold `C/β`?

# %%
factor = ...
attempt("11.data_sheet", factor)

# %% [markdown]
# ## Serving
#
# To **serve** is another question. The first token waits for the whole prompt, which computes. Every further token reads all
# weights and all keys and values once, for little computing. So one decodes many sequences together: up to the **critical
# batch**, where computing takes as long as reading.

# %%
config, prompt, output = preset("llama3-8b"), 1024, 256
print(f"critical batch {serving.critical_batch(config, h100):.0f} sequences")
for batch in (1, 4, 16, 64, 256):
    terms = serving.decode(config, h100, batch, prompt + output // 2)
    token_s = sum(terms.values())
    print(f"{batch:>5} at once: {token_s * 1e3:5.1f} ms a token,", end=" ")
    print(f"{8 * batch / token_s:>8,.0f} tokens/s on 8 GPUs")
prompt_s = sum(serving.prefill(config, h100, prompt).values())
ratio = prompt_s / (token_s * output / batch)
print(f"apart: {ratio:.1f} prompt instances for each that makes tokens")

# %% [markdown]
# ## Where XLA's partitioner differs
#
# The planner prices what this package sends. Under `--reading auto` the partitioner decides; `llmpar inspect` shows both.
#
# ## On your cluster
#
# ```
# llmpar plan --model llama3-8b --devices 16 --batch-size 64 --html plan.html    the explorer beside the answer
# llmpar plan --against runs.json --chip ours.toml                               are the figures of ours.toml right?
# ```
