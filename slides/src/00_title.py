# %% [markdown] tags=["slide", "short"] minutes=1
# # llmpar
#
# Learn, plan and run<br>LLM parallelism in JAX.
#
# A layout is a line of text,<br>a movement is an arrow.
#
# ```text
# make demo
# ```
#
# <footer>Begin with the lesson <code>notebooks/00_setup</code></footer>

# %% place="beside"
from deck import draw, show

mesh = draw.mesh("dp=2 fsdp=2 tp=2", highlight_axis="tp")
assert "8 devices" in mesh.title
show(mesh)

# %% [markdown] tags=["notes"]
# Every number and picture in this deck is computed when it is built, or read out of a compiled program; what a slide
# says is asserted in its source. Press S for these notes, Esc for the overview. `make demo` trains a small Llama on the
# mesh on the right, reads the compiled program, and compares the loss with one device. It runs on a laptop.
#
# **Ask:** who has run out of memory on a GPU this month? What did you do about it?
#
# **Misunderstanding:** that one needs a cluster to learn this. Eight simulated devices give exact values, layouts,
# collectives and bytes. They say nothing about time.
#
# **Source:** README.

# %% [markdown] tags=["slide", "short", "agenda"] minutes=1
# ## What you will be able to do
#
# **Say** what a layout holds. **Compute** what a plan needs. **Choose** a mesh and launch it.
#
# <footer>lessons from <code>notebooks/00_setup</code> on · words and letters: <code>docs/words.md</code></footer>

# %% [markdown] tags=["notes"]
# The table below is made from the minutes of the slides; these notes say at each slide where the clock should be.
#
# **Ask:** from 1 to 5, how sure are you that you can explain data, tensor and pipeline parallelism? Write the three numbers
# down: you give them again at the end (`llmpar quiz` keeps them).
#
# **Misunderstanding:** that the parts are rivals. A large run uses all of them at once, each on its own links.
#
# **Source:** the order of parts is that of cost on most clusters: begin at the top, go down only when you must.
