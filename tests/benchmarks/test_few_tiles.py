"""The picture of speed where key tiles are few, and what is said below it."""

import xml.etree.ElementTree

import pytest

from benchmarks import plots


def row(q_heads, head_dim, forward, both):
    """A row of op "sweep_few", whose calls take cuDNN 1 ms."""
    sizes = {"batch": 1, "q_len": 300, "q_heads": q_heads, "kv_heads": 1, "head_dim": head_dim}
    return {
        "case": f"n{q_heads}_h{head_dim}",
        "problem": sizes,
        "ms": {"forward": 1 / forward, "both": 1 / both},
        "cudnn_ms": {"forward": 1.0, "both": 1.0},
        "gpu": "a GPU",
        "jax": "0.1",
    }


ROWS = [row(1, 64, 1.2, 0.5), row(4, 64, 2.0, 1.0), row(1, 128, 1.05, 1.5), row(4, 128, 1.3, 3.0)]


def test_a_square_for_each_problem_in_the_colour_of_its_ratio():
    tree = xml.etree.ElementTree.fromstring(plots.squares(ROWS))
    paths = tree.findall("{*}path")
    key, squares = paths[: len(plots._CLASSES)], paths[len(plots._CLASSES) :]
    counted = dict.fromkeys([path.get("fill") for path in key], 0)
    for path in squares:
        counted[path.get("fill")] += path.get("d").count("M")
    assert list(counted.values()) == [1, 2, 1, 1, 3]


def test_the_text_says_what_is_slower():
    said = plots.ratios_said(ROWS)
    assert "Both passes: 0.500 at least, 1.50 in the middle, 3.00 at most." in said
    assert said.endswith("Not faster than cuDNN: `n1_h64`.")
    assert plots.ratios_said(ROWS[1:]).endswith("cuDNN is nowhere faster.")


@pytest.mark.parametrize("passes", ["forward", "both"])
def test_ratio(passes):
    assert plots.ratio(ROWS[1], passes) == pytest.approx({"forward": 2, "both": 1}[passes])
