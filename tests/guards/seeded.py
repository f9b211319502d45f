"""More faults for tests/guards/faults.py, by the test that must catch them: name -> (file, text,
the one in its place). The first ones lived once, each for a class of mistakes that no guard saw.
"""

SOURCE = "pallas_attn"
FWD, BWD, PREFILL, MLA, DECODE, APPEND, SHARED, MMA, LANG = (
    f"{SOURCE}/kernels/{name}"
    for name in (
        "flash_fwd",
        "flash_bwd",
        "prefill",
        "decode_mla",
        "decode",
        "append",
        "attention",
        "mma",
        "lang",
    )
)

TEST_MATMULS = "tests/guards/test_emitted_matmuls.py"

Seed = tuple[str, str, str]

SEEDS: dict[str, dict[str, Seed]] = {
    # ---- hazards between the warps of a warpgroup (tests/support/hazards.py) ---------------------
    "tests/kernels/prefill/test_prefill.py -k test_interpreted": {
        "q_is_loaded_again_before_all_warps_have_read_it": (
            f"{PREFILL}/kernel.py",
            "            plgpu.commit_smem()  # by now",
            "            pass  # by now",
        ),
        "q_of_a_split_is_loaded_before_all_warps_have_read_it": (
            f"{PREFILL}/queries.py",
            "        plgpu.commit_smem()\n    pl.when(exists)",
            "        pass\n    pl.when(exists)",
        ),
    },
    "tests/kernels/flash_fwd/test_claims.py": {
        "a_claimed_code_is_read_by_all_warps_unsynced": (
            f"{FWD}/claims.py",
            "    thread.shared_store(refs.codes, slot, code, first)\n    thread.sync()\n",
            "    thread.shared_store(refs.codes, slot, code, first)\n",
        ),
    },
    "tests/kernels/decode/test_decode_kernel.py -k 'test_interpreted and plain'": {
        "the_table_of_sequences_is_read_unsynced": (
            f"{DECODE}/scheduler.py",
            "thread.index < 1)\n    thread.sync()\n",
            "thread.index < 1)\n",
        ),
    },
    "tests/kernels/prefill/test_prefill_narrow.py -k test_interpreted": {
        "widened_rows_are_handed_over_without_a_fence": (
            f"{PREFILL}/widening_producer.py",
            "plgpu.commit_smem()\n            plgpu.barrier_arrive(",
            "plgpu.barrier_arrive(",
        ),
    },
    # ---- code behind a twin (tests/support/emitted.py) -------------------------------------------
    TEST_MATMULS: {
        "packed_results_of_the_lower_rows_go_to_the_upper": (
            f"{MMA}/packed_rows.py",
            "thread.store(to, lines[half] + beside // 2, word, 4, starts[half][2])",
            "thread.store(to, lines[0] + beside // 2, word, 4, starts[half][2])",
        ),
        "packed_log_sum_exps_have_one_head": (
            f"{MMA}/packed_rows.py",
            "index = thread.wide(head) * tokens + thread.wide(token)",
            "index = thread.wide(at.head) * tokens + thread.wide(token)",
        ),
        "scales_are_those_of_another_warps_keys": (
            f"{MMA}/mma_rowmajor.py",
            "* split.keys + split.first_key(warp) + lane % 4 * 2",
            "* split.keys + lane % 4 * 2",
        ),
        "the_last_block_to_arrive_is_one_too_many": (
            f"{LANG}/threads.py",
            "            (count - 1).value,\n",
            "            count.value,\n",
        ),
        "rows_of_float32_keys_are_mixed": (
            f"{MMA}/mma_tf32.py",
            "        start = start + (split.first_key(warp) + lane // 4) * words\n",
            "        start = start + (split.first_key(warp) + lane % 8) * words\n",
        ),
        "float32_probabilities_change_places": (
            f"{MMA}/mma_tf32.py",
            "for n in range(2) for pair in column]",
            "for pair in column for n in range(2)]",
        ),
        "float32_queries_leave_out_a_small_product": (
            f"{MMA}/mma_tf32.py",
            "        sums[2] = _mma(sums[2], rest_of_left, right)\n",
            "",
        ),
        "a_matmul_takes_the_words_of_the_next_keys": (
            f"{MMA}/mma_rowmajor.py",
            "b[2 * n : 2 * n + 2], dtype)",
            "b[2 * n ^ 2 :][:2], dtype)",
        ),
        "columns_of_two_rows_are_swapped": (
            f"{MMA}/mma_rowmajor.py",
            'for order in ("0x5410", "0x7632")',
            'for order in ("0x7632", "0x5410")',
        ),
        "folded_probabilities_meet_other_keys": (
            f"{MMA}/mma_rowmajor.py",
            "of_a = [a[key // 8], zero, a[key // 8 + 1], zero]",
            "of_a = [a[key // 8], zero, zero, a[key // 8 + 1]]",
        ),
        "values_are_read_untransposed": (
            f"{MMA}/mma_sync.py",
            "n * width + column), transposed=True)",
            "n * width + column), transposed=False)",
        ),
        "keys_of_a_matrix_are_in_another_order": (
            f"{MMA}/mma_sync.py",
            "+ lane % 8 + lane // 16 * 8\n        right = address_of(k, row, lane // 8 % 2, step)",
            "+ lane % 16\n        right = address_of(k, row, lane // 16, step)",
        ),
        "a_transposed_operand_has_rows_and_keys_swapped": (
            f"{MMA}/mma_2x2.py",
            "        a_row = lane % 8 + lane // 16 * 8\n",
            "        a_row = lane % 16\n",
        ),
        "int8_is_128_too_large": (
            f"{LANG}/thread_math.py",
            "mov.b32 c, 0x64806480",
            "mov.b32 c, 0x64006400",
        ),
        "row_maxima_are_those_of_one_lane": (
            f"{MMA}/mma_2x2.py",
            "            for distance in (1, 2):\n",
            "            for distance in (1,):\n",
        ),
    },
}
