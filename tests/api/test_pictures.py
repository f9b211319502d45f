"""Pictures of masks and scores: word for word as text, and every cell of the SVG and the figure."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from tests.support import messages

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

IDS = np.array([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1]], np.int32)
SAME = pa.mask_fn(lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv], IDS)
ALIBI = pa.score_fn(lambda s, b, h, q, kv, m: s - m[h] * (q - kv), np.float32([0.5, 1.0]))
HIDING = pa.score_fn(lambda s, b, h, q, kv: jnp.where(q < kv, -jnp.inf, s * 2))

TEXTS = {
    "causal: 8 queries (down), 8 keys (across)": (
        lambda: pa.CAUSAL.show(8, 8),
        """\
■ · · · · · · ·
■ ■ · · · · · ·
■ ■ ■ · · · · ·
■ ■ ■ ■ · · · ·
■ ■ ■ ■ ■ · · ·
■ ■ ■ ■ ■ ■ · ·
■ ■ ■ ■ ■ ■ ■ ·
■ ■ ■ ■ ■ ■ ■ ■""",
    ),
    "left=2, right=0: 5 queries (down), 8 keys (across)": (
        lambda: pa.sliding_window(3).show(5, 8, q_offset=3),
        """\
· ■ ■ ■ · · · ·
· · ■ ■ ■ · · ·
· · · ■ ■ ■ · ·
· · · · ■ ■ ■ ·
· · · · · ■ ■ ■""",
    ),
    "mask function, batch row 0: 8 queries (down), 8 keys (across)": (
        lambda: (SAME & pa.CAUSAL).show(8, 8),
        """\
■ · · · · · · ·
■ ■ · · · · · ·
■ ■ ■ · · · · ·
· · · ■ · · · ·
· · · ■ ■ · · ·
· · · · · ■ · ·
· · · · · ■ ■ ·
· · · · · ■ ■ ■""",
    ),
    "mask function, batch row 1: 2 queries (down), 1 key (across)": (
        lambda: (~SAME).show(2, 1, q_offset=6, b=1),
        "·\n■",
    ),
    "score function, head 1: 3 queries (down), 4 keys (across); from -2 to 3": (
        lambda: ALIBI.show(3, 4, h=1),
        "▄ ▅ ▇ █\n▂ ▄ ▅ ▇\n▁ ▂ ▄ ▅",
    ),
    "score function: 2 queries (down), 3 keys (across); from 2 to 4": (
        lambda: HIDING.show(2, 3, logits=[[1, 5, 5], [2, np.nan, 5]]),
        "▁ · ·\n█ ? ·",
    ),
    "score function: 1 query (down), 2 keys (across); from 6 to 6": (
        lambda: HIDING.show(1, 2, logits=3.0, q_offset=4),
        "▁ ▁",
    ),
    "full: 1 query (down), 40 keys (across)": (lambda: pa.FULL.show(1, 40), "■" * 40),
    "causal: 4096 queries (down), 9 keys (across); shown: 1 of 456 queries, all keys": (
        lambda: pa.CAUSAL.show(4096, 9, most=9),
        "■ · · · · · · · ·" + "\n■ ■ ■ ■ ■ ■ ■ ■ ■" * 8,
    ),
}


@pytest.mark.parametrize("title", TEXTS)
def test_texts(title):
    picture, text = TEXTS[title]
    assert str(picture()) == repr(picture()) == f"{title}\n{text}"


@pytest.mark.parametrize("kind", [pa.Mask, pa.MaskFunction, pa.ScoreFunction])
def test_the_pictures_in_the_docstrings(kind):
    """The lines below each prompt are what it writes."""
    lines = [line.strip() for line in kind.show.__doc__.splitlines()]
    (at,) = (n for n, line in enumerate(lines) if line.startswith(">>> "))
    shown = str(eval(lines[at].removeprefix(">>> "), {"pa": pa}))
    assert lines[at + 1 :][: len(shown.splitlines())] == shown.splitlines()


PICTURES = {
    "full": lambda: pa.FULL.show(3, 5),
    "window": lambda: pa.sliding_window(4).show(70, 70),
    "documents": lambda: (SAME & pa.CAUSAL).show(8, 8),
    "scores": lambda: ALIBI.show(9, 12, h=1),
    "far_apart": lambda: HIDING.show(2, 3, logits=[[-1.6e38, 0, 0], [1.6e38, 0.4e38, 0]]),
    "hiding": lambda: HIDING.show(2, 3, logits=[[1, 5, 5], [2, np.nan, 5]]),
}


def cells(svg, shape):
    """The colour of each cell of an SVG; "" where none was drawn."""
    drawn = np.full(shape, "", object)
    for colour, path in re.findall(r'<path fill="(.*?)" d="(.*?)"/>', svg):
        for at, row, n in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", path):
            part = drawn[int(row), int(at) : int(at) + int(n)]
            assert len(part) == int(n) and not part.any()
            part[:] = colour
    return drawn


@pytest.mark.parametrize("name", PICTURES)
def test_the_svg_has_every_cell(name):
    """A mask in one colour; of scores, equal ones alike, and the greater the further on."""
    picture = PICTURES[name]()
    values, drawn = picture.values, cells(picture._repr_svg_(), picture.values.shape)
    if values.dtype == bool:
        np.testing.assert_array_equal(drawn != "", values)
        assert len(set(drawn[values])) == 1
        return
    np.testing.assert_array_equal(drawn == "", values == -np.inf)
    np.testing.assert_array_equal(drawn == "#cc3311", np.isnan(values))
    finite = np.isfinite(values)
    assert {str(x) for x in drawn[values == values[finite].min()]} == {"#fde4aa"}
    assert {str(x) for x in drawn[values == values[finite].max()]} == {"#26456e"}
    green = [int(x[3:5], 16) for x in drawn[finite][np.argsort(values[finite])]]
    assert green == sorted(green, reverse=True)


@pytest.mark.parametrize("name", PICTURES)
def test_the_figure_has_the_values(name):
    pytest.importorskip("matplotlib")
    picture = PICTURES[name]()
    axis = picture.figure().axes[0]
    (image,) = axis.images
    assert axis.get_title().replace("\n", "; ") == f"{picture.title}; {picture.caption}"
    shown = image.get_array()
    if picture.values.dtype == bool:
        np.testing.assert_array_equal(np.asarray(shown, bool), picture.values)
        assert image.get_clim() == (0, 1)
    else:
        np.testing.assert_array_equal(np.ma.getmaskarray(shown), ~np.isfinite(picture.values))
        finite = np.isfinite(picture.values)
        np.testing.assert_array_equal(shown[finite], picture.values[finite])


def test_a_figure_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="^figure: expected Matplotlib: pip install 'pallas_attn"):
        pa.CAUSAL.show(2, 2).figure()


@pytest.mark.parametrize("most", [1, 3, 64])
def test_long_pictures_show_one_of_every_few(most):
    mask = pa.mask_fn(lambda b, h, q, kv: (q * kv) % 7 < 3)
    step_q, step_kv = -(-50 // most), -(-31 // most)
    wanted = mask.dense(50, 31, q_offset=5)[0, 0, ::step_q, ::step_kv]
    np.testing.assert_array_equal(mask.show(50, 31, q_offset=5, most=most).values, wanted)


def test_a_picture_of_a_million_keys_takes_no_room():
    shown = pa.sliding_window(2**19).show(2**20, 2**20).values
    assert shown.shape == (64, 64) and shown.sum() == np.tri(64).sum() - np.tri(32).sum()


@pytest.mark.parametrize("name", ["window", "documents"])
def test_a_picture_is_what_attention_sees(name):
    """With q of zeros and v the identity, the reference's output is not 0 where a key is seen."""
    mask = {"window": pa.sliding_window(3), "documents": SAME & pa.CAUSAL}[name]
    q, v = jnp.zeros((1, 8, 1, 8)), jnp.eye(8).reshape(1, 8, 1, 8)
    out = pa.flash_attention(q, q, v, mask=mask, implementation="reference")
    np.testing.assert_array_equal(np.asarray(out)[0, :, 0] > 0, mask.show(8, 8).values)


def test_scores_are_those_of_attention():
    q = jax.random.normal(jax.random.key(0), (1, 8, 2, 8))
    logits = np.einsum("tnh,snh->nts", q[0], q[0]) * 8**-0.5
    out, lse = pa.flash_attention_with_lse(q, q, q, score=ALIBI, implementation="reference")
    for h in (0, 1):
        scores = ALIBI.show(8, 8, logits=logits[h], h=h).values
        np.testing.assert_allclose(lse[0, h], np.log(np.exp(scores).sum(1)), rtol=1e-5)


def test_bounds_that_a_program_gave_back_are_shown():
    window = jax.jit(pa.sliding_window)(3)
    np.testing.assert_array_equal(window.show(5, 5).values, pa.sliding_window(3).dense(5, 5))


WRONG = (
    lambda: pa.CAUSAL.show(0, 8),
    lambda: pa.CAUSAL.show(8, 2.5),
    lambda: pa.CAUSAL.show(8, 8, q_offset=None),
    lambda: pa.CAUSAL.show(8, 8, most=0),
    lambda: pa.CAUSAL.show(2**31, 8),
    lambda: SAME.show(8, "8"),
    lambda: SAME.show(9, 8),
    lambda: SAME.show(8, 8, b=2),
    lambda: SAME.show(8, 8, h=-1),
    lambda: ALIBI.show(8, 8, h=2),
    lambda: ALIBI.show(8, 8, logits=np.ones(3)),
    lambda: ALIBI.show(8, 8, logits="high"),
    lambda: jax.jit(lambda n: pa.sliding_window(n).show(8, 8).values)(3),
    lambda: jax.jit(lambda x: (SAME & pa.mask_fn(lambda b, h, q, kv, n: kv < n[b], x)).show(8, 8))(
        IDS[:, 0]
    ),
    lambda: jax.jit(lambda x: ALIBI.show(8, 8, logits=x).values)(1.0),
)
MESSAGES = {"pictures": WRONG}


@pytest.mark.parametrize("call, message", messages.cases(MESSAGES))
def test_wrong_pictures(call, message):
    messages.check(call, message)
