"""Layouts, arrows and mesh strings: what they mean, how they print, where the caret stands if nothing."""

import math
import random

import pytest
from shared import CASES, TABLES

from llmpar.plan.layout import DIMS, Arrow, Dim, Layout, parse_arrow, parse_layout
from llmpar.plan.mesh_shape import AXES, POSITIONAL, MeshShape, NotationError, parse_mesh


def refusal(parse, text, *more):
    """The message of a refusal, and the part of the text that its caret marks (None without a caret)."""
    with pytest.raises(ValueError) as caught:
        parse(text, *more)
    why, *picture = str(caught.value).split("\n")
    if not isinstance(caught.value, NotationError):
        assert not picture
        return why, None
    shown, carets = picture
    assert shown == "  " + text and set(carets) == {" ", "^"}
    return why, shown[carets.index("^") : len(carets)]


def random_layout(rng: random.Random, dims=None, region: bool | None = None, sums: bool = True) -> Layout:
    """Any legal layout: dims in any order, every axis at most once, as a cut or as a sum."""
    region = rng.random() < 0.3 if region is None else region
    dims = rng.sample(list(DIMS), rng.randrange(1, 5)) if dims is None else dims
    axes = rng.sample(list(AXES), rng.randrange(len(AXES) + 1))
    homes = [rng.randrange(len(dims) + sums) for _ in axes]
    at = lambda place: tuple(a for a, home in zip(axes, homes, strict=True) if home == place)
    cut = tuple(Dim(d, () if region else at(i)) for i, d in enumerate(dims))
    left = tuple(rng.sample(list(DIMS), 2)) if region else at(len(dims))
    return Layout(cut, left, "stream" if region else "")


def test_printing_and_parsing_are_each_others_inverse():
    rng = random.Random(0)
    for _ in range(80):
        layout = random_layout(rng)
        assert parse_layout(str(layout)) == layout
        spaced = "  ".join(["", *str(layout).split(), ""])
        assert parse_layout(spaced) == layout
        other = random_layout(rng, list(layout.letters), region=False)
        assert parse_arrow(f"{layout} -> {other}") == Arrow(layout, other)
        assert parse_arrow(str(Arrow(layout, other))) == Arrow(layout, other)


def test_a_text_with_line_breaks_is_shown_on_one_line():
    with pytest.raises(NotationError) as caught:
        parse_mesh("dp=2\ntp=x")
    _, shown, carets = str(caught.value).split("\n")
    assert shown == "  dp=2 tp=x" and shown[carets.index("^")] in "tx"


def test_an_axis_or_dim_without_a_name_is_refused_at_its_place():
    for text, column in {"b/": 2, "b/dp,": 5, "b +": 3, "/dp": 0, "b/tp s -> b/tp s/tp": 17}.items():
        with pytest.raises(NotationError) as caught:
            (parse_arrow if "->" in text else parse_layout)(text)
        assert str(caught.value).split("\n")[2].index("^") == 2 + column


TABLE = dict(TABLES["arrows"])


@pytest.mark.parametrize("text", TABLE)
def test_an_arrow_is_exactly_these_moves(text):
    arrow = parse_arrow(text)
    assert [str(move) for move in arrow.moves] == TABLE[text] and parse_arrow(str(arrow)) == arrow


@pytest.mark.parametrize("text, dim", CASES["reordered"])
def test_blocks_are_never_reordered_and_the_advice_works(text, dim):
    with pytest.raises(ValueError, match=f"reorder the blocks of {dim}: .* with {dim} whole in between"):
        _ = parse_arrow(text).moves
    arrow = parse_arrow(text)
    between = Layout(tuple(Dim(d.name, () if d.name == dim else d.axes) for d in arrow.before.dims))
    free = lambda axes: tuple(a for a in axes if a not in arrow.after.cut(dim))
    between = Layout(tuple(Dim(d.name, free(d.axes)) for d in between.dims))
    assert Arrow(arrow.before, between).moves and Arrow(between, arrow.after).moves


def test_meshes_print_as_they_are_read():
    rng = random.Random(0)
    for _ in range(40):
        shape = MeshShape(*[rng.choice([1, 1, 2, 3, 8]) for _ in AXES], reshape=rng.random() < 0.3)
        assert parse_mesh(str(shape)) == shape == parse_mesh(shape)
        assert shape.size == math.prod(shape.sizes.values())
        lwm = ",".join(str(shape.sizes[a]) for a in POSITIONAL[4])
        assert parse_mesh(lwm) == MeshShape(**{a: shape.sizes[a] for a in POSITIONAL[4]})


@pytest.mark.parametrize("text, devices, need, suggestion", CASES["too_few_devices"])
def test_too_few_devices_are_refused_with_a_mesh_that_works(text, devices, need, suggestion):
    message, caret = refusal(parse_mesh, text, devices)
    assert message.startswith(f"mesh '{text}' needs {need} are present; try '") and caret is None
    tried = message.rpartition("try '")[2].rstrip("'")
    assert parse_mesh(tried, devices).size == devices
    assert suggestion in ("", tried)
