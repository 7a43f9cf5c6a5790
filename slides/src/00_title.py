# %% [markdown] tags=["slide"]
# # llmpar
#
# Learn, plan and run LLM parallelism in JAX.
#
# A layout is a line of text, a movement is an arrow.

# %% [markdown] tags=["notes"]
# Every number and picture in this deck is computed when the deck is built. Press S for these notes, Esc for the overview.

# %% [markdown] tags=["slide"]
# ## How much does one all-reduce send?
#
# A ring all-reduce of $N$ bytes over $p$ devices is a reduce-scatter, then an all-gather. Each device sends
#
# $$ 2 N \frac{p - 1}{p} $$

# %% alt="Bars: bytes sent per device over bytes of the result, for 2, 4, 8, 16, 32 and 64 devices: 1.0, 1.5, 1.75, 1.88, 1.94, 1.97. The bars approach the line at 2."
import matplotlib.pyplot as plt

devices = [2, 4, 8, 16, 32, 64]
sent = [2 * (p - 1) / p for p in devices]
figure, axes = plt.subplots(figsize=(9, 3.6))
bars = axes.bar([str(p) for p in devices], sent, color="#0072b2")
axes.bar_label(bars, [f"{value:.2f}" for value in sent], label_type="center", color="white")
axes.axhline(2, color="#d55e00", linestyle="--")
axes.set(xlabel="devices", ylabel="bytes sent ÷ bytes of the result", ylim=(0, 2.3))
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown] tags=["notes"]
# Ask first: with twice the devices, does each one send twice as much? It does not: the cost per device stays below 2N.
# Patarasuk and Yuan (2009) prove that no algorithm sends less.
