"""`quantize_qkv` under vmap, in `jax.shard_map` and with sharded inputs, with the reference in a
kernel's place: the same bytes, and no communication.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from pallas_attn._call import device, dispatch
from tests.parallel.test_kernels_batched_and_sharded import InPlaceOfAKernel
from tests.support import mosaic
from tests.support.append_cases import assert_same_bytes

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

REFERENCE = dispatch.TABLES["quantize"][-1]


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    kernel = InPlaceOfAKernel("quantize")
    monkeypatch.setitem(dispatch.TABLES, "quantize", (kernel, REFERENCE))


def draw(*lead, kv_heads=4):
    rng = np.random.default_rng(0)
    shapes = (6, 8, 16), (7, kv_heads, 16), (7, kv_heads, 24)
    return [jnp.asarray(rng.standard_normal((*lead, *shape), np.float32)) for shape in shapes]


def rounded(q, k, v, ends=None, implementation=None):
    options = {"rows": 3, "kv_lengths": ends, "implementation": implementation}
    return tuple(pa.quantize_qkv(q, k, v, **options))


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (1, None, None, None), (None, 0, None, None)])
def test_vmap(axes):
    arrays = [x if axis is not None else x[0] for x, axis in zip(draw(3, 2), axes, strict=False)]
    arrays[0] = arrays[0].swapaxes(0, 1) if axes[0] == 1 else arrays[0]
    ends = jnp.arange(6, dtype=jnp.int32).reshape(3, 2)
    arrays.append(ends if axes[3] == 0 else ends[2])
    got = jax.vmap(rounded, axes)(*arrays)

    def alone(i):
        each = zip(arrays, axes, strict=True)
        own = [x if axis is None else np.take(np.asarray(x), i, axis) for x, axis in each]
        return rounded(*map(jnp.asarray, own), implementation="reference")

    wanted = jax.tree.map(lambda *x: np.stack(x), *[alone(i) for i in range(3)])
    assert_same_bytes(got, wanted)


@pytest.mark.by_xla
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_jit_with_sharded_inputs_needs_no_communication(kind, kv_heads):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    arrays = draw(4, kv_heads=kv_heads)
    spec = P("x", None, "y")
    specs = (spec, *[spec if kv_heads > 1 else P("x")] * 2)
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    compiled = jax.jit(rounded).lower(*placed).compile()
    assert_same_bytes(compiled(*placed), rounded(*arrays, implementation="reference"))
    program = compiled.as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert f"{collective}(" not in program


@pytest.mark.by_xla
def test_shard_map():
    auto = (AxisType.Auto,) * 2
    mesh, spec = jax.make_mesh((2, 4), ("x", "y"), axis_types=auto), P("x", None, "y")
    arrays = draw(4)
    mapped = jax.shard_map(rounded, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 6)
    got = jax.jit(mapped)(*arrays)
    assert_same_bytes(got, rounded(*arrays, implementation="reference"))


@pytest.mark.guards
def test_the_kernel_lowers_under_transforms(monkeypatch):
    monkeypatch.undo()
    shapes = [jax.ShapeDtypeStruct((2, 2, 256, heads, 64), jnp.bfloat16) for heads in (8, 4, 4)]
    with device.assume("sm90"):
        text = mosaic.lower_for_cuda(jax.vmap(lambda *x: tuple(pa.quantize_qkv(*x))), *shapes)
    assert text.count("@mosaic_gpu") == 1
