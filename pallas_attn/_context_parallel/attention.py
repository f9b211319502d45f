"""Attention over rows that several devices have, by the methods "gather" and "ring".

The backward starts from this device's q, k, v, out and lse, and moves other devices' rows again. dk
and dv leave a device in the dtype of k, as the backward kernels round them, which is half of the
bytes of float32; arriving parts are added in float32, in the order of the devices, and rounded
once.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_attn._autodiff import by_rows, derivative, linear, score_gradients
from pallas_attn._autodiff.derivative import Named, Results, Rows
from pallas_attn._call.problem import AttentionInputs
from pallas_attn._context_parallel import gather, launch, layout, ring
from pallas_attn._context_parallel.layout import Split
from pallas_attn._mesh import sharding

Array = jax.Array


def attend(split: Split, inputs: AttentionInputs) -> Results:
    """(out, lse) of this device's rows."""
    out, lse = linear.differentiable(derivative.Attention, SplitCall(split), inputs)
    return out, lse


@dataclasses.dataclass(frozen=True)
class SplitCall:
    """A call over rows that several devices have (`derivative.Call`)."""

    split: Split

    @property
    def in_ring(self) -> bool:
        return self.split.context.method == "ring"

    def run(self, inputs: AttentionInputs) -> Results:
        return (ring if self.in_ring else gather).forward(self.split, inputs)

    def tangents(self, inputs: AttentionInputs, results: Results, tangents: Named) -> Results:
        del results
        return derivative.by_definition(self, inputs, tangents)

    def dual(self, names: tuple[str, ...]) -> None:
        """No launch computes results and tangents."""
        del names

    def gradients(self, inputs: AttentionInputs, rows: Rows, names: tuple[str, ...]) -> Named:
        numbers, named = derivative.numbers_of_aux(names), dict[str, Array]()
        if len(numbers) < len(names):
            gradients = (ring if self.in_ring else gather).backward(self.split, inputs, rows)
            for name, x in launch.floats_of(inputs).items():
                named[name] = sharding.gradient_of(x, gradients[name].astype(x.dtype))
        if numbers:
            of_aux = zip(numbers, self._gradients_of_aux(inputs, numbers, rows), strict=True)
            named |= {f"score_aux{n}": x for n, x in of_aux}
        return named

    def _gradients_of_aux(
        self, inputs: AttentionInputs, numbers: list[int], rows: Rows
    ) -> list[Array]:
        split, rows = self.split, layout.rows_by_chunk(self.split, rows)

        def of_launch(inputs: AttentionInputs) -> list[Array]:
            call = launch.problem_of(split, "flash_forward", launch.Launch(inputs, ()))
            call = launch.repeated(*call)
            all_keys = rows if self.in_ring else by_rows.exact_rows(*call, rows)
            return score_gradients.of_call(*call, numbers, all_keys)

        if not self.in_ring:
            return of_launch(gather.launch_of_all(split, inputs))
        zeros = [jnp.zeros(inputs.score_aux[n].shape, jnp.float32) for n in numbers]
        zeros = [sharding.varying_like(x, *rows) for x in zeros]
        return ring.summed_over_parts(split, inputs, of_launch, zeros)

    def definition(self, inputs: AttentionInputs) -> Results:
        """By a device's launch of all keys, in a ring too."""
        split, inputs = gather.without_blocks(self.split, inputs)
        whole = launch.Launch(gather.launch_of_all(split, inputs), ())
        call = launch.repeated(*launch.problem_of(split, "flash_forward", whole))
        out, lse = by_rows.attention(*call)
        return layout.by_device(split, out), layout.lse_by_device(split, lse)

    def definition_of_gradients(
        self, inputs: AttentionInputs, rows: Rows, names: tuple[str, ...]
    ) -> Named:
        """By the derivative of `definition`, which computes out and lse again."""
        run, own = derivative.of_names(self, inputs, names)
        (gradients,) = jax.vjp(run, own)[1](rows[2:])
        return gradients
