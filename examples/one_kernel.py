"""A whole flash-attention forward for Hopper in one kernel: where to begin with Pallas on Hopper.

The algorithm. Attention is softmax(q k^T) v, and q k^T is too large to store. So a block takes 64
rows of q and walks over the keys, 128 at a time. Of the keys that it has seen it keeps, for each
row, the largest score m, the sum l of exp(score - m), and acc, the sum of exp(score - m) v. Where a
larger score comes, m grows, and the old l and acc are multiplied by exp(old m - new m). At the end
out = acc / l (FlashAttention-2, arXiv 2307.08691, algorithm 1).

The machine. A block is two warpgroups, of 128 threads each, that share memory. The producer copies
tiles of k and v there by TMA: one instruction a tile, and the barrier that it names opens when all
bytes have come. The consumer multiplies tiles on the tensor cores by wgmma, and has m, l and acc in
registers. Tiles lie in a ring of STAGES places, so that copies run ahead. The barriers `k_ready`
and `v_ready` tell the consumer that a place is full, `free` tells the producer that it was read.

Left out: other lengths and masks, gradients, and what makes it fast. `flash_fwd/sm90.py` has two or
three consumers that share k and v and get most of the producer's registers. They take turns: the
softmax of one runs beside the matmuls of another. Scores of the next tile are computed before this
one is finished. Probabilities stay in registers (jax's interpreter wants them in shared memory).
docs/hopper_forward.md goes through it.

    python examples/one_kernel.py    # without a Hopper GPU by jax's interpreter, which finds races
"""
# ruff: noqa: T201, E741

import contextlib
import math
from types import SimpleNamespace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

ROWS, KEYS, STAGES = 64, 128, 2  # rows of q of a block; keys of a tile; tiles in the ring
PRODUCER, CONSUMER = 0, 1  # numbers of the warpgroups
TILE = plgpu.Layout.WGMMA  # how the threads of a warpgroup share the result of a matmul
ROW = TILE.reduce(1)  # how they share one number for each of its rows


def flash_attention(q, k, v):
    """Causal attention. q: bfloat16[B, T, N, H]; k, v: bfloat16[B, T, K, H]: N / K heads of q share
    one of k and v. T is a multiple of 128, H is 64 or 128.
    """
    batch, rows, heads, dim = q.shape
    if k.shape != v.shape or k.shape != (batch, rows, k.shape[2], dim) or heads % k.shape[2]:
        raise ValueError(f"k, v: expected [{batch}, {rows}, K, {dim}], got {k.shape}, {v.shape}")
    if rows % KEYS or dim not in (64, 128) or any(x.dtype != jnp.bfloat16 for x in (q, k, v)):
        raise ValueError(f"expected bfloat16, T % {KEYS} == 0, H 64 or 128, got {q.dtype}{q.shape}")

    def tiles(*shape):
        """Shared memory as TMA and wgmma want it: swizzled pieces of 8 rows by 128 bytes."""
        layout = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=layout)

    ring, barriers = tiles(STAGES, KEYS, dim), plgpu.Barrier(num_barriers=STAGES)
    shared = {"q": tiles(ROWS, dim), "k": ring, "v": ring, "p": tiles(ROWS, KEYS)}
    shared |= {"q_ready": plgpu.Barrier(), "k_ready": barriers, "v_ready": barriers}
    return plgpu.kernel(
        _block,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, rows // ROWS, batch),
        grid_names=("head", "rows", "batch"),
        num_threads=2,  # Mosaic calls a warpgroup a thread
        thread_name="warpgroup",
        scratch_types=[shared | {"free": barriers}],
        compiler_params=plgpu.CompilerParams(approx_math=True),  # exp2 is one instruction
    )(q, k, v)


def _block(q, k, v, out, shared):
    """One block of the grid, in both warpgroups: arrays in global memory, and what these share."""
    shared = SimpleNamespace(**shared)  # tiles q (at the end out) and p; rings k and v; barriers
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    # The last rows see the most keys. They go first: no long block is left alone at the end.
    first = q.shape[1] - ROWS * (lax.axis_index("rows") + 1)
    own = batch, pl.ds(first, ROWS), head
    last = first // KEYS  # the tile with the diagonal; those before it need no mask

    @pl.when(lax.axis_index("warpgroup") == PRODUCER)
    def _():
        plgpu.copy_gmem_to_smem(q.at[own], shared.q, shared.q_ready)

        @pl.loop(0, last + 1)
        def _(t):
            n, keys = t % STAGES, (batch, pl.ds(t * KEYS, KEYS), head * k.shape[2] // q.shape[2])
            pl.when(t >= STAGES)(lambda: plgpu.barrier_wait(shared.free.at[n]))
            plgpu.copy_gmem_to_smem(k.at[keys], shared.k.at[n], shared.k_ready.at[n])
            plgpu.copy_gmem_to_smem(v.at[keys], shared.v.at[n], shared.v_ready.at[n])

    def step(t, state, masked=False):
        (acc, m, l), n = state, t % STAGES
        plgpu.barrier_wait(shared.k_ready.at[n])
        s = _matmul(shared.q, shared.k.at[n].transpose((1, 0)))
        s = s * (math.log2(math.e) / math.sqrt(q.shape[3]))  # exp(x) is exp2(x log2(e))
        if masked:
            row, key = (plgpu.broadcasted_iota(jnp.int32, s.shape, i, layout=TILE) for i in (0, 1))
            s = jnp.where(first + row >= t * KEYS + key, s, -jnp.inf)
        new_m = jnp.maximum(m, s.max(axis=1))
        p, shrunk = jnp.exp2(s - _across(new_m, s)), jnp.exp2(m - new_m)
        shared.p[...] = p.astype(jnp.bfloat16)
        plgpu.commit_smem()  # tensor cores and TMA see what threads have stored only after this
        plgpu.barrier_wait(shared.v_ready.at[n])
        acc = acc * _across(shrunk, acc) + _matmul(shared.p, shared.v.at[n])
        # Hands the place back, if a later tile comes to it.
        pl.when(t + STAGES <= last)(lambda: plgpu.barrier_arrive(shared.free.at[n]))
        return acc, new_m, l * shrunk + p.sum(axis=1)

    @pl.when(lax.axis_index("warpgroup") == CONSUMER)
    def _():
        plgpu.barrier_wait(shared.q_ready)
        state = (shared.q.shape, 0, TILE), (ROWS, -jnp.inf, ROW), (ROWS, 0, ROW)  # acc, m, l
        state = tuple(plgpu.layout_cast(jnp.full(n, x, "float32"), how) for n, x, how in state)
        acc, _, l = step(last, lax.fori_loop(0, last, step, state), masked=True)
        shared.q[...] = (acc / _across(l, acc)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared.q, out.at[own])
        plgpu.wait_smem_to_gmem(0)  # shared memory has to live until it was read


def _matmul(a, b):
    """float32[rows of a, columns of b]. The accumulator begins at 0; to read it is to wait."""
    add = lambda acc: (plgpu.wgmma(acc, a, b), acc[...])[1]  # noqa: E731
    return pl.run_scoped(add, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _across(x, tile):
    """A number a row, repeated in every column of a tile."""
    return lax.broadcast_in_dim(x, tile.shape, [0])


def main():
    hopper = getattr(jax.devices()[0], "compute_capability", None) == "9.0"
    rows, heads, dim = (4096, 16, 128) if hopper else (384, 2, 64)
    interpreter = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))
    where = contextlib.nullcontext() if hopper else interpreter
    with where, jax.default_device(jax.devices(None if hopper else "cpu")[0]):
        qkv = jax.random.normal(jax.random.key(0), (3, 1, rows, heads, dim), jnp.bfloat16)
        q, k, v = qkv[0], *qkv[1:, :, :, : heads // 2]
        out = jax.jit(flash_attention)(q, k, v).astype(jnp.float32)
        wanted = jax.nn.dot_product_attention(*map(jnp.float32, (q, k, v)), is_causal=True)
    error = float(jnp.abs(out - wanted).max())
    print(f"{q.dtype}{q.shape}", "on a Hopper GPU" if hopper else "in the interpreter")
    print(f"largest difference from float32: {error:.4f}")
    assert error < 0.02


if __name__ == "__main__":
    main()
