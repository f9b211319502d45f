"""Small tests of each kernel for `-m "gpu and quick"` and, one of a kernel, for `-m memcheck`.

A row is a kernel's file with tests that run it, one of each dtype it takes; the first is the one
that memcheck runs. The tests are some of `-m gpu`. Every file that launches has a row, but for
those of several GPUs.
"""

import pytest

COLLECTED = pytest.StashKey[frozenset[str]]()  # all that pytest collected, before marks choose

_FWD = "tests/kernels/flash_fwd/test_flash_fwd.py::test_edges_on_the_gpu"
_BWD = "tests/kernels/flash_bwd/test_flash_bwd.py::"
_ONE_TILE = "tests/kernels/flash_bwd/test_one_key_tile.py::"
_HEADS = "tests/kernels/flash_bwd/test_heads.py::"
_TURNS = "tests/kernels/flash_bwd/test_turns.py::"
_PARTS = "tests/kernels/flash_bwd/test_step_parts.py::"
_SIZES = "tests/kernels/flash_bwd/test_any_size.py::"
_AUX = "tests/kernels/flash_bwd/test_aux_gradients.py::"
_JVP = "tests/kernels/flash_jvp/test_flash_jvp.py::"
_BOTH = "tests/api/test_cases.py::test_forward_and_backward"
_GROUP_WINDOW = [
    f"tests/kernels/{folder}/test_group_window.py::test_on_the_gpu"
    for folder in ("flash_fwd", "flash_bwd")
]
_DECODE = "tests/kernels/decode/test_decode_kernel.py::"
_MLA = "tests/kernels/decode_mla/test_decode_mla.py::"
_LISTS = "tests/kernels/decode_listed/test_decode_listed.py::"
_LISTED_GRADIENTS = "tests/kernels/decode_listed/test_listed_gradients.py::"
_PREFILL = "tests/kernels/prefill/test_prefill"
_APPEND = "tests/kernels/append/test_append"
_LM = "tests/lm/test_kernels.py::"

OF_SEVERAL_GPUS = {"kernels/decode/merge_over_gpus.py", "pallas_lm/kernels/all_reduce.py"}
QUICK: dict[str, tuple[str, ...]] = {
    "kernels/flash_fwd/sm90.py": (
        f"{_FWD}[t_equals_s]",
        f"{_FWD}[float16_causal]",
        f"{_FWD}[float32_causal]",
        f"{_FWD}[float32_highest]",
        "tests/kernels/flash_fwd/test_fetch.py::test_a_device_fetches_from_itself[causal-zigzag]",
        "tests/kernels/flash_fwd/test_fetch.py::test_a_device_fetches_from_itself"
        "[claimed-contiguous]",
    ),
    "kernels/flash_fwd/float8_values.py": (
        "tests/kernels/flash_fwd/test_float8.py::test_on_the_gpu[lengths]",
        "tests/kernels/flash_fwd/test_float8.py::test_on_the_gpu[e5m2]",
    ),
    "kernels/flash_fwd/sm80_float8.py": (
        "tests/kernels/flash_fwd/test_float8.py::test_portable_on_the_gpu[lengths]",
        "tests/kernels/flash_fwd/test_float8.py::test_portable_on_the_gpu[e5m2]",
    ),
    "kernels/flash_fwd/batch_rows.py": (
        "tests/kernels/flash_fwd/test_flash_fwd.py::test_batch_rows_in_one_tile_on_the_gpu"
        "[frames16]",
        "tests/kernels/flash_fwd/test_flash_fwd.py::test_batch_rows_in_one_tile_on_the_gpu"
        "[causal20]",
    ),
    "kernels/flash_fwd/segments.py": (f"{_FWD}[documents]",),
    "kernels/flash_fwd/listed_tiles.py": (
        "tests/kernels/flash_fwd/test_listed_tiles.py::test_lists_and_codes_are_those_of_jax_numpy"
        "[(2, 1, 5, 1, 33)-False-3-gpu]",
        "tests/kernels/flash_fwd/test_masks_and_scores.py::test_functions_on_the_gpu"
        "[sm90-0-bfloat16]",
    ),
    "kernels/flash_fwd/sm80.py": (
        "tests/kernels/flash_fwd/test_masks_and_scores.py::test_functions_on_the_gpu"
        "[sm80-0-bfloat16]",
        "tests/kernels/flash_fwd/test_masks_and_scores.py::test_functions_on_the_gpu"
        "[sm80-1-float32]",
    ),
    "kernels/flash_bwd/sm90_fused.py": (
        f"{_BWD}test_edges_on_the_gpu[t_equals_s-True]",
        f"{_BWD}test_edges_on_the_gpu[float16_causal-True]",
    ),
    "kernels/flash_bwd/turns.py": (
        f"{_TURNS}test_on_the_gpu[causal]",
        f"{_TURNS}test_on_the_gpu[lengths]",
    ),
    "kernels/flash_bwd/sm90_dkdv.py": (
        f"{_BWD}test_edges_on_the_gpu[t_equals_s-False]",
        f"{_BWD}test_edges_on_the_gpu[float16_causal-False]",
        f"{_BWD}test_float32_on_the_gpu[t_below_s_float32]",
        f"{_BWD}test_float32_on_the_gpu[t_above_s_float32_highest]",
    ),
    "kernels/flash_bwd/sm90_dq.py": (f"{_BWD}test_edges_on_the_gpu[band-False]",),
    "kernels/flash_bwd/sm90_window.py": (
        f"{_BWD}test_short_windows_on_the_gpu[left=99, right=0_190]",
        f"{_BWD}test_short_windows_on_the_gpu[left=63, right=0_321]",
    ),
    "kernels/flash_bwd/sm90_short.py": (
        f"{_SIZES}test_short_on_the_gpu[one_tile]",
        f"{_SIZES}test_short_on_the_gpu[causal]",
    ),
    "kernels/flash_bwd/sm90_heads.py": (
        f"{_HEADS}test_heads_on_the_gpu[heads_in_turn]",
        f"{_HEADS}test_heads_on_the_gpu[two_swizzles]",
    ),
    "kernels/flash_bwd/one_key_tile.py": (
        f"{_ONE_TILE}test_on_the_gpu[parts]",
        f"{_ONE_TILE}test_on_the_gpu[two_slots]",
    ),
    "kernels/flash_bwd/step_parts.py": (
        f"{_PARTS}test_on_the_gpu[lockstep_claims]",
        f"{_PARTS}test_on_the_gpu[narrow_panel]",
        f"{_PARTS}test_on_the_gpu[float32]",
        f"{_SIZES}test_any_size_on_the_gpu[rows]",
        f"{_SIZES}test_any_size_on_the_gpu[rows_of_two_swizzles]",
    ),
    "kernels/flash_bwd/statistics.py": (f"{_HEADS}test_heads_on_the_gpu[softcap]",),
    "kernels/flash_bwd/sm90_dbias.py": (f"{_BWD}test_edges_on_the_gpu[bias-True]",),
    "kernels/flash_bwd/aux_sums.py": (
        f"{_AUX}test_on_the_gpu[t5_far-sm90]",
        f"{_AUX}test_on_the_gpu[alibi-sm90]",
        f"{_AUX}test_on_the_gpu[of_rows-sm80]",
    ),
    "kernels/flash_jvp/sm90.py": (
        f"{_JVP}test_on_the_gpu[plain-sm90]",
        f"{_JVP}test_on_the_gpu[float16-sm90]",
    ),
    "kernels/flash_jvp/sm90_dual.py": (f"{_JVP}test_on_the_gpu[causal-sm90]",),
    "kernels/flash_jvp/sm80.py": (
        f"{_JVP}test_on_the_gpu[plain-sm80]",
        f"{_JVP}test_on_the_gpu[float32-sm80]",
    ),
    "kernels/attention/key_masks.py": (
        "tests/kernels/test_key_masks.py::test_tiles_and_keys_on_the_gpu[197-64]",
    ),
    "kernels/attention/mask_bits.py": ("tests/kernels/test_mask_bits.py::test_on_the_gpu[sizes0]",),
    "kernels/flash_bwd/sm80.py": (
        f"{_BWD}test_portable_configurations_on_the_gpu[everything_float32-32]",
        f"{_BOTH}[portable_kernels-t_equals_s]",
        f"{_BOTH}[portable_kernels-float16_causal]",
    ),
    "kernels/flash_bwd/sm80_dq.py": (
        f"{_BWD}test_portable_configurations_on_the_gpu[q_lengths_float32_highest-64]",
    ),
    "kernels/flash_bwd/sm80_dbias.py": (
        f"{_BWD}test_portable_configurations_on_the_gpu[bias_float32_highest-64]",
        f"{_BOTH}[portable_kernels-bias]",
    ),
    "kernels/decode/sm90.py": (
        f"{_DECODE}test_cases_on_the_gpu[plain-paged]",
        f"{_DECODE}test_cases_on_the_gpu[plain-stacked]",
        f"{_DECODE}test_cases_on_the_gpu[plain-per_sequence]",
        f"{_DECODE}test_cases_on_the_gpu[group7_odd_dims-stacked]",
        f"{_DECODE}test_cases_on_the_gpu[float32-stacked]",
        f"{_DECODE}test_copies_by_threads_on_the_gpu[pages]",
        f"{_DECODE}test_copies_by_threads_on_the_gpu[one_stage_float32]",
        "tests/caches/test_quantized.py::test_decode_against_float64[kernels-per_sequence]",
        "tests/caches/test_quantized.py::test_decode_against_float64"
        "[kernels-per_sequence-dtypefloat8_e5m2]",
        "tests/caches/test_quantized.py::test_decode_against_float64"
        "[kernels-per_sequence-dtypeint8]",
    ),
    "kernels/decode/box_copies.py": (
        "tests/caches/test_ragged.py::test_a_mixture[kernels-mixture-plain]",
        "tests/caches/test_ragged.py::test_a_mixture[kernels-float8-plain]",
        "tests/caches/test_ragged.py::test_a_mixture[portable_kernels-mixture-plain]",
    ),
    "kernels/decode_mla/producer.py": (
        f"{_MLA}test_on_the_gpu[stacked]",
        f"{_MLA}test_on_the_gpu[layers_softcap_sinks_float16]",
    ),
    "kernels/decode_mla/combine_apart.py": (f"{_MLA}test_on_the_gpu[two_chunks_apart]",),
    "kernels/decode_mla/sm90_byte_rows.py": (
        "tests/caches/test_byte_rows.py::test_what_is_read[kernels-stacked]",
        "tests/caches/test_byte_rows.py::test_what_is_read[kernels-small_pages_window]",
    ),
    "kernels/append/byte_rows.py": (
        "tests/caches/test_byte_rows.py::test_rows_are_written_byte_for_byte[kernels-stacked]",
    ),
    "kernels/decode_mla/sm80.py": (
        f"{_MLA}test_portable_on_the_gpu[stacked-sm80]",
        f"{_MLA}test_portable_on_the_gpu[layers_softcap_sinks_float16-sm80]",
    ),
    "kernels/decode_mla/row_gathers.py": (
        f"{_LISTS}test_on_the_gpu[latent_neighbours]",
        f"{_LISTS}test_on_the_gpu[latent_float16]",
    ),
    "kernels/decode_listed/lists.py": (
        f"{_LISTS}test_on_the_gpu[pages]",
        f"{_LISTS}test_on_the_gpu[packed_float32]",
    ),
    "kernels/decode_listed/gradients_sm90.py": (
        f"{_LISTED_GRADIENTS}test_on_the_gpu[heads12_softcap]",
        f"{_LISTED_GRADIENTS}test_on_the_gpu[odd_dims_float16]",
    ),
    "kernels/prefill/plan.py": (
        f"{_PREFILL}.py::test_interpreted_cases_on_a_gpu[plain-stacked]",
        f"{_PREFILL}.py::test_interpreted_cases_on_a_gpu[plain-per_sequence]",
        f"{_PREFILL}.py::test_interpreted_cases_on_a_gpu[group7_float16-stacked]",
    ),
    "kernels/prefill/combine_partials.py": (
        f"{_PREFILL}.py::test_interpreted_cases_on_a_gpu[splits-stacked]",
    ),
    "kernels/prefill/merge_parts.py": (
        "tests/caches/test_prefixes.py::test_on_a_gpu[pages16]",
        "tests/caches/test_prefixes.py::test_on_a_gpu[group7_float16]",
    ),
    "kernels/prefill/widened_sm90.py": (
        f"{_PREFILL}_widened.py::test_on_a_gpu[int8-paged]",
        f"{_PREFILL}_widened.py::test_on_a_gpu[float8_e4m3fn-stacked]",
    ),
    "kernels/prefill/narrow_sm90.py": (
        f"{_PREFILL}_narrow.py::test_on_a_gpu[int8-paged]",
        f"{_PREFILL}_narrow.py::test_on_a_gpu[float8_e5m2-stacked]",
    ),
    "kernels/prefill/float8_tiles.py": (f"{_PREFILL}_float8.py::test_on_a_gpu[per_sequence]",),
    "kernels/prefill/float8_sm90.py": (
        f"{_PREFILL}_float8.py::test_on_a_gpu[stacked]",
        f"{_PREFILL}_float8.py::test_on_a_gpu[paged]",
    ),
    "kernels/prefill/contiguous_sm90.py": (
        f"{_PREFILL}_contiguous.py::test_interpreted_cases_on_a_gpu[lengths-]",
    ),
    "kernels/flash_fwd/sm90_wide.py": (
        "tests/kernels/flash_fwd/test_wide.py::test_on_the_gpu[dim512]",
        "tests/kernels/flash_fwd/test_wide.py::test_on_the_gpu[float16]",
    ),
    "kernels/flash_bwd/sm90_wide.py": (
        "tests/kernels/flash_bwd/test_bwd_wide.py::test_on_the_gpu[dim512]",
        "tests/kernels/flash_bwd/test_bwd_wide.py::test_on_the_gpu[float16]",
    ),
    "kernels/flash_fwd/sm90_group_window.py": (
        f"{_GROUP_WINDOW[0]}[window128]",
        f"{_GROUP_WINDOW[0]}[window8]",
    ),
    "kernels/flash_bwd/sm90_group_window.py": (
        f"{_GROUP_WINDOW[1]}[window128]",
        f"{_GROUP_WINDOW[1]}[window8]",
    ),
    "kernels/prefill/gathered_sm90.py": (f"{_PREFILL}_gathered.py::test_wide_heads_on_the_gpu",),
    "kernels/prefill/gathered_packed_sm90.py": (
        f"{_PREFILL}_gathered.py::test_packed_wide_heads_on_the_gpu[paged]",
        f"{_PREFILL}_gathered.py::test_packed_wide_heads_on_the_gpu[stacked]",
    ),
    "kernels/prefill/gathered_sm80.py": (
        f"{_PREFILL}_gathered.py::test_on_the_gpu[plain-paged]",
        f"{_PREFILL}_gathered.py::test_on_the_gpu[float32-stacked]",
    ),
    "kernels/append/copy.py": (
        f"{_APPEND}_kernel.py::test_on_the_gpu[paged-new_rows7]",
        f"{_APPEND}_kernel.py::test_on_the_gpu[stacked-new_rows7]",
        f"{_APPEND}_kernel.py::test_on_the_gpu[per_sequence-new_rows7]",
        "tests/caches/test_ragged.py::test_update[kernels-few]",
    ),
    "kernels/append/quantize.py": (
        f"{_APPEND}_quantized.py::test_rows_on_the_gpu[bfloat16-72-int8]",
        f"{_APPEND}_quantized.py::test_rows_on_the_gpu[float16-72-float8_e4m3fn]",
        f"{_APPEND}_quantized.py::test_rows_on_the_gpu[bfloat16-72-float8_e5m2]",
    ),
    "kernels/quantize/blocks.py": (
        "tests/kernels/quantize/test_quantize_blocks.py::test_on_the_gpu[lengths]",
        "tests/kernels/quantize/test_quantize_blocks.py::test_on_the_gpu[short_last]",
        "tests/kernels/quantize/test_quantize_blocks.py::test_on_the_gpu[float32]",
        "tests/kernels/quantize/test_quantize_blocks.py::test_on_the_gpu[odd_dim]",
    ),
    "kernels/append/keep.py": ("tests/caches/test_keep.py::test_every_byte[kernels]",),
    "pallas_lm/kernels/linear.py": (
        f"{_LM}test_on_the_gpu[128-64-7]",
        f"{_LM}test_gated_on_the_gpu[64-64-40]",
    ),
    "pallas_lm/kernels/norm.py": (f"{_LM}test_norm_on_the_gpu[512-2-64]",),
    "pallas_lm/kernels/rotate.py": (f"{_LM}test_rotate_on_the_gpu[5-1-64-64]",),
}

ALL_QUICK = frozenset(test for tests in QUICK.values() for test in tests)

MEMCHECK = tuple(dict.fromkeys(tests[0] for tests in QUICK.values()))


def by_file(tests: tuple[str, ...]) -> dict[str, list[str]]:
    """{test file: its tests}"""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    return files
