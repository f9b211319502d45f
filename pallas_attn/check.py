"""Whether kernels take a program, for a GPU that need not be there."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from pallas_attn._call import device


def check_for(
    generation: str, function: Callable[..., Any], *arguments: object, **options: object
) -> Any:
    """Raise the `UnsupportedError` that `function(*arguments, **options)` would raise on a GPU of a
    generation. It needs no GPU and computes nothing::

        pa.check_for("sm90", jax.jit(train_step), params, batch)

    The function is traced as it would be there, kernels and derivatives included, which takes some
    seconds a kernel. Make caches within the function: on a GPU `create` pads their buffers.

    Args:
      generation: "sm" and the compute capability without its point: "sm90" for H100 and H200,
        "sm80" for A100, "sm86", "sm89", "sm100", "sm120".
      function: a function of arrays; a jitted one may have static arguments.
      arguments, options: those of the function. An array may be a `jax.ShapeDtypeStruct`.

    Returns:
      Shapes and dtypes of the results, as `jax.eval_shape` gives them.

    Example::

        >>> q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
        >>> pa.check_for("sm90", pa.flash_attention, q, q, q).shape
        (1, 128, 2, 64)
    """
    # jax keeps what it has traced; the metadata tells it that elsewhere is another place.
    with device.assume(generation), set_xla_metadata(pallas_attn_generation=generation):
        return jax.eval_shape(function, *arguments, **options)
