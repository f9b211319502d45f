"""Small tests of each file that launches for `-m "gpu and quick"`, beside those of
tests/kernels/test_every_kernel.py, and for `-m memcheck`. Every such file has a row, but for those
of several GPUs.
"""

import pytest

COLLECTED = pytest.StashKey[frozenset[str]]()  # all that pytest collected, before marks choose

_EVERY = "tests/kernels/test_every_kernel.py::test_on_a_gpu"
_FWD, _BWD = "tests/kernels/flash_fwd/test_", "tests/kernels/flash_bwd/test_"
_LISTED, _PREFILL = "tests/kernels/decode_listed/test_", "tests/kernels/prefill/test_prefill"
_MLA = "tests/kernels/decode_mla/test_decode_mla.py::test_on_the_gpu"
_APPEND, _CACHES = "tests/kernels/append/test_append", "tests/caches/test_"
_LM = "tests/lm/test_kernels.py::"
_CASES = "tests/api/test_cases.py::test_forward_and_backward"

OF_SEVERAL_GPUS = {"kernels/decode/merge_over_gpus.py"}
# test_every_kernel.py has their rows.
BLACKWELL = {"kernels/flash_fwd/sm100.py", "kernels/flash_bwd/sm100.py"}
QUICK = {
    "kernels/flash_fwd/sm90.py": f"{_EVERY}[flash_fwd.sm90-cut_tiles]",
    "kernels/flash_fwd/sm80.py": f"{_EVERY}[flash_fwd.sm80-cut_tiles]",
    "kernels/flash_fwd/sm90_wide.py": f"{_EVERY}[flash_fwd.sm90_wide-cut_tiles]",
    "kernels/flash_fwd/sm90_group_window.py": f"{_EVERY}[flash_fwd.sm90_group_window-rows72]",
    "kernels/flash_fwd/float8_values.py": f"{_FWD}float8.py::test_on_the_gpu[lengths]",
    "kernels/flash_fwd/sm80_float8.py": f"{_FWD}float8.py::test_portable_on_the_gpu[lengths]",
    "kernels/flash_fwd/sm90_one_tile.py": f"{_EVERY}[flash_fwd.sm90_one_tile-sinks]",
    "kernels/flash_fwd/batch_rows.py": f"{_FWD}one_tile.py::test_batch_rows[frames16-gpu]",
    "kernels/flash_fwd/segments.py": f"{_EVERY}[flash_fwd.sm90-ids]",
    "kernels/attention/listed_tiles.py": (
        f"{_FWD}listed_tiles.py::test_lists_and_codes_are_those_of_jax_numpy"
        "[(2, 1, 5, 1, 33)-False-3-gpu]"
    ),
    "kernels/flash_bwd/sm90_fused.py": f"{_EVERY}[flash_bwd.sm90-cut_tiles]",
    "kernels/flash_bwd/sm90_dkdv.py": f"{_EVERY}[flash_bwd.sm90_two_kernels-cut_tiles]",
    "kernels/flash_bwd/sm90_dq.py": f"{_EVERY}[flash_bwd.sm90_two_kernels-ids]",
    "kernels/flash_bwd/sm90_window.py": f"{_EVERY}[flash_bwd.sm90_window-sinks]",
    "kernels/flash_bwd/sm90_short.py": f"{_EVERY}[flash_bwd.sm90_short-sinks]",
    "kernels/flash_bwd/sm90_heads.py": f"{_EVERY}[flash_bwd.sm90_heads-sinks]",
    "kernels/flash_bwd/dq_sum.py": f"{_BWD}one_key_tile.py::test_cases[parts-gpu]",
    "kernels/flash_bwd/step_parts.py": f"{_BWD}step_parts.py::test_on_the_gpu[lockstep_claims]",
    "kernels/flash_bwd/statistics.py": f"{_BWD}heads.py::test_heads[softcap-gpu]",
    "kernels/flash_bwd/sm90_dbias.py": f"{_CASES}[kernels-bias]",
    "kernels/flash_bwd/aux_sums.py": f"{_BWD}aux_gradients.py::test_on_the_gpu[t5_far-sm90]",
    "kernels/flash_bwd/sm90_wide.py": f"{_EVERY}[flash_bwd.sm90_wide-cut_tiles]",
    "kernels/flash_bwd/sm90_group_window.py": f"{_EVERY}[flash_bwd.sm90_group_window-rows72]",
    "kernels/flash_bwd/sm80.py": f"{_EVERY}[flash_bwd.sm80-cut_tiles]",
    "kernels/flash_bwd/sm80_dq.py": f"{_EVERY}[flash_bwd.sm80-apart]",
    "kernels/flash_bwd/sm80_dbias.py": f"{_CASES}[portable_kernels-bias]",
    "kernels/flash_jvp/sm90.py": f"{_EVERY}[flash_jvp.sm90-lengths]",
    "kernels/flash_jvp/sm90_dual.py": f"{_EVERY}[flash_jvp.sm90_dual-lengths]",
    "kernels/flash_jvp/sm80.py": f"{_EVERY}[flash_jvp.sm80-lengths]",
    "kernels/attention/key_masks.py": (
        "tests/kernels/test_key_masks.py::test_tiles_and_keys_on_the_gpu[197-64]"
    ),
    "kernels/attention/mask_bits.py": "tests/kernels/test_mask_bits.py::test_bits[sizes1-gpu]",
    "kernels/decode/sm90.py": f"{_EVERY}[decode.sm90-paged]",
    "kernels/decode/box_copies.py": (f"{_CACHES}ragged.py::test_a_mixture[kernels-mixture-plain]"),
    "kernels/decode_mla/producer.py": f"{_EVERY}[decode_mla.sm90-paged]",
    "kernels/decode_mla/combine_apart.py": f"{_MLA}[two_chunks_apart]",
    "kernels/decode_mla/sm90_byte_rows.py": (
        f"{_CACHES}byte_rows.py::test_what_is_read[kernels-stacked]"
    ),
    "kernels/decode_mla/sm80.py": f"{_EVERY}[decode_mla.sm80-paged]",
    "kernels/decode_mla/row_gathers.py": (
        f"{_LISTED}decode_listed.py::test_cases[latent_neighbours-gpu]"
    ),
    "kernels/decode_listed/lists.py": f"{_EVERY}[decode_listed.sm90-rows]",
    "kernels/decode_listed/gradients_sm90.py": (
        f"{_LISTED}listed_gradients.py::test_cases[heads12_softcap-gpu]"
    ),
    "kernels/prefill/plan.py": f"{_EVERY}[prefill.sm90-paged]",
    "kernels/prefill/combine_partials.py": f"{_EVERY}[prefill.sm90-partials]",
    "kernels/prefill/merge_parts.py": f"{_CACHES}prefixes.py::test_on_a_gpu[rows-pages16]",
    "kernels/prefill/widened_sm90.py": f"{_EVERY}[prefill.widened_sm90-splits]",
    "kernels/prefill/narrow_sm90.py": f"{_EVERY}[prefill.narrow_sm90-splits]",
    "kernels/prefill/float8_tiles.py": f"{_PREFILL}_float8.py::test_on_a_gpu[per_sequence]",
    "kernels/prefill/float8_sm90.py": f"{_PREFILL}_float8.py::test_on_a_gpu[stacked]",
    "kernels/prefill/contiguous_sm90.py": f"{_EVERY}[prefill.contiguous_sm90-cut_tiles]",
    "kernels/prefill/gathered.py": f"{_EVERY}[prefill.gathered_sm90-paged]",
    "kernels/prefill/gathered_packed_sm90.py": f"{_EVERY}[prefill.gathered_packed_sm90-paged]",
    "kernels/append/copy.py": f"{_APPEND}_kernel.py::test_on_the_gpu[paged-new_rows7]",
    "kernels/append/byte_rows.py": (
        f"{_CACHES}byte_rows.py::test_rows_are_written_byte_for_byte[kernels-stacked]"
    ),
    "kernels/append/quantize.py": (
        f"{_APPEND}_quantized.py::test_rows_on_the_gpu[bfloat16-72-int8]"
    ),
    "kernels/append/keep.py": f"{_CACHES}keep.py::test_every_byte[kernels]",
    "kernels/quantize/blocks.py": (
        "tests/kernels/quantize/test_quantize_blocks.py::test_on_the_gpu[lengths]"
    ),
    "pallas_lm/kernels/linear.py": f"{_LM}test_on_the_gpu[128-64-7]",
    "pallas_lm/kernels/norm.py": f"{_LM}test_norm_on_the_gpu[512-2-64]",
}
ALL_QUICK = frozenset(QUICK.values())


def is_quick(name: str) -> bool:
    return name in ALL_QUICK or name.startswith(_EVERY)


def by_file() -> dict[str, list[str]]:
    """{test file: its tests}"""
    files: dict[str, list[str]] = {}
    for test in QUICK.values():
        files.setdefault(test.partition("::")[0], []).append(test)
    return files
