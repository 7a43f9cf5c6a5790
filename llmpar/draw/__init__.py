"""Draw a value: values in, a `draw.scene.Scene` out. No JAX, and nothing here runs anything.

grid         mesh  tensor_grid                  where devices are, and which holds what of a tensor
             layer_lanes                        one layer in time
layouts      layout  arrow  links               a tensor cut, what moves, over which links
hosts        wired  growing  table              machines and their wire; a mesh axis by axis; cells in colour
             traffic                            who sends what to whom from one mesh to another
matmul       matmul                             matrices in the colours of the devices that hold them
causal       causal                             which rank computes which pairs of causal attention
charts       collectives  arrows_sent           what was sent, and for which arrow
             ring_steps                         how a ring passes pieces on
             overlap  two_lanes                 what works when
             memory_bars  time_bars             what fills the memory, and the step
             step_memory                        what a device holds, forward and backward
dispatch     dispatch  expert_loads             a token's path to its experts and back; how full they are
replicas     replicas  messages                 data parallelism, and in how many messages
             zero_strips  gather_use_forget     what a device holds over a step, by ZeRO stage
curves       curves  loss_curve                 what was measured beside a model; whether it learns
             failures                           what failures leave of a run, by the interval of checkpoints
pipelines    timeline  timelines  bubbles       pipeline orders in time; what is called the bubble
programs     program  traced  program_order         lines of code; a function, rank by rank; what runs when
serving      passes  slots  cache               a prompt and its answer; slots, pages and keys
columns      axis_squares  memory_bar  time_bar  sent_bars  mesh_map     what stands beside an explorer's grid
strips       before_after  ring_sums  ring      collectives before and after, hop by hop
             cube                               devices in space
geometry                                        coordinates of devices, groups, slices, rounds
scene                                           rectangles, lines and words; SVG, PNG and a text twin
"""

from llmpar.draw.causal import causal
from llmpar.draw.charts import (
    arrows_sent,
    collectives,
    memory_bars,
    overlap,
    ring_steps,
    step_memory,
    time_bars,
    two_lanes,
)
from llmpar.draw.curves import curves, failures, loss_curve
from llmpar.draw.dispatch import dispatch, expert_loads
from llmpar.draw.geometry import groups, holders
from llmpar.draw.grid import layer_lanes, mesh, tensor_grid
from llmpar.draw.hosts import growing, table, traffic, wired
from llmpar.draw.layouts import arrow, layout, links, moved
from llmpar.draw.matmul import matmul
from llmpar.draw.pipelines import bubbles, timeline, timelines
from llmpar.draw.programs import program, program_order, traced
from llmpar.draw.replicas import gather_use_forget, messages, replicas, zero_strips
from llmpar.draw.serving import cache, passes, slots
from llmpar.draw.strips import before_after, cube, ring, ring_sums
