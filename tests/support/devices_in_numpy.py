"""`shard_map` and its collectives for `tests/support/in_numpy.py`: every device is a thread that
computes the body with its own parts of the arrays, until it ends or waits in a collective for the
others of its group. One thread computes at a time.

Devices whose loops or branches differ are therefore no special case, and what would hang on a GPU
raises: devices that meet in different collectives, or that wait for one that has ended.
"""

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class Team:
    """Devices, of which one at a time has the turn."""

    def __init__(self, sizes: dict[str, int]):
        self.sizes = sizes
        self.turn = threading.Condition()
        self.running = math.prod(sizes.values())
        self.errors: list[BaseException] = []
        self._given: dict[Any, dict[int, Any]] = {}  # to those who wait in a group

    def meet(self, group: Any, size: int, number: int, value: Any) -> list[Any]:
        """The values of all devices of a group, in their order."""
        values = self._given.setdefault(group, {})
        values[number] = value
        if len(values) == size:
            del self._given[group]
            self.running += size - 1
            self.turn.notify_all()
        else:
            self._stop_running()
        while len(values) < size:
            if self.running < 1:  # nobody is left who could come
                raise RuntimeError(f"{number} of {group} waits for devices that do not come")
            self.turn.wait()
        return [values[n] for n in range(size)]

    def _stop_running(self) -> None:
        self.running -= 1
        if self.running < 1:
            self.turn.notify_all()

    def start(self, place: dict[str, int], run: Callable[[], None]) -> threading.Thread:
        def device():
            _here.team, _here.place = self, place
            with self.turn:
                try:
                    run()
                except BaseException as error:  # which whoever started the team raises
                    self.errors.append(error)
                self._stop_running()

        thread = threading.Thread(target=device, daemon=True)
        thread.start()
        return thread


_here = threading.local()  # the team and the place in it of the device that a thread is


def _number(names: Any, sizes: dict[str, int], place: dict[str, int]) -> tuple[int, int]:
    """Which device a place is among those along the named axes, and how many those are."""
    number, count = 0, 1
    for name in names:
        number, count = number * sizes[name] + place[name], count * sizes[name]
    return number, count


def _names(axes: Any) -> tuple[str, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


# ---- shard_map -----------------------------------------------------------------------------------


def _part(shape, spec, sizes, place) -> tuple[slice, ...]:
    """The part of an array that the device in a place has."""
    slices = []
    for size, axes in zip(shape, (*spec, *(None,) * (len(shape) - len(spec))), strict=True):
        number, count = _number(_names(axes), sizes, place)
        slices.append(slice(size // count * number, size // count * (number + 1)))
    return tuple(slices)


def shard_map(program_of: Callable[[Any], Callable[..., list[Any]]]) -> Callable[..., Any]:
    """The rule, of a function that makes a jaxpr one that can be called."""

    def rule(eqn, mesh, jaxpr, in_specs, out_specs, newly_manual_axes, **_):
        program = program_of(jaxpr)
        sizes = {name: mesh.shape[name] for name in mesh.axis_names if name in newly_manual_axes}
        places = [dict(zip(sizes, at, strict=True)) for at in np.ndindex(*sizes.values())]
        shapes = [var.aval.shape for var in eqn.outvars]

        def compute(*args):
            team, results = Team(sizes), [()] * len(places)

            def device(n):
                pairs = zip(args, in_specs, strict=True)
                own = [x[_part(x.shape, spec, sizes, places[n])] for x, spec in pairs]
                with np.errstate(all="ignore"):
                    results[n] = program(*own)

            runs = [functools.partial(device, n) for n in range(len(places))]
            threads = [team.start(*each) for each in zip(places, runs, strict=True)]
            for thread in threads:
                thread.join()
            if team.errors:
                raise team.errors[0]
            each = zip(zip(*results, strict=True), shapes, out_specs, strict=True)
            return [joined(*result) for result in each]

        def joined(parts, shape, spec):
            """The whole array; of devices that have the same part, the first one's."""
            whole = np.empty(shape, parts[0].dtype)
            for place, part in zip(reversed(places), reversed(parts), strict=True):
                whole[_part(shape, spec, sizes, place)] = part
            return whole

        return compute

    return rule


# ---- collectives ---------------------------------------------------------------------------------


def _collective(combine):
    """The rule of one that gives device `number` what `combine` makes of all devices' arrays."""

    def rule(eqn, **params):
        names = _names(params.get("axes", params.get("axis_name")))
        assert params.get("axis_index_groups") is None, eqn

        def compute(*args):
            team, place = _here.team, _here.place
            number, count = _number(names, team.sizes, place)
            others = tuple((name, n) for name, n in place.items() if name not in names)
            gathered = team.meet((names, others), count, number, (eqn, args))
            if any(other is not eqn for other, _ in gathered):
                raise RuntimeError(f"devices meet in different collectives: {gathered}")
            each = zip(*(arrays for _, arrays in gathered), strict=True)
            return [combine(arrays, number, **params) for arrays in each]

        return compute

    return rule


_sum_over_devices = _collective(lambda arrays, number, **_: functools.reduce(np.add, arrays))


def _psum(eqn, axes, **params):
    if any(isinstance(axis, str) for axis in axes):
        return _sum_over_devices(eqn, axes=axes, **params)
    return lambda *args: [x.sum(axes, x.dtype) for x in args]  # axes of `vmap`


def _all_gather(arrays, number, all_gather_dimension, tiled, **_):
    del number
    return (np.concatenate if tiled else np.stack)(arrays, all_gather_dimension)


def _all_to_all(arrays, number, split_axis, concat_axis, **_):
    parts = [np.split(x, len(arrays), split_axis)[number] for x in arrays]
    return np.concatenate(parts, concat_axis)


def _permute(arrays, number, perm, **_):
    """Zeros where nobody sends."""
    (sent,) = [arrays[source] for source, to in perm if to == number] or [arrays[0] * 0]
    return sent


def _axis_index(eqn, axis_name):
    del eqn
    names = _names(axis_name)
    return lambda: [np.int32(_number(names, _here.team.sizes, _here.place)[0])]


COLLECTIVES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("psum", "psum_invariant"), _psum),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), _collective(_all_gather)),
    "all_to_all": _collective(_all_to_all),
    "ppermute": _collective(_permute),
    "axis_index": _axis_index,
    "pvary": lambda eqn, axes: lambda *args: args,
}
