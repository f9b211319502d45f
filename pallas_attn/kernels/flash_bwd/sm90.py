"""Flash attention backward for Hopper, bfloat16, float16 and float32.

Five matmuls a tile, as FlashAttention-2 (arXiv 2307.08691) orders them: a block owns 128 keys and
walks over the query tiles that meet them, dK and dV stay in registers, and what the tile adds to dQ
goes to a float32 array in global memory, see `sm90_dq_sum`. XLA makes `delta` before and rounds
dQ after.

Grid: one block a multiprocessor, which takes the tiles of work that `flash_bwd_plan.dealt` gave it.
A tile of work is 128 keys of one kv head, over the query heads of its group: dk and dv are summed
over the group where they are. Two warpgroups compute, 64 keys each, and one loads.

A step (`sm90_step`) is one query tile. Tiles of scores have keys down and queries across, so
P^T and dS^T are register operands of the matmuls for dV and dK; for dQ both warpgroups put their
half of dS in shared memory, and each takes a half of dQ when the other has. A warpgroup has more to
do than the tensor cores and waits for its own instructions, not for them: one's matmuls have to run
under the other's arithmetic, so each may be almost a step ahead of the other.

Query tiles of 64: dQ of a step comes at the beginning of the next or, where shared memory has room,
of the one after that (`lag`). S begins with -lse and dP with -delta, so neither is waited for.
  dQ of a step before, S of this one  |  dQ off, under S
  dP                                  |  P = exp(S - lse), under dP
  dV                                  |  dS = P (dP - delta), to shared memory, under dV
  dK                                  |  the meeting, under dK
Query tiles of 128: dQ of a step comes at the end of the next. At the beginning of it warpgroups
waited for each other after S and did the same at the same time.
  S                                   |
  dP                                  |  P = exp(S - lse), under dP
  dV                                  |  dS = P (dP - delta), to shared memory, under dV
  dQ of the step before, dK           |  dQ off, under dK

Shared memory, and who owns it when:
  k, v [warpgroup]   filled for a tile of work; `keys_free` when both warpgroups are done, or have
                     sent off dk and dv, where these leave through the same place
  q, do [stages]     rings of query tiles with their lse and delta; `q_ready`, `do_ready` when they
                     have landed, `q_free`, `do_free` when both warpgroups have let go of them
  ds [2 lag, warpgroup]  by turns, so that one meeting a step is enough, but where dQ comes at the
                     end: there `ds_free` says that both warpgroups have read it. Of 64 query rows
                     each. dk and dv leave through them where they fit: see `sm90_dkdv_store`
  dq [warpgroup]     on its way to global memory, where it goes by way of TMA
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.flash_bwd import dbias, sm90_dkdv, sm90_dq, sm90_window
from pallas_attn.kernels.flash_bwd import plan as shared
from pallas_attn.kernels.flash_bwd import sm90_dkdv_store as keys
from pallas_attn.kernels.flash_bwd import sm90_dq_sum as sums
from pallas_attn.kernels.flash_bwd import sm90_step as steps
from pallas_attn.kernels.flash_bwd.plan import ROWS, Plan, Refs
from pallas_attn.kernels.flash_fwd import sm90 as flash_fwd_sm90
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import check

WARPGROUPS = 2  # that compute
SMEM_LIMIT = flash_fwd_sm90.SMEM_LIMIT
BARRIERS = flash_fwd_sm90.BARRIERS


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    block_q: int = 64
    stages: int = 2
    fused: bool = True  # dq is added up in global memory; else, and if dims are wide, see `_dq`
    section: int = 0  # heads whose tiles of work are taken together; 0: see Plan.section
    ctas: int = 132  # blocks; 0: one a tile of work
    dq_block_kv: int = 64  # of the kernel for dq alone
    dq_stages: int = 2
    lag: int = 1  # steps between dS and its dQ: 2, of query tiles of 64, let warpgroups drift apart
    dq_warpgroups: int = 2
    held: bool = False  # half of K in registers: head dims up to 128, query tiles of 64
    band: bool = False  # all by one kernel, which takes few problems: see `sm90_window`

    def __post_init__(self):
        blocks = (64, 128) if self.fused else (16, 32, 64, 128)
        lags = (1,) if self.block_q == 128 else (1, 2)
        check(
            self,
            block_q=(self.block_q in blocks, "64 or 128, or, if it is not fused, 16 or 32"),
            stages=(self.stages >= 2, "at least 2"),
            section=(self.section >= 0, "at least 0"),
            ctas=(self.ctas >= 0, "at least 0"),
            dq_block_kv=(self.dq_block_kv in (32, 64, 128), "32, 64 or 128"),
            dq_stages=(self.dq_stages >= 2, "at least 2"),
            lag=(self.lag in lags, " or ".join(map(str, lags))),
            dq_warpgroups=(self.dq_warpgroups in (1, 2, 3), "1, 2 or 3"),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """What serves a problem that nobody tuned."""
        if problem.dtype == "float32":
            return _float32(problem)
        if sm90_window.takes(problem):
            return cls(band=True)
        if is_wide(problem):
            return _wide(problem)
        config = cls(dq_stages=3, lag=2, held=True)
        if max(problem.head_dim, problem.v_head_dim) <= 64:
            config = cls(128, dq_stages=4, dq_warpgroups=3)
        # A float32 dq is set to 0 before and rounded after, which few query rows a key do not pay
        # for. Nor is it for blocks that add to more of it at a time than L2 holds.
        plan = plan_of(problem, config)
        return dataclasses.replace(config, fused=plan.reach > 512 and not plan.scattered)


def is_wide(problem: AttentionProblem) -> bool:
    """Whether dK and dV of 64 keys are too much for one warpgroup, or k and v of 128 for shared
    memory.
    """
    return max(problem.head_dim, problem.v_head_dim) > 128 or problem.dtype == "float32"


def limit(problem: AttentionProblem) -> Limit | None:
    return flash_fwd_sm90.limit(problem)


def _wide(problem: AttentionProblem) -> Config:
    """As many tiles on their way as fit: two warpgroups hold a query tile, one after the other."""
    best = Config(fused=False)
    for stages in (3, 4):
        config = dataclasses.replace(best, stages=stages)
        if sm90_dkdv.buffer_bytes(plan_of(problem, config)) + BARRIERS <= SMEM_LIMIT:
            best = config
    config = dataclasses.replace(best, dq_stages=3)
    fits = sm90_dq.buffer_bytes(_dq_plan(problem, config)) + BARRIERS <= SMEM_LIMIT
    return config if fits else best


# Of float32, the largest first: warpgroups, keys of a tile, stages.
_DQ_TILES = ((2, 64, 3), (2, 64, 2), (2, 32, 2), (1, 32, 2))


def _float32(problem: AttentionProblem) -> Config:
    """The largest tiles that fit, of each kernel."""
    found = []
    for block_q, stages in ((64, 3), (128, 2), (64, 2), (32, 2), (16, 2)):
        config = Config(block_q=block_q, stages=stages, fused=False)
        if sm90_dkdv.buffer_bytes(plan_of(problem, config)) + BARRIERS <= SMEM_LIMIT:
            found.append(config)
    for warpgroups, block_kv, stages in _DQ_TILES:
        changes: dict[str, Any] = {
            "dq_block_kv": block_kv,
            "dq_stages": stages,
            "dq_warpgroups": warpgroups,
        }
        config = dataclasses.replace(found[0], **changes)
        fits = sm90_dq.buffer_bytes(_dq_plan(problem, config)) + BARRIERS <= SMEM_LIMIT
        if fits:
            break
    return config


class Smem(NamedTuple):
    k: Any
    v: Any
    q: Any
    do: Any
    ds: Any
    dq: Any
    rows: Any
    numbers: Any
    keys_ready: Any
    keys_free: Any
    q_ready: Any
    do_ready: Any
    q_free: Any
    do_free: Any
    met: Any
    ds_free: Any

    @property
    def lse(self) -> Any:
        return self.rows.at[0]

    @property
    def delta(self) -> Any:
        return self.rows.at[1]


def scratch(plan: Plan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    config, dtype = plan.config, jnp.dtype(plan.problem.dtype)
    k_width, barrier = sums.k_width(plan), plgpu.Barrier
    stages, block, turns = config.stages, config.block_q, 2 * config.lag
    ring = {"num_barriers": stages}
    return Smem(
        k=mosaic.swizzled((WARPGROUPS, ROWS, k_width), dtype, plan.k_swizzle),
        v=mosaic.swizzled((WARPGROUPS, ROWS, plan.v_width), dtype, plan.v_swizzle),
        q=mosaic.swizzled((stages, block, k_width), dtype, plan.k_swizzle),
        do=mosaic.swizzled((stages, block, plan.v_width), dtype, plan.v_swizzle),
        ds=mosaic.swizzled(  # as k's
            (turns, WARPGROUPS, block // ROWS, ROWS, ROWS), dtype, plan.k_swizzle
        ),
        dq=sums.staged(plan),
        rows=plgpu.SMEM((2, stages, block), jnp.float32),
        numbers=plgpu.SMEM((block,), jnp.int32),
        keys_ready=barrier(num_arrivals=2 * WARPGROUPS),
        keys_free=barrier(num_arrivals=WARPGROUPS),
        q_ready=barrier(num_arrivals=2, **ring),
        do_ready=barrier(num_arrivals=2, **ring),
        q_free=barrier(num_arrivals=WARPGROUPS, **ring),
        do_free=barrier(num_arrivals=WARPGROUPS, **ring),
        met=barrier(num_arrivals=WARPGROUPS, num_barriers=config.lag),
        ds_free=barrier(num_arrivals=WARPGROUPS, num_barriers=2),
    )


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Of the kernel that needs most."""
    plan = plan_of(problem, config)
    if config.band:
        return 2 * (sm90_window.buffer_bytes(plan) + sm90_window.RESERVED)
    if is_wide(problem):
        most = sm90_dkdv.buffer_bytes(plan)
    else:
        buffers = [buffer for buffer in scratch(plan)[:8] if buffer is not None]
        sizes = (math.prod(b.shape) * jnp.dtype(b.dtype).itemsize for b in buffers)
        most = sum(tma_operands.round_up(size, 1024) for size in sizes)  # as Mosaic lays them out
    if not _is_fused(problem, config):
        most = max(most, sm90_dq.buffer_bytes(_dq_plan(problem, config)))
    return most + BARRIERS


def plan_of(problem: AttentionProblem, config: Config) -> Plan:
    if config.band:
        if not sm90_window.takes(problem):
            raise ValueError(f"Config.band: not for {problem}")
        return Plan(problem, dataclasses.replace(config, block_q=ROWS), ROWS)
    return Plan(problem, config, sm90_dkdv.KEYS if is_wide(problem) else WARPGROUPS * ROWS)


def _dq_plan(problem: AttentionProblem, config: Config) -> Any:
    by_rows = flash_fwd_sm90.Config(
        config.dq_warpgroups, config.dq_block_kv, config.dq_stages, 0, config.ctas
    )
    return attention_plan.Plan(problem, by_rows)


def _is_fused(problem: AttentionProblem, config: Config) -> bool:
    return config.fused and not is_wide(problem) and not problem.deterministic


# ---- loading ------------------------------------------------------------------------------------


def _load(plan: Plan, refs: Refs, smem: Smem, cta: Any) -> None:
    """The loading warpgroup: keys and query tiles of every tile of work, in order."""

    def keys_of(n, item):
        pl.when(n > 0)(lambda: plgpu.barrier_wait(smem.keys_free))
        for wg in range(WARPGROUPS):
            for name, to in (("k", smem.k), ("v", smem.v)):
                place = (wg * ROWS, to.at[wg], smem.keys_ready)
                shared.load_keys(plan, refs, item, name, place)

    shared.load_all(plan, refs, smem, cta, keys_of)


# ---- computing ----------------------------------------------------------------------------------


def _compute(plan: Plan, refs: Refs, smem: Smem, outs: Any, place: tuple[Any, Any]) -> None:
    """A computing warpgroup: every tile of work of its block."""
    cta, wg = place

    @pl.when(wg == 0)
    def _():
        block = (plan.config.block_q,)
        smem.numbers[...] = plgpu.broadcasted_iota(jnp.int32, block, 0, layout=mosaic.COLUMN)
        plgpu.commit_smem()

    keys.meet(smem)

    def one_item(n, carry):
        count, code = carry
        following = refs.dealt[cta, n + 2]  # asked for long before it is needed
        item = shared.item_of(plan, refs, code)
        plgpu.barrier_wait(smem.keys_ready)
        dk, dv, count = steps.attend(plan, refs, smem, (item, wg), count)
        keys.leave(plan, smem, outs, (item, wg), (dk * plan.problem.scale, dv))
        return count, following

    lax.fori_loop(0, refs.dealt[cta, 0], one_item, (jnp.int32(0), refs.dealt[cta, 1]))
    plgpu.wait_smem_to_gmem(0)


def _kernel(refs: Refs, dk_ref: Any, dv_ref: Any, smem: Smem, *, plan: Plan) -> None:
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    load = functools.partial(_load, plan, refs, smem, cta)
    compute = functools.partial(_compute, plan, refs, smem, (dk_ref, dv_ref), (cta, wg))
    mosaic.share_registers(wg, WARPGROUPS, load, compute, 240)


# ---- the call -----------------------------------------------------------------------------------


def run(residuals: Any, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    inputs, *rest = residuals
    plan = plan_of(problem, config)
    # Whole tiles, of either size, and what is read of numbers beyond the last.
    rows = tma_operands.round_up(problem.q_len + max(0, 32 - config.block_q), 2 * ROWS)
    rows = max(rows, _dq_plan(problem, config).padded_rows)
    if config.band:
        rows = sm90_window.padded_rows(problem)
    stats = shared.row_numbers(plan, rows, inputs, rest)
    refs = shared.operands_of(plan, inputs, rest[2], stats)
    dq = None
    if config.band:
        dq, dk, dv = sm90_window.dq_dk_dv(plan, refs)
        dq = dq[:, : problem.q_len, :, : problem.head_dim]
    elif is_wide(problem):
        dk, dv = sm90_dkdv.dk_dv(plan, refs)
    elif _is_fused(problem, config):
        sum_of_dq = jax.new_ref(sums.zeros(plan, refs.q.shape[0]))
        dq, dk, dv = _dq_dk_dv(plan, steps.numbers(plan, refs._replace(dq=sum_of_dq)))
    else:
        _, dk, dv = _dq_dk_dv(plan, refs)
    if dq is None:
        by_rows, refs = _dq_plan(problem, config), shared.after(refs, dk)
        dq = sm90_dq.dq_of(by_rows, sm90_dq.operands_of(by_rows, inputs, refs))
    dk = dk[:, : problem.kv_len, :, : problem.head_dim]
    dv = dv[:, : problem.kv_len, :, : problem.v_head_dim]
    others = {}
    if inputs.bias is not None:
        by_tiles = dbias.plan_of(problem, flash_fwd_sm90.Config)
        by_tiles_refs = sm90_dq.operands_of(by_tiles, inputs, shared.after(refs, dq))
        others["bias"] = dbias.dbias_of(by_tiles, inputs, by_tiles_refs)
    if inputs.sinks is not None:
        others["sinks"] = shared.dsinks(inputs.sinks, rest[1], stats[1][:, :, : problem.q_len])
    return AttentionInputs(q=dq, k=dk, v=dv, **others)


def _dq_dk_dv(plan: Plan, refs: Refs) -> tuple[Any, Any, Any]:
    """dq (None where refs.dq is), and dk and dv, padded as refs.k and refs.v are."""
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=tuple(
            jax.ShapeDtypeStruct((*x.shape[:3], tma_operands.width_in_tma(x.shape[3])), x.dtype)
            for x in (refs.k, refs.v)
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_sm90",
    )
    dk, dv = kernel(refs)
    if refs.dq is None:
        return None, dk, dv
    return sums.rounded(plan, jax.freeze(refs.dq)), dk, dv
