"""Kernels on a machine without a GPU: JAX's Mosaic GPU interpreter, made to run what these kernels
use.

Beside tests/support/hazards.py the one file of the tests that knows the private modules of JAX's
interpreter (tests/support/watch.py names what waits in them). `interpret()` is what a test uses,
beside `lower_for_cuda` and, from tests/support/aot.py, `compile_for`. What is taught to the
interpreter, in both JAX versions alike:

- programs of `thread_program.each_thread`: run in NumPy, 128 threads at a time, with bounds and
  races checked byte by byte; inline code that brings a twin in NumPy, which runs in its place
- `pl.run_state` over accumulators, wgmma with its left operand in registers, values assigned to an
  accumulator, `mma`
- what wgmma and reductions by TMA read in shared memory, from when they are issued until they are
  waited for; an accumulator that is loaded while a matmul still adds to it is an error
- hazards between the warps of a warpgroup (tests/support/hazards.py)
- races of every launch of a program: JAX 0.11.2 keeps those of the last one alone
- cp.async (a copy without a barrier), stores with a predicate, reductions and atomics in global
  memory
- programmatic dependent launch, which means nothing here
- a launch computed in NumPy (tests/support/in_numpy.py): XLA takes longer to compile it than it
runs
- the views of one buffer in a `RefUnion` that differ in transforms alone (`lang/panels.py`): JAX
  gives each a buffer of its own, and refuses to read by one what was written by another
- JAX 0.11.2 only: a producer need not see the last time its slots were freed (0.12 allows it too)
"""

import contextlib
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import callback, core, pjit, source_info_util
from jax._src.interpreters import mlir
from jax._src.pallas import mpmd, pallas_call
from jax._src.pallas.mosaic.interpret import thread_map, vector_clock
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering, pallas_call_registration
from jax._src.pallas.mosaic_gpu import primitives as prims
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as host
from jax._src.pallas.mosaic_gpu.interpret import (
    interpret_pallas_call,
    jaxpr_interpret,
    race_detection_state,
    shared_memory,
)
from jax._src.state import discharge, indexing
from jax._src.state import types as state
from jax.experimental.mosaic.gpu.core import artificial_shared_memory_limit
from jax.experimental.mosaic.gpu.utils import MBARRIER_BYTES

from tests.support import hazards, in_numpy, races, watch
from tests.support.aot import Report, compile_for, name_kernels
from tests.support.threads import BlockOfThreads, Memory

__all__ = ["Report", "compile_for", "interpret", "lower_for_cuda"]


@contextlib.contextmanager
def interpret(patience: float = 20) -> Iterator[None]:
    """Kernels traced in here run on the CPU, simulated. A race, a barrier left half-way, a wild
    access or a deadlock of `patience` seconds is an error.
    """
    global _watch
    _teach()
    _races.clear()
    host.reset_gpu_interpret_mode_state()
    clocks = hazards.CLOCKS
    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=clocks)
    _watch = watch.Watch(patience, _end)
    try:
        with (
            _watch.watching(),
            plgpu.force_gpu_interpret_mode(params),
            jax.default_device(jax.devices("cpu")[0]),
        ):
            yield
            jax.effects_barrier()
        raced = bool(_races)  # 0.11.2 prints them
    except jax.errors.JaxRuntimeError as e:
        raced = "RACE DETECTED" in str(e)  # 0.12 raises it
        if not raced:
            raise
    finally:
        host.reset_gpu_interpret_mode_state()  # after an exception it would refuse to go on
    if raced:
        raise AssertionError("RACE DETECTED: the interpreter says where, above")


# A test that runs alike in the interpreter and, with `-m gpu`, on a GPU: `with where():`.
here_and_on_a_gpu = pytest.mark.parametrize(
    "where",
    [
        pytest.param(interpret, id="interpreted", marks=pytest.mark.guards),
        pytest.param(contextlib.nullcontext, id="gpu", marks=pytest.mark.gpu),
    ],
)

_watch = watch.Watch(0, print)
_races: list[str] = []  # threads in which races were found, of all launches


def without_numbers() -> None:
    """Takes a number out of the text of kernels, which jax 0.11.2 counts in each process: processes
    that lower kernels in other orders would find none of them in jax's persistent cache.
    """
    name_kernels(lambda: "kernel")


def _end(error: Exception) -> None:
    """Fails the kernel: who waits is woken, and told."""
    host.fail(error, token=0)
    ours = host._get_shared_memory()
    for gate in ours.launch_memory.gates.values() if hasattr(ours, "launch_memory") else ():
        gate.abort()


def lower_for_cuda(f: Callable[..., Any], *shapes: Any, smem_bytes: int | None = None) -> str:
    """`f` lowered for an NVIDIA GPU (sm_90, or one with less shared memory a block): finds layouts
    and shared memory that do not fit, and missing primitives.
    """
    with artificial_shared_memory_limit(smem_bytes):
        return _lowered(f, *shapes)


def _lowered(f: Callable[..., Any], *shapes: Any) -> str:
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


class _LoweredError(Exception):
    """A program has been lowered."""


@contextlib.contextmanager
def lowered_alone() -> Iterator[None]:
    """The first program with a launch that would run in here is lowered for an NVIDIA GPU, as
    `lower_for_cuda` does; with that the block ends. Without such a program it fails.
    """
    run = pjit._pjit_call_impl_python

    def lower(*args, jaxpr, **params):
        if not _launches(jaxpr):
            return run(*args, jaxpr=jaxpr, **params)
        _lowered(core.jaxpr_as_fun(jaxpr), *args)
        raise _LoweredError

    with mock.patch.object(pjit, "_pjit_call_impl_python", lower):
        try:
            yield
        except _LoweredError:
            return
    raise AssertionError("no program with a launch was run")


def _launches(jaxpr: Any) -> bool:
    return any(
        eqn.primitive is mpmd.mpmd_map_p or any(map(_launches, core.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


@contextlib.contextmanager
def launches_noted(note: Callable[[str, int], None]) -> Iterator[None]:
    """Calls `note(name, bytes of shared memory)` for each launch that is traced in here, as Mosaic
    allocates it for a block. A launch is lowered to zeros.
    """
    bind = mpmd.mpmd_map_p.bind

    def traced(*args, **params):
        (jaxpr,), (mesh,) = params["jaxprs"], params["meshes"]
        if isinstance(mesh, gpu_core.Mesh):  # not that of a part of a kernel
            how = params["compiler_params"] or gpu_core.CompilerParams()
            axes = (mesh.grid_names, mesh.cluster_names, mesh.thread_name)
            facts = lowering.ResourceEstimatorContext(
                axis_names=lowering._AxisNames(*axes),
                reduction_scratch_bytes=how.reduction_scratch_bytes,
                lowering_semantics=how.lowering_semantics,
            )
            need = lowering._estimate_resources(facts, jaxpr)
            barriers = sum(barrier.num_barriers for barrier in need.barriers)
            note(params["name"], need.smem_scratch_bytes + MBARRIER_BYTES * barriers)
        return bind(*args, **params)

    def zeros(ctx, *args, **params):
        del args, params
        return [mlir.full_like_aval(ctx, 0, aval) for aval in ctx.avals_out]

    rule = mock.patch.object(pallas_call_registration, "mpmd_map_mgpu_lowering_rule", zeros)
    with mock.patch.object(mpmd.mpmd_map_p, "bind", traced), rule:
        yield


# ---- programs of thread_program.each_thread, run in NumPy ---------------------------------------


class _Program(NamedTuple):
    """A program of single threads, as it is called."""

    run: Callable[..., Any]
    trees: tuple[Any, Any]  # trees of its refs and scalars
    returns_one: bool
    source_info: Any


@host.fail_on_exception
def _run_program(*, token, mesh_location, thread, keys, scalars, program):
    ours = host._get_shared_memory()
    if not hasattr(ours, "launch_memory"):
        ours.launch_memory = Memory()
    coordinates = _coordinates(mesh_location)
    arrays = [_content(ours, key) for key in keys]
    pairs = zip(map(_shared_key, keys), arrays, strict=True)
    shared = [(key, array) for key, array in pairs if key is not None]
    touches = hazards.Program(ours, thread, shared, program.source_info)
    first = ours.launch_memory.block(*coordinates, int(mesh_location.thread_id))
    if touches.has_met:
        ours.launch_memory.since_meeting.pop(first, None)
    block = BlockOfThreads(first, ours.launch_memory, coordinates, touches)
    block.stores_in_flight = bool(ours.pending_smem_to_gmem_write_clocks.get(thread))
    spread = [np.full(128, scalar, np.int32) for scalar in scalars]
    refs, values = (
        jax.tree.unflatten(tree, leaves)
        for tree, leaves in zip(program.trees, (arrays, spread), strict=True)
    )
    with np.errstate(all="ignore"):  # NaN and infinity are none of an error on a GPU
        result = program.run(block, refs, values)
    touches.end()
    if result is None:
        return token
    result = np.asarray(result, np.int32)
    return token, [result.reshape(-1)[0] if program.returns_one else result]


def _coordinates(mesh_location):
    place = (*np.ravel(mesh_location.cluster_coords), *np.ravel(mesh_location.block_coords))
    return tuple(map(int, place))


def _shared_key(key):
    """The key of a whole array in shared memory, else None."""
    known = shared_memory.HostAllocationKey.from_array(key[:KEY_SIZE])
    whole = key.size == KEY_SIZE and known.memory_space_id == hazards.SHARED
    return known if whole else None


@host.fail_on_exception
def _run_twin(*, token, thread, args, inline, is_ref, results, source_info):
    ours, who = host._get_shared_memory(), {"thread": thread, "source_info": source_info}
    issued = _matmuls_of(ours, thread) if hasattr(inline, "is_matmul") else None
    leaves, tree = jax.tree.flatten(args)

    def argument(leaf, is_ref):
        if not is_ref:
            return np.asarray(leaf)
        array, key = _content(ours, leaf), leaf[:KEY_SIZE]
        key = shared_memory.HostAllocationKey.from_array(key)
        if key.memory_space_id != hazards.SHARED:
            return array
        if issued is not None:  # it belongs to the next matmul
            place = [slice(int(n), int(n) + 1) for n in leaf[KEY_SIZE:]]
            there = interpret_utils.Access((*place, *(slice(0, n) for n in array.shape)))
            issued.open.append((key, there, source_info))
            return array
        return hazards.Watched(array, key, tuple(map(int, leaf[KEY_SIZE:])), who)

    values = list(map(argument, leaves, is_ref))
    with np.errstate(all="ignore"), _one_update_at_a_time:
        result = inline.twin(*jax.tree.unflatten(tree, values))
    return token, jax.tree.leaves(result) if results else []


def _shape_of(aval):
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


KEY_SIZE = len(dataclasses.fields(shared_memory.HostAllocationKey))
ON_PEER = -1  # in place of the place on the first axis, before the number of the device

# Another device's counterpart of an array of this one, by the array and the device's number.
_peers: Callable[[np.ndarray, int], np.ndarray] | None = None


@contextlib.contextmanager
def with_peers(peers: Callable[[np.ndarray, int], np.ndarray]) -> Iterator[None]:
    """Kernels interpreted in here run on one device of several: what they read or write on another
    one is `peers(what is here, the other's number)`.
    """
    global _peers
    _peers = peers
    try:
        yield
    finally:
        _peers = None


def _content(ours, key):
    """An array in memory; where places follow its key, what its first axes have there; where
    `ON_PEER` and a device do, what that device has.
    """
    array = ours.mem[shared_memory.HostAllocationKey.from_array(key[:KEY_SIZE])].content
    if key.size == KEY_SIZE + 2 and key[-2] == ON_PEER:
        assert _peers is not None
        return _peers(array, int(key[-1]))
    return array if key.size == KEY_SIZE else array[tuple(map(int, key[KEY_SIZE:]))]


def _args_of(eqn, get_values):
    """The arguments of inline code; of a union of refs, the key of the member that is meant, and of
    a part of an array, the places on its first axes behind the key.
    """
    tree, values = eqn.params["pytree_args"], get_values()
    count = tree.num_leaves
    transforms = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], values[count:])
    args = []
    for var, value, some in zip(eqn.invars[:count], values[:count], transforms, strict=True):
        value, rest = jaxpr_interpret.resolve_ref(var.aval, value, some or ())
        for indexer in (x for x in rest if isinstance(x, indexing.NDIndexer)):
            places = [x for x in indexer.indices if not isinstance(x, indexing.Slice)]
            whole = indexer.indices[len(places) :]
            assert all(x.start == 0 for x in whole)
            places = [jnp.asarray(place, value.dtype)[None] for place in places]
            value = lax.concatenate([value, *places], 0)
        for peer in (x for x in rest if isinstance(x, gpu_core.PeerMemRef)):
            number = lax.convert_element_type(jax.tree.leaves(peer.device_id)[-1], value.dtype)
            mark = lax.full((1,), ON_PEER, value.dtype)
            value = lax.concatenate([value, mark, number[None]], 0)
        args.append(value)
    return jax.tree.unflatten(tree, args)


def _inline_mgpu(self, eqn, token, get_values):
    """Runs a program of `each_thread`, or what the code says it means in jax.numpy; any other
    inline code is refused, as JAX does.
    """
    if (matmuls := getattr(eqn.params["mgpu_fn"], "matmuls", None)) is not None:
        (used,) = _args_of(eqn, get_values)
        mark = functools.partial(_mark_unused, matmuls=matmuls)
        like = host.TOKEN_SHAPE_DTYPE
        return callback.io_callback(mark, like, token=token, thread=self.thread, used=used), []
    if (stores := getattr(eqn.params["mgpu_fn"], "stores", None)) is not None:
        mark = functools.partial(hazards.let_overwrite, stores=stores)
        like = host.TOKEN_SHAPE_DTYPE
        return callback.io_callback(mark, like, token=token, thread=self.thread), []
    if (values := getattr(eqn.params["mgpu_fn"], "values", None)) is not None:
        result = values(*_args_of(eqn, get_values))
        return token, jax.tree.leaves(result)
    if hasattr(eqn.params["mgpu_fn"], "twin"):
        args = _args_of(eqn, get_values)
        is_ref = [isinstance(kind, plgpu.RefType) for kind in eqn.params["flat_arg_types"]]
        token, results = callback.io_callback(
            functools.partial(
                _run_twin,
                inline=eqn.params["mgpu_fn"],
                is_ref=is_ref,
                results=len(eqn.outvars),
                source_info=eqn.source_info,
            ),
            (host.TOKEN_SHAPE_DTYPE, [_shape_of(var.aval) for var in eqn.outvars]),
            token=token,
            thread=self.thread,
            args=args,
        )
        return token, results
    program = getattr(eqn.params["mgpu_fn"], "program", None)
    if program is None:
        return _jax_inline_mgpu(self, eqn, token, get_values)
    refs, scalars = _args_of(eqn, get_values)
    trees = jax.tree.structure(refs), jax.tree.structure(scalars)
    results = [_shape_of(var.aval) for var in eqn.outvars]
    returns_one = bool(results) and results[0].shape == ()
    program = _Program(program, trees, returns_one, eqn.source_info)
    result = callback.io_callback(
        functools.partial(_run_program, program=program),
        (host.TOKEN_SHAPE_DTYPE, results) if results else host.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        keys=jax.tree.leaves(refs),
        scalars=jax.tree.leaves(scalars),
    )
    return result if results else (result, [])


_jax_inline_mgpu = jaxpr_interpret.JaxprInterpreter._interpret_inline_mgpu_p


def _resolve_ref(aval, key, transforms):
    """JAX's, but views of the same numbers at the same place of a union are one buffer, that of the
    last view, also where one view has more axes: all of its last ones are then copied at once.
    """
    if not isinstance(aval, gpu_core.AbstractRefUnion):
        return _jax_resolve_ref(aval, key, transforms)
    extract, *rest = transforms
    members = [
        (member.transforms[0], jaxpr_interpret._member_inner_aval(member).shape)
        for member in jaxpr_interpret.union_members(aval)
    ]
    ((view, shape),) = [x for x in members if x[0] == extract]
    place = view.offset, view.dtype, np.prod(shape)
    alike = [
        number
        for number, (other, sizes) in enumerate(members)
        if (other.offset, other.dtype, np.prod(sizes)) == place
    ]
    whole = members[alike[-1]][1]
    if shape != whole:
        (indexer,) = (x for x in rest if isinstance(x, indexing.NDIndexer))
        kept = indexer.indices[: len(shape) - 3]
        assert all(x.start == 0 and x.size in shape for x in indexer.indices[len(kept) :])
        some = [indexing.Slice(0, size) for size in whole[len(kept) :]]
        rest = [indexing.NDIndexer.from_indices_shape((*kept, *some), whole)]
    return key[alike[-1]], tuple(rest)


_jax_resolve_ref = jaxpr_interpret.resolve_ref


def _shaped(access, value):
    """The value of a copy between views of other shapes, as `_resolve_ref` allows."""
    same = value.shape == access.shape or value.size != np.prod(access.shape)
    return value if same else value.reshape(access.shape)


def _store_buffer_content(self, key, access, value, *rest, **more):
    return _jax_store_buffer_content(self, key, access, _shaped(access, value), *rest, **more)


def _clip_store_to_shape(access, value, shape):
    return _jax_clip_store_to_shape(access, _shaped(access, value), shape)


_jax_clip_store_to_shape = host._clip_store_to_shape


_jax_store_buffer_content = shared_memory.GPUSharedMemory.store_buffer_content


# ---- equations that JAX's interpreter does not know ----------------------------------------------


def _where(self, eqn) -> dict[str, Any]:
    """Facts about the caller, for every call into the simulated memory."""
    return {
        "mesh_location": self.mesh_location,
        "thread": self.thread,
        "source_info": eqn.source_info,
    }


def _new_registers(self, eqn, token, value):
    token, request = host.call_make_allocation_request_array(
        token=token,
        compute_unit=self.thread,
        memory_space_id=shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS),
        initial_ref_count=1,
    )
    where = _where(self, eqn)
    return host.call_allocate_buffer(
        token=token, allocation_request_as_array=request, value=value, **where
    )


def _free_registers(self, eqn, token, key):
    return host.call_deallocate_buffer(
        token=token, allocation_key_as_array=key, **_where(self, eqn)
    )


def _read(self, eqn, token, key, transforms, like):
    shape = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return host.call_get(
        token=token,
        result_shape_and_dtype=shape,
        allocation_key_as_array=key,
        transforms=transforms,
        **_where(self, eqn),
    )


def _read_by_tma(self, eqn, token, key, transforms, like):
    """`_read`, as a store by TMA does it: nobody may write there until it has been waited for."""
    where = _where(self, eqn)
    return callback.io_callback(
        functools.partial(_read_by_tma_on_host, source_info=where.pop("source_info")),
        (host.TOKEN_SHAPE_DTYPE, jax.ShapeDtypeStruct(like.shape, like.dtype)),
        token=token,
        key=key,
        transforms=transforms,
        **where,
    )


@host.fail_on_exception
def _read_by_tma_on_host(*, token, mesh_location, thread, key, transforms, source_info):
    ours = host._get_shared_memory()
    key, there = _accessed(ours, key, transforms)
    clock = ours.incr_clock(thread)
    clock.inc(ours.get_next_tma_thread_id())
    host.get_races().check_read(thread, clock.async_smem_clock.copy(), key, there, source_info)
    ours.add_copy_smem_to_gmem_clocks(thread, clock, clock)
    log = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    return token, ours.get_buffer_content(key, there, thread, logging_info=log)[0]


def _accessed(ours, key, transforms):
    key = shared_memory.HostAllocationKey.from_array(key)
    transforms = jax.tree.map(int, host._remove_noop_transforms(transforms))
    return key, ours.access(key, transforms)


def _overwrite(self, eqn, token, key, transforms, value):
    token, _ = host.call_swap(
        token=token,
        result_shape_and_dtype=jax.ShapeDtypeStruct(value.shape, value.dtype),
        allocation_key_as_array=key,
        transforms=transforms,
        val=value,
        mask=None,
        **_where(self, eqn),
    )
    return token


def _run_state(self, eqn, token, values):
    """Values become buffers of registers while the body runs; refs from outside stay refs."""
    outer = [isinstance(var.aval, state.AbstractRef) for var in eqn.outvars]
    keys = []
    for value, is_ref in zip(values, outer, strict=True):
        if not is_ref:
            token, value = _new_registers(self, eqn, token, value)
        keys.append(value)
    token, _ = self.interpret(eqn.params["jaxpr"], token, *keys)
    token = _wait_for_matmuls(self, token, 0)
    results = []
    for key, is_ref, var in zip(keys, outer, eqn.outvars, strict=True):
        if is_ref:
            results.append(key)
            continue
        token, value = _read(self, eqn, token, key, (), var.aval)
        token = _free_registers(self, eqn, token, key)
        results.append(value)
    return token, results


def _wgmma_from_registers(self, eqn, token, values):
    accumulator, left, *rest = values
    token, key = _new_registers(self, eqn, token, left)
    token, results = self._interpret_wgmma_ref_p(eqn, token, lambda: [accumulator, key, *rest])
    return _free_registers(self, eqn, token, key), results


def _store_accumulator(self, eqn, token, values):
    accumulator, value = values
    token = _overwrite(self, eqn, token, accumulator, (), value)
    return token, [None] * len(eqn.outvars)


def _mma(self, eqn, token, values):
    accumulator, left, right = (x.astype(values[0].dtype) for x in values[:3])
    return token, [accumulator + lax.dot(left, right, precision="highest")]


def _nothing(self, eqn, token, values):
    return token, []


def _side(eqn, position, ref, transforms):
    """A copy's source or destination: its buffer, what to take of it, and the shape of that."""
    aval = eqn.invars[position].aval
    taken = state.TransformedRef(aval, tuple(transforms)).type if transforms else aval
    ref, transforms = jaxpr_interpret.resolve_ref(aval, ref, transforms)
    return ref, transforms, taken


def _sides(eqn, values):
    source, target, *leaves = values
    trees = (eqn.params["src_transforms_treedef"], eqn.params["dst_transforms_treedef"])
    both = jax.tree.unflatten(
        jax.tree_util.treedef_tuple(trees), leaves[: sum(tree.num_leaves for tree in trees)]
    )
    return _side(eqn, 0, source, both[0]), _side(eqn, 1, target, both[1])


def _cp_async(self, eqn, token, values):
    """Done at once: what reads it too early would not be seen here, and is seen on an A100 only."""
    (source, from_, taken), (target, to, _) = _sides(eqn, values)
    token, value = _read(self, eqn, token, source, from_, taken)
    return _overwrite(self, eqn, token, target, to, value), []


def _copy_to_gmem(self, eqn, token, values):
    params = eqn.params | {"has_user_predicate": False}
    predicate = None
    if eqn.params["has_user_predicate"]:
        *values, predicate = values

    def copy(token):
        if params["reduction_op"] is None:
            return self._interpret_copy_smem_to_gmem_p(eqn, token, *values, **params)[0]
        (source, from_, taken), (target, to, _) = _sides(eqn, values)
        token, value = _read_by_tma(self, eqn, token, source, from_, taken)
        return _update(self, eqn, token, target, to, value, params["reduction_op"])

    if predicate is None:
        return copy(token), []
    return lax.cond(predicate, copy, lambda token: token, token), []


def _atomic(self, eqn, token, values):
    ref, transforms, value, *_ = jax.tree.unflatten(eqn.params["args_tree"], values)
    ref, transforms, _ = _side(eqn, 0, ref, transforms or ())
    return _update(self, eqn, token, ref, transforms, value, eqn.params["atomic_type"].value), []


_UPDATES = {
    "add": np.add,
    **dict.fromkeys(("min", "umin", "smin"), np.minimum),
    **dict.fromkeys(("max", "umax", "smax"), np.maximum),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_one_update_at_a_time = threading.Lock()


def _update(self, eqn, token, key, transforms, value, op):
    where = _where(self, eqn)
    return callback.io_callback(
        functools.partial(_update_on_host, op=op, source_info=where.pop("source_info")),
        host.TOKEN_SHAPE_DTYPE,
        token=token,
        key=key,
        transforms=transforms,
        value=value,
        **where,
    )


@host.fail_on_exception
def _update_on_host(*, token, mesh_location, thread, key, transforms, value, op, source_info):
    ours = host._get_shared_memory()
    key, there = _accessed(ours, key, transforms)
    log = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    value = np.asarray(value)
    with _one_update_at_a_time:
        old, _, _ = ours.get_buffer_content(key, there, thread, logging_info=log)
        if old.shape != value.shape:  # TMA drops what lies past the end
            value = value[tuple(map(slice, old.shape))]
            there, value = host._clip_store_to_shape(
                there, value, tuple(ours.buffer_shape_and_dtype(key).shape)
            )
        new = _UPDATES[op](old, value).astype(old.dtype)
        ours.store_buffer_content(key, there, new, thread, logging_info=log)
    if hasattr(ours, "launch_memory"):
        place = *_coordinates(mesh_location), int(mesh_location.thread_id)
        ours.launch_memory.added.add(ours.launch_memory.block(*place))
    return token


# ---- operands of matmuls in flight ---------------------------------------------------------------


class _Matmuls:
    """Matmuls of one warpgroup that have been issued and not been waited for."""

    def __init__(self):
        # The accumulator of each matmul, and what it reads: (buffer, place, line of code).
        self.issued: list[tuple[Any, list[Any]]] = []
        self.open: list[Any] = []  # reads of the next one that are issued before it
        self.unused = 0  # number of the next matmuls whose results are not used


def _matmuls_of(ours, thread) -> _Matmuls:
    return ours.__dict__.setdefault("matmuls", {}).setdefault(thread, _Matmuls())


def _wait_for_matmuls(self, token, left):
    return callback.io_callback(
        functools.partial(_retire, left=left),
        host.TOKEN_SHAPE_DTYPE,
        token=token,
        thread=self.thread,
    )


@host.fail_on_exception
def _retire(*, token, thread, left, loaded=None):
    """Waits until `left` matmuls are in flight, none of which may add to what is loaded then."""
    ours = host._get_shared_memory()
    pending = _matmuls_of(ours, thread).issued
    while len(pending) > left:
        for read in pending.pop(0)[1]:
            _read_by_matmul(ours, thread, *read)
    behind = next((n for n, (key, _) in enumerate(reversed(pending)) if key == loaded), None)
    if behind is not None:
        raise RuntimeError(
            f"an accumulator is read with wait_n={left} while a matmul adds to it, behind which "
            f"{behind} are issued: wait_n is {behind} at most"
        )
    return token


def _read_by_matmul(ours, thread, key, there, source_info):
    """Not in the order of the thread's own accesses, but as another thread that it has started."""
    clock = hazards.Warpgroup.of(ours, thread).matmul_clock()
    host.get_races().check_read(thread, clock, key, there, source_info=source_info)


def _wgmma(*, token, thread, source_info=None, **params):
    """JAX's, and its reads: from now on, and once more when it has been waited for."""
    token = _jax_wgmma(token=token, thread=thread, source_info=source_info, **params)
    ours, reads = host._get_shared_memory(), []
    matmuls = _matmuls_of(ours, thread)
    sums = shared_memory.HostAllocationKey.from_array(params["acc_allocation_key_as_array"])
    matmuls.issued.append((sums, reads))
    others, matmuls.open = matmuls.open, []
    if matmuls.unused:
        matmuls.unused -= 1
        return token
    for read in others:
        reads.append(read)
        _read_by_matmul(ours, thread, *read)
    registers = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)
    for side in "ab":
        key, there = _accessed(ours, params[f"{side}_allocation_key_as_array"],
                               params[f"{side}_transforms"])  # fmt: skip
        if key.memory_space_id != registers:
            reads.append((key, there, source_info))
            _read_by_matmul(ours, thread, *reads[-1])
    return token


def _load_accumulator(*, token, thread, wait_n=None, **params):
    result = _jax_load_accumulator(token=token, thread=thread, wait_n=wait_n, **params)
    sums = shared_memory.HostAllocationKey.from_array(params["acc_allocation_key_as_array"])
    _retire(token=token, thread=thread, left=wait_n or 0, loaded=sums)
    return result


_jax_wgmma, _jax_load_accumulator = host.wgmma, host.wgmma_accumulator_deref


def _wgmma_wait(self, eqn, token, values):
    del values
    return _wait_for_matmuls(self, token, eqn.params["n"]), []


@host.fail_on_exception
def _mark_unused(*, token, thread, used, matmuls):
    _matmuls_of(host._get_shared_memory(), thread).unused = 0 if used else matmuls
    return token


# ---- Mosaic's own barriers ----------------------------------------------------------------------


def _behind_a_barrier(interpret):
    """A store, or a copy to shared memory, with the barrier that Mosaic puts in front."""

    @functools.wraps(interpret)
    def interpreted(self, eqn, token, get_values):
        params = self.compiler_params
        params = params.get("mosaic_gpu") if isinstance(params, Mapping) else params
        if not getattr(params, "unsafe_no_auto_barriers", False):
            like = host.TOKEN_SHAPE_DTYPE
            token = callback.io_callback(hazards.meet, like, token=token, thread=self.thread)
        return interpret(self, eqn, token, get_values)

    return interpreted


_ALWAYS = {
    discharge.run_state_p: _run_state,
    prims.wgmma_accumulator_store_p: _store_accumulator,
    prims.mma_p: _mma,
    prims.atomic_store_p: _atomic,
    prims.griddepcontrol_wait_p: _nothing,
    prims.griddepcontrol_launch_dependents_p: _nothing,
    prims.wait_gmem_to_smem_p: _nothing,
    prims.wgmma_wait_p: _wgmma_wait,
    prims.print_layout_p: _nothing,
}


def _handler(eqn) -> Callable[..., Any] | None:
    """The function of this file that interprets an equation, or None for JAX."""
    primitive, params = eqn.primitive, eqn.params
    if primitive is prims.copy_gmem_to_smem_p and not params["has_barrier"]:
        return _cp_async
    if primitive is prims.copy_smem_to_gmem_p:
        ours = params["has_user_predicate"] or params["reduction_op"] is not None
        return _copy_to_gmem if ours else None
    if primitive is prims.wgmma_ref_p:
        in_registers = not isinstance(eqn.invars[1].aval, state.AbstractRef)
        return _wgmma_from_registers if in_registers else None
    return _ALWAYS.get(primitive)


def _interpret(self, jaxpr, token, *values):
    """JAX's interpreter for the stretches that it knows, ours for the equations between."""
    if not any(map(_handler, jaxpr.eqns)):
        return _jax_interpret(self, jaxpr, token, *values)
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
    value_of = lambda atom: atom.val if hasattr(atom, "val") else known[atom]  # noqa: E731

    def run(stretch, token):
        made = [var for eqn in stretch for var in eqn.outvars if type(var).__name__ != "DropVar"]
        used = {var: None for eqn in stretch for var in eqn.invars if not hasattr(var, "val")}
        used = [var for var in used if var in known]
        part = jaxpr.replace(
            constvars=[],
            invars=used,
            outvars=made,
            eqns=stretch,
            effects=set(),
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        token, results = _jax_interpret(self, part, token, *map(value_of, used))
        known.update(zip(made, results, strict=True))
        return token

    stretch: list[Any] = []
    for eqn in jaxpr.eqns:
        handler = _handler(eqn)
        if handler is None:
            stretch.append(eqn)
            continue
        token, stretch = run(stretch, token), []
        token, results = handler(self, eqn, token, list(map(value_of, eqn.invars)))
        known.update(zip(eqn.outvars, results, strict=True))
    token = run(stretch, token)
    return token, list(map(value_of, jaxpr.outvars))


_jax_interpret = jaxpr_interpret.JaxprInterpreter.interpret


def _free_barrier(self):
    """0.11.2: forgets, as the last holder lets go, who had seen what; arrivals still pending remain
    an error.
    """
    with self.cv:
        if self.ref_count == 1:
            self.last_observed_phase_by_thread.clear()
    return _jax_free_barrier(self)


_jax_free_barrier = shared_memory.Barrier.deallocate


def _but_in_registers(check, writes):
    """They are a thread's own; their names start anew in every block, which reads like a race with
    the last one.
    """

    @functools.wraps(check)
    def checked(self, thread, clock, key, *rest, **more):
        registers = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)
        if key.memory_space_id != registers:
            clock = hazards.checked(thread, clock, key, rest[0], writes)
            check(self, thread, clock, key, *rest, **more)
            if self.races_found:
                _races.append(str(thread))

    return checked


def _launch(*args, **params):
    """A launch is one callback, which computes in NumPy what JAX has XLA compile."""
    if core.get_axis_env().axis_sizes:
        return _jax_launch(*args, **params)
    traced = jax.make_jaxpr(functools.partial(_jax_launch, **params))(*args)

    def run(*arrays):
        return in_numpy.run(traced, traced.consts, *arrays)

    return callback.io_callback(run, list(map(_shape_of, traced.out_avals)), *args, ordered=True)


_jax_launch = interpret_pallas_call.interpret_pallas_call


def _kernel(eqn, **params):
    """The rule of a launch in a program that is computed in NumPy: what JAX would lower it to."""
    by_jax = in_numpy.by_jax(eqn)

    @functools.cache
    def traced():
        params_of_lowering: dict[str, Any] = {}
        seen = types.SimpleNamespace(avals_in=[var.aval for var in eqn.invars])
        keep = lambda _, *arrays, **more: params_of_lowering.update(more)  # noqa: E731
        with mock.patch.object(pallas_call, "_pallas_call_lowering", keep):
            mpmd._mpmd_map_fallback_lowering(seen, *eqn.invars, **params)
        launch = functools.partial(
            _jax_launch, interpret_params=params_of_lowering.pop("interpret"), **params_of_lowering
        )
        return jax.make_jaxpr(launch)(*map(_shape_of, seen.avals_in))

    def run(*arrays):
        if not params["interpret"] or any(isinstance(x, jax.Ref) for x in arrays):
            return by_jax(*arrays)
        arrays = [np.asarray(x, order="C") for x in arrays]  # the layout of XLA's arrays
        try:
            return in_numpy.run(traced(), traced().consts, *arrays)
        except Exception as error:  # XLA's error for a callback
            message = f"INTERNAL: {type(error).__name__}: {error}"
            raise jax.errors.JaxRuntimeError(message) from error

    return run


def _to_int(x):
    return x.item() if isinstance(x, np.ndarray) else _jax_to_int(x)


_jax_to_int = shared_memory._to_int


# ---- frequent steps of the simulation, made cheaper: a third of its time -------------------------


def _ordered(self, other) -> bool:
    """Whether one of two clocks was before the other."""
    apart = self.clock - other.clock
    return bool((apart[apart.argmax()] <= 0) != (apart[apart.argmin()] >= 0))


def _key_of_array(cls, array):
    return _key(cls, *np.asarray(array).tolist())


@functools.lru_cache(maxsize=1 << 14)
def _key(cls, *values):
    names = (field.name for field in dataclasses.fields(cls))
    return cls(**dict(zip(names, values, strict=True)))


@functools.cache
def _teach() -> None:
    interpret_pallas_call.interpret_pallas_call = _launch
    in_numpy.RULES["mpmd_map"] = _kernel
    thread_map._run_jaxpr = in_numpy.run
    vector_clock.NpVectorClock.ordered = _ordered
    shared_memory.HostAllocationRequest.from_array = classmethod(_key_of_array)
    source_info_util.summarize = functools.lru_cache(maxsize=1 << 12)(source_info_util.summarize)
    shared_memory._to_int = _to_int
    jaxpr_interpret.JaxprInterpreter.interpret = _interpret
    jaxpr_interpret.JaxprInterpreter._interpret_inline_mgpu_p = _inline_mgpu
    jaxpr_interpret.resolve_ref = _resolve_ref
    shared_memory.GPUSharedMemory.store_buffer_content = _store_buffer_content
    host._clip_store_to_shape = _clip_store_to_shape
    host.wgmma, host.wgmma_accumulator_deref = _wgmma, _load_accumulator
    detector = race_detection_state.GPURaceDetectionState
    detector.check_read = _but_in_registers(detector.check_read, False)
    detector.check_write = _but_in_registers(detector.check_write, True)
    races.teach()
    interpreter = jaxpr_interpret.JaxprInterpreter
    for name in ("_interpret_swap_p", "_interpret_copy_gmem_to_smem_p"):
        setattr(interpreter, name, _behind_a_barrier(getattr(interpreter, name)))
    hazards.teach()
    if not hasattr(shared_memory, "BarrierReallocationChecker"):
        shared_memory.Barrier.deallocate = _free_barrier
