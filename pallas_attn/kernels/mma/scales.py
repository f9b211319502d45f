"""The scale of numbers that are rounded to 8 bits, and their rounding, in programs of threads.

`quantization.quantize` is the definition; the bytes are the same. Magnitudes are compared as
integers, which order as the floats do and put NaN above infinity above all numbers. GPUs before
sm89 convert to float8 by hand, in integers.
"""

import functools
from typing import NamedTuple

import numpy as np

from pallas_attn._call import gpu_specs
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.threads import Float, Thread
from pallas_attn.kernels.lang.types import Predicate

_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
HEAD_DIM_MOST = 4096  # a warp holds a row in registers
_FLOOR = 27 << 23  # the bits of 2**-100
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_INFINITY_16 = 0x7C00  # float16


class Scale(NamedTuple):
    """The scale of numbers that share one."""

    finite: Predicate  # whether all of them are
    bits: Int  # the bits of the scale, or of a finite one where they are not


def lanes_of(row_words: int) -> int:
    """How many threads share a row of so many words: a power of two, of one warp."""
    return min(32, 2 ** (row_words - 1).bit_length())


def magnitude(thread: Thread, words: list[Int], nbytes: int, dtype: str) -> Int:
    """The bits, as a float32, of the largest magnitude among numbers of 16 or 32 bits in words.

    Both halves of 32 bits are compared as they lie: were the numbers unpacked for it, they would
    stay in registers until they are rounded, and take twice those of the words.
    """
    if nbytes < 4:
        numbers = [x for word in words for x in thread.numbers(word, nbytes, dtype)]
        return _most(thread, [thread.bits(x) & 0x7FFFFFFF for x in numbers])
    raw = [thread.bits(x) for word in words for x in thread.numbers(word, nbytes, "float32")]
    if dtype == "float32":
        return _most(thread, [x & 0x7FFFFFFF for x in raw])
    low, high = (_most(thread, [x & mask for x in raw]) for mask in (0x7FFF, 0x7FFF0000))
    top = thread.maximum(low, high >> 16)
    if dtype == "bfloat16":
        return top << 16
    number = thread.as_float(top << 13) * 2.0**112  # subnormal ones too
    return thread.select(top < _INFINITY_16, thread.bits(number), _INFINITY)


def _most(thread: Thread, integers: list[Int]) -> Int:
    return functools.reduce(thread.maximum, integers)


def of_magnitude(thread: Thread, top: Int, dtype: str) -> Scale:
    """The scale of numbers whose largest magnitude has these bits."""
    finite = top < _INFINITY
    inverse_of_largest = float(np.float32(1) / np.float32(_LARGEST[dtype]))
    scale = thread.as_float(thread.select(finite, top, 0)) * inverse_of_largest
    return Scale(finite, thread.maximum(thread.bits(scale), _FLOOR))


def stored(thread: Thread, scale: Scale) -> Int:
    """The bits of the scale as it is stored: NaN where a number is not finite."""
    return thread.select(scale.finite, scale.bits, _NAN)


def narrowed(thread: Thread, numbers: list[Float], dtype: str, by_hand: bool) -> Int:
    """Numbers within the range of the dtype, rounded to it: a word of as many bytes."""
    return _float8(thread, numbers, dtype) if by_hand else thread.narrow(numbers, dtype)


def rounds_by_hand(dtype: str, gpu: str | None) -> bool:
    """Whether the GPU has no instruction that rounds to this dtype."""
    return dtype != "int8" and gpu is not None and gpu_specs.number(gpu) < 89


_FORMATS = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15)}  # bits of the mantissa, bias


def _float8(thread: Thread, numbers: list[Float], dtype: str) -> Int:
    """`thread.narrow` in integers, for numbers within the range of the dtype."""
    mantissa, bias = _FORMATS[dtype]
    unit = 2 ** (23 - mantissa)  # one in the last place that stays, in the bits of a float32
    # Added to a number, it leaves whole multiples of the smallest subnormal, rounded, at its end.
    step = 2.0 ** (24 - bias - mantissa)
    codes = []
    for number in numbers:
        bits = thread.bits(number)
        magnitude = bits & 0x7FFFFFFF
        odd = magnitude // unit & 1
        normal = (magnitude + odd + (unit // 2 - 1)) // unit - (127 - bias) * 2**mantissa
        small = thread.bits(thread.as_float(magnitude) + step)
        small = small - int(np.float32(step).view(np.int32))
        code = thread.select(magnitude < (128 - bias) * 2**23, small, normal)
        codes.append(thread.select(bits < 0, code + 128, code))
    return thread.packed(codes)
