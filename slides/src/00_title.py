# %% [markdown] tags=["slide"]
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
from llmpar import draw
from llmpar.draw import scene
from llmpar.draw.scene import compose


def on_a_slide(picture):
    """The picture without its small print, which is said here."""
    return compose(
        picture.title, [[part] for part in picture.items[0].items[1:-1]], picture.text.partition("\n")[2]
    )


mesh = draw.mesh("dp=2 fsdp=2 tp=2", highlight_axis="tp")
assert "8 devices" in mesh.title
scene.show(on_a_slide(mesh))

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
