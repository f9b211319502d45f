"""The GPU that a call runs on, and how kernels are launched there. No other file asks jax."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

from pallas_attn._call import gpu_specs
from pallas_attn.errors import described

# Thread-local by construction: a test that pretends does not change what another thread traces.
_assumed: contextvars.ContextVar[tuple[str | None] | None] = contextvars.ContextVar(
    "pallas_attn_assumed_generation", default=None
)


@contextlib.contextmanager
def assume(generation: str | None) -> Iterator[None]:
    """Calls traced in this block are dispatched as if the GPU were of this generation.

    `generation` is like "sm90", or None for a machine without a GPU. It is for tests and for ahead-
    of-time compilation only: what is traced runs, or is lowered, wherever jax sends it. jax knows
    nothing of it, so a function that was jitted outside of the block keeps what it was traced with.
    """
    if generation is not None and generation not in gpu_specs.GENERATIONS:
        raise ValueError(
            'generation: expected "sm" and the compute capability without its point, as "sm90" for '
            f"H100 and H200, one of {', '.join(gpu_specs.GENERATIONS)}, or None for no GPU, got "
            f"{described(generation)}"
        )
    token = _assumed.set((generation,))
    try:
        yield
    finally:
        _assumed.reset(token)


asked_to_overlap: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "pallas_attn_overlapping", default=False
)


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Kernels traced in this block begin while those before them end, where GPU and kernel can
    (programmatic dependent launch). A profiler then counts the time that they wait, which is why it
    is not the default.

    Example::

        >>> q = jnp.ones((1, 8, 2, 64))
        >>> with pa.overlapping():
        ...     out = jax.jit(pa.flash_attention)(q, q, q)
        >>> out.shape
        (1, 8, 2, 64)
    """
    token = asked_to_overlap.set(True)
    try:
        yield
    finally:
        asked_to_overlap.reset(token)


def current() -> jax.Device:
    """The device that a call traced now will run on, as far as jax can tell before it runs: one of
    the mesh that is set or mapped over, or the default.
    """
    of_mesh = jax.sharding.get_abstract_mesh().abstract_device
    if of_mesh is not None:
        with contextlib.suppress(RuntimeError):  # a platform that is compiled for, and not here
            return jax.devices(of_mesh.platform)[0]
    chosen = jax.config.jax_default_device
    if chosen is None:
        return jax.devices()[0]
    return jax.devices(chosen)[0] if isinstance(chosen, str) else chosen


def gpu_generation() -> str | None:
    """Like "sm90" for an H100 or H200: the GPU of a call that is traced now. None where its device
    is not an NVIDIA GPU. Within `check_for` it is the generation that was asked for.

    Example::

        >>> rows = lambda: jnp.zeros(128 if pa.gpu_generation() == "sm90" else 64)
        >>> pa.check_for("sm90", rows).shape
        (128,)
    """
    if (assumed := _assumed.get()) is not None:
        return assumed[0]
    device = current()
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda") or capability is None:
        return None
    return "sm" + str(capability).replace(".", "")


def reaches_peers(axis: str) -> bool:
    """Whether kernels may read the memory of all devices along a mesh axis that is mapped here:
    GPUs of this process, which are the whole mesh, and all that there are.
    """
    mesh, count = jax.sharding.get_abstract_mesh(), jax.device_count()
    whole = mesh.size == count == dict(mesh.shape).get(axis) == jax.local_device_count()
    mapped = set(mesh.axis_types) == {jax.sharding.AxisType.Manual}
    gpus = reaching.get() or current().platform in ("gpu", "cuda")
    return whole and mapped and gpus and count > 1


# Whether devices that are no GPUs count as such: tests set it, and ahead-of-time compilation.
reaching: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "pallas_attn_reaching", default=False
)
