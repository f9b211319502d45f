import sys, functools, time
import jax, jax.numpy as jnp, numpy as np
from tests.support import aot, mosaic, in_numpy
import pallas_attn as pa
from pallas_attn.bench import cases
from tests.kernels.flash_bwd import test_flash_bwd as tb


def case(B, T, S, N, H, dtype="bfloat16", **kw):
    base = tb.case_named("t_equals_s") if hasattr(tb, "case_named") else None
    import dataclasses

    return dataclasses.replace(
        base, batch=B, q_len=T, kv_len=S, q_heads=N, kv_heads=N, head_dim=H, dtype=dtype, **kw
    )


def grads(q, k, v, do):
    o, vjp = jax.vjp(pa.flash_attention, q, k, v)
    return vjp(do)


def comp(*shapes, dump=None):
    for B, T, S, N, H in shapes:
        q = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
        k = jax.ShapeDtypeStruct((B, S, N, H), jnp.bfloat16)
        t0 = time.time()
        r = aot.compile_for(grads, q, k, k, q, sass=dump is not None)
        print(
            B,
            T,
            S,
            N,
            H,
            [(x.name, x.registers, x.spill_bytes, x.notes) for x in r.kernels],
            round(time.time() - t0, 1),
        )
        print(r.others, flush=True)
        if dump:
            open(dump, "w").write(r.sass)
