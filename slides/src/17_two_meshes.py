# %% [markdown] tags=["slide"] minutes=2
# ## A trainer on four devices, a sampler on two others
#
# A weight of 8 × 8 numbers, 2 bytes each, from `d/fsdp m` to `d m/tp`. How many bytes must travel: **A** 128 · **B** 256 · **C** 384?
#
# <footer>lesson <code>notebooks/18_two_meshes</code> · <code>llmpar rl</code></footer>

# %%
import dataclasses

from deck import bare, curves, draw, show

from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.plan.two_meshes import two_meshes
from llmpar.predict.muon import muon_and_fsdp_bytes
from llmpar.predict.traffic import outer_traffic

# %% tags=["fragment"]
ONE = two_meshes("d/fsdp m @train -> d m/tp @serve", {"train": "fsdp=4", "serve": "tp=2"}, (8, 8), 2)
assert ONE.bound == sum(ONE.matrix.values()) == 128 and len(ONE.rounds) == 4
table = [(f"from {i}", [(f"{ONE.matrix[i, j]} B", "links") for j in (4, 5)]) for i in range(4)]
show(draw.table(table, ("to 4", "to 5"), "Who sends what to whom"))

# %% [markdown] tags=["notes"]
# **Ask:** hands for A, B, C. Then: and if the sampler is on devices 0 and 1? 96: each has two rows of its four columns already.
#
# **Misunderstanding:** that a trainer first gathers the weight. That alone would send 384 bytes.
#
# **Source:** lesson 18 carries the plan out on simulated devices, and counts the bytes.

# %% [markdown] tags=["slide"] minutes=1
# ## Eight messages: in how many rounds?
#
# A device sends at most one message in a round, and receives at most one. `fsdp=2 tp=2` to `tp=4`: **A** 8 · **B** 4 · **C** 2?
#
# <footer>König 1916 · lesson <code>notebooks/18_two_meshes</code></footer>

# %% tags=["fragment"]
CUT = "d/fsdp m/tp @train -> d m/tp @serve"
TWO = two_meshes(CUT, {"train": "fsdp=2 tp=2", "serve": "tp=4"}, (8, 8), 2)
assert len(TWO.matrix) == len(ONE.matrix) == 8 and len(TWO.rounds) == 2
show(bare(draw.traffic(TWO)))

# %% [markdown] tags=["notes"]
# **Ask:** and from `fsdp=4` to `tp=2`? Four: each receiver has four messages. The busiest device decides.
#
# **Misunderstanding:** that eight messages need eight rounds. Different pairs work at the same time.
#
# **Source:** `two_meshes(…).rounds`; lesson 18.

# %% [markdown] tags=["slide"] minutes=2
# ## Muon wants whole matrices, and FSDP has cut them
#
# Gather all matrices, or let each device own those of some layers. On 8 devices, owners send **A** as much · **B** half · **C** a quarter?
#
# <footer>Jordan et al. 2024 (Muon) · lesson <code>notebooks/18_two_meshes</code></footer>

# %% tags=["fragment"]
SMALL = dataclasses.replace(preset("tiny"), num_layers=8)


def muon_bytes(way, zero=1, microbatches=1):
    """What a device of fsdp=8 sends for Muon and for FSDP in a step of a small model."""
    own = dict(zero=zero, muon=way, dtype="bfloat16", microbatches=microbatches)
    return muon_and_fsdp_bytes(Plan("fsdp=8", **own).resolve(SMALL, "cpu"), 128, 64)


sent = {way: muon_bytes(way)[0] for way in ("gather", "owner", "layer")}
assert sent["gather"] == 4 * sent["owner"] > 0 == sent["layer"]
rows = [(way, {"sent": size}) for way, size in sent.items()]
show(draw.memory_bars(rows, title="Sent by a device for Muon", roles={"sent": "fsdp"}))

# %% [markdown] tags=["notes"]
# **Ask:** why does `layer` send nothing? The gradients' reduce-scatter deals whole layers in place of rows (ZeRO 1).
#
# **Misunderstanding:** that an all-to-all moves as much as an all-gather. It moves what a device has, not the whole; there and back: 2/n.
#
# **Source:** predicted bytes of a small model with eight layers; lesson 18 compiles the collectives.

# %% [markdown] tags=["slide"] minutes=1
# ## Once a step, not once a microbatch
#
# FSDP moves weights and gradients for each microbatch. Muon moves its matrices once a step.
#
# <footer><code>fsdp=8</code>, ZeRO 3, bfloat16 · <code>llmpar.predict.muon</code> · lesson <code>notebooks/18_two_meshes</code></footer>

# %%
COUNTS = (1, 2, 4, 8, 16)
shares = {way: [a / b for a, b in (muon_bytes(way, 3, n) for n in COUNTS)] for way in ("gather", "owner")}
assert abs(shares["gather"][0] - 2 / 3) < 1e-9 and abs(shares["owner"][0] - 1 / 6) < 1e-9
looks = {"gather": ("fsdp-line", "s"), "owner": ("measured", "o")}
lines = [(way, values, *looks[way], False) for way, values in shares.items()]
curves(lines, COUNTS, "microbatches of a step", "Muon's bytes / FSDP's")

# %% [markdown] tags=["notes"]
# **Ask:** and the FLOPs? 30·r³ of 6·r²·T: 5·r/T. With r = 4,096 and 4 million tokens half a percent.
#
# **Misunderstanding:** that Muon is too expensive at scale. A larger batch makes its share smaller, in bytes and in FLOPs.
#
# **Source:** `llmpar.predict.muon`; lesson 18.

# %% [markdown] tags=["slide"] minutes=2
# ## Islands: average the weights every H steps
#
# Four workers, 100 MB of weights. Data parallelism sends 150 MB a step. With H = 10, on average: **A** 100 · **B** 15 · **C** 10?
#
# <footer>DiLoCo (Douillard et al. 2023) adds momentum to the averages · lesson <code>notebooks/18_two_meshes</code></footer>

# %% tags=["fragment"]
EVERY = (1, 2, 5, 10, 20, 50)
share = outer_traffic(Plan("dp=4").resolve(preset("tiny"), "cpu")).total_bytes / 4 / preset("tiny").num_params
assert share == 1.5
lines = [("workers", [100 * share / h for h in EVERY], "measured", "o", False)]
lines.append(("data parallelism", [150] * len(EVERY), "dp-line", None, True))
curves(lines, EVERY, "H, steps between two averages", "MB a step")

# %% [markdown] tags=["notes"]
# **Ask:** hands for A, B, C. Then: with H = 1, is it data parallelism? With SGD yes, with Adam no. Let two people be workers with gradients 1 and -3: Adam's first step is -0.1 and +0.1, and the mean is 0.
#
# **Misunderstanding:** that fewer averages change nothing but the bytes. It is another algorithm: compare its loss.
#
# **Source:** lesson 18 computes both; `LocalSteps` trains so.
