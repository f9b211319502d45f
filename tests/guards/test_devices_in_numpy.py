"""tests/support/devices_in_numpy.py gives the results of XLA, on a mesh with two axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support import in_numpy

X = np.random.default_rng(0).standard_normal((8, 18)).astype(np.float32)


EACH, ROWS = P("a", "b"), P(("a", "b"))


def mapped(function, check_vma=True, ins=EACH, outs=ROWS):
    mesh = jax.make_mesh((2, 3), ("a", "b"), (AxisType.Auto,) * 2, devices=jax.devices()[:6])
    return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check_vma)


def collectives(x):
    """x: float32[4, 6] of a device."""
    reduced = lax.psum((x, x[0]), "a"), lax.psum(x, ("b", "a")), lax.pmean(x, "b")
    moved = lax.ppermute(x, "b", [(0, 2), (1, 0)]), lax.ppermute(x, ("a", "b"), [(4, 1)])
    every = lax.all_gather(x, "b"), lax.all_gather(x, ("b", "a"), axis=1, tiled=True)
    each = (
        lax.all_to_all(x, "b", 1, 0, tiled=True),
        lax.all_to_all(x.reshape(4, 3, 2), "b", 1, 2),
    )
    which = [lax.axis_index(axes).reshape(1) for axes in ("a", "b", ("b", "a"))]
    return jax.tree.map(lambda x: x[None], (reduced, moved, every, each, which))


def control(x):
    """Steps by the device's number; a collective in a scan, after one and beside."""
    number = lax.axis_index(("a", "b"))
    powers = lax.while_loop(lambda c: c[0] < number, lambda c: (c[0] + 1, c[1] * 3), (0, x))[1]
    x = lax.switch(number, [lambda x: -x, lambda x: x * x], powers)
    step = lambda c, row: (lax.ppermute(c, "a", [(0, 1), (1, 0)]) + row, c.sum())  # noqa: E731
    last, sums = lax.scan(step, x[0], x)
    return last[None], sums[None], lax.cond(True, lambda x: lax.psum(x, "b"), lambda x: 2 * x, x)


def gradients(check_vma):
    def local(x, y):
        return (jnp.sin(x) * lax.psum(y * y, ("a", "b"))).sum(keepdims=True)[None]

    def loss(x, y):
        call = mapped(jax.checkpoint(local), check_vma)
        return (call(x, y) ** 2).sum()

    return jax.grad(loss, (0, 1))


CASES = {  # made in the test: `-m multigpu` imports this file where there are two devices
    "collectives": (lambda: mapped(collectives, False), (X,)),
    "control": (lambda: mapped(control, False, outs=EACH), (X,)),
    "gradients": (lambda: gradients(True), (X, 2 * X)),
    "gradients unchecked": (lambda: gradients(False), (X, 2 * X)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_xla(name):
    make, args = CASES[name]
    function = make()
    got, want = in_numpy.call(function, *args), jax.jit(function)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for have, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (have.shape, have.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(have, wanted, rtol=1e-5, atol=1e-5)


def test_programs_that_hang_on_a_gpu_raise():
    """Devices that meet in different collectives, or whose neighbour has ended."""

    def call(*ways):
        local = lambda x: lax.switch(lax.axis_index("b"), ways, x)  # noqa: E731
        return in_numpy.call(mapped(local, False), X)

    def total(x):
        return lax.psum(x, "b")

    def turned(x):
        return lax.ppermute(x, "b", [(0, 1), (1, 2), (2, 0)])

    with pytest.raises(RuntimeError, match="different collectives"):
        call(total, turned, total)
    with pytest.raises(RuntimeError, match="devices that do not come"):
        call(total, lambda x: x, lambda x: x)
