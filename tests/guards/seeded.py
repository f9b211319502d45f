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

TEST_EVERY = "tests/kernels/test_every_kernel.py"
TEST_MLA, TEST_APPEND, TEST_BWD = (
    "tests/kernels/decode_mla/test_decode_mla.py",
    "tests/kernels/append/test_append_kernel.py",
    "tests/kernels/flash_bwd/test_flash_bwd.py",
)
TEST_FWD, TEST_DECODE, TEST_PREFILL = (
    "tests/kernels/flash_fwd/test_flash_fwd.py",
    "tests/kernels/decode/test_decode_kernel.py",
    "tests/kernels/prefill/test_prefill.py",
)
TEST_MATMULS = "tests/guards/test_emitted_matmuls.py"

Seed = tuple[str, str, str]

SEEDS: dict[str, dict[str, Seed]] = {
    # ---- the store of lowered kernels ------------------------------------------------------------
    "tests/api/test_stored_kernels.py -k part_of_the_key": {
        "store_forgets_cuda": (
            f"{SOURCE}/_call/store.py",
            'return f"{current.device_kind}, {current.client.platform_version}"',
            "return current.device_kind",
        ),
        "store_forgets_sources_in_folders": (
            f"{SOURCE}/_call/store.py",
            "in sorted(os.walk(_PACKAGE)):",
            "in sorted(os.walk(_PACKAGE))[:1]:",
        ),
        "store_forgets_where_sources_lie": (
            f"{SOURCE}/_call/store.py",
            "            place = os.path.relpath(os.path.join(folder, name), _PACKAGE)\n",
            "            place = name\n",
        ),
        "store_forgets_the_precision": (
            f"{SOURCE}/_call/store.py",
            '_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", ',
            '_SETTINGS = ("jax_enable_x64", ',
        ),
        "store_forgets_settings_of_pallas": (
            f"{SOURCE}/_call/store.py",
            'if "mosaic" in name or "pallas" in name]',
            'if "mosaic" in name]',
        ),
        "store_forgets_the_generation": (
            f"{SOURCE}/_call/store.py",
            "return device.asked_to_overlap.get(), device.gpu_generation(), values",
            "return device.asked_to_overlap.get(), values",
        ),
        "store_forgets_dtypes_of_arrays": (
            f"{SOURCE}/_call/store.py",
            "types = [(x.shape, str(x.dtype)) for x in shapes]",
            "types = [x.shape for x in shapes]",
        ),
        "store_forgets_jaxlib": (
            f"{SOURCE}/_call/store.py",
            'return jax.__version__, importlib.metadata.version("jaxlib"), digest.hexdigest()',
            "return jax.__version__, digest.hexdigest()",
        ),
    },
    # ---- rows of tests/support/kernels.py --------------------------------------------------------
    f"{TEST_EVERY} -k '(hard_data and few_rows) or (hard_data and decode.sm) or missing'": {
        "sums_of_few_latent_rows_keep_an_old_maximum": (
            f"{MLA}/sm90_few_rows.py",
            "state.row_sum * down_columns(rescale, s.shape) + p, higher)",
            "state.row_sum + p, higher)",
        ),
        "sums_of_decode_keep_an_old_maximum": (
            f"{DECODE}/mainloop.py",
            "    acc, row_sum = softmax.rescaled(new, (state.acc, state.row_sum))\n",
            "    acc, row_sum = softmax.rescaled(new, state.acc), state.row_sum\n",
        ),
        "one_lost_split_is_not_lost": (
            f"{DECODE}/combine_splits.py",
            "lost = thread.choose(at.lost >= 1,",
            "lost = thread.choose(at.lost > 1,",
        ),
        "gathered_rows_that_are_lost_have_an_lse": (
            f"{PREFILL}/gathered.py",
            "return out, jnp.where(lost[:, None, None], jnp.nan, lse)",
            "return out, lse",
        ),
        "lost_rows_of_prefill_count": (
            f"{PREFILL}/kernel.py",
            "jnp.where(invalid, jnp.nan, 0.0)",
            "jnp.where(invalid, 0.0, 0.0)",
        ),
    },
    f"{TEST_EVERY} -k '(hard_data or boundaries) and (widened or narrow)'": {
        "values_are_widened_by_the_scales_of_keys": (
            f"{PREFILL}/widened_sm90.py",
            "thread.load(scales[side], line, 4)",
            "thread.load(scales[0], line, 4)",
        ),
        "a_narrow_scale_past_the_length_is_read": (
            f"{PREFILL}/widening_producer.py",
            "Word(scales, line(row)), row < tile.live, inside, 4)",
            "Word(scales, line(row)), row <= tile.live, inside, 4)",
        ),
    },
    # ---- inline code that only a GPU had compared ------------------------------------------------
    "tests/guards/test_emitted_code.py -k 'told or listed_rows'": {
        "a_row_without_keys_silences_its_thread": (
            f"{MMA}/byte_rows.py",
            "highest = functools.reduce(arith.maxnumf, numbers)",
            "highest = functools.reduce(arith.maximumf, numbers)",
        ),
        "a_number_at_the_bound_is_above_it": (
            f"{MMA}/byte_rows.py",
            "above = arith.extui(asm.i32(), arith.cmpf(arith.CmpFPredicate.OGT, highest, limit))",
            "above = arith.extui(asm.i32(), arith.cmpf(arith.CmpFPredicate.OGE, highest, limit))",
        ),
        "listed_rows_of_a_layer_begin_in_32_bits": (
            f"{MMA}/gathered_rows.py",
            "begin = thread.to_int64(layer) * layer_rows",
            "begin = thread.to_int64(layer * layer_rows)",
        ),
        "a_listed_row_behind_the_last_is_copied": (
            f"{MMA}/gathered_rows.py",
            "return (row >= 0) & (row < rows)",
            "return (row >= 0) & (row <= rows)",
        ),
        "listed_rows_are_not_swizzled_by_their_row": (
            f"{MMA}/gathered_rows.py",
            "packed_rows.swizzled_place(thread.index // ACROSS, word, chunks, ACROSS)",
            "packed_rows.swizzled_place(thread.index * 0, word, chunks, ACROSS)",
        ),
    },
    # ---- accumulators that are read before their matmuls are done: slow, not wrong ---------------
    f"{TEST_EVERY} -k 'test_hard_data and flash_fwd.sm90-plain'": {
        "scores_are_read_before_their_matmuls_are_done": (
            f"{MMA}/wgmma.py",
            "return plgpu.wgmma_accumulator_load(first, wait_n=behind)",
            "return plgpu.wgmma_accumulator_load(first, wait_n=behind + 1)",
        ),
    },
    f"{TEST_EVERY} -k 'test_hard_data and flash_bwd.sm90_window'": {
        "dp_of_a_window_is_read_before_its_matmul_is_done": (
            f"{BWD}/sm90_window.py",
            "dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)",
            "dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=2)",
        ),
    },
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
            f"{SHARED}/claims.py",
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
    "tests/kernels/flash_fwd/test_sm100.py -k 'not machine_code'": {
        "sm100_k_is_overwritten": (
            f"{FWD}/sm100.py",
            "pl.when(again)(lambda: plgpu.barrier_wait(memory.k_free.at[slot]))",
            "pass",
        ),
        "sm100_scores_overwrite_p": (
            f"{FWD}/sm100.py",
            "        wait(memory.o_ready.at[n])\n        scores(n, slot)",
            "        scores(n, slot)",
        ),
        "sm100_out_is_multiplied_before_it_is_rescaled": (
            f"{FWD}/sm100.py",
            "        wait(memory.o_scaled.at[n])\n",
            "",
        ),
        "sm100_scores_are_not_in_registers_yet": (
            f"{FWD}/sm100.py",
            "    plgpu.wait_load_tmem()\n    where, key =",
            "    where, key =",
        ),
        "sm100_p_is_not_stored_yet": (
            f"{FWD}/sm100.py",
            "    plgpu.commit_tmem()\n    plgpu.barrier_arrive(memory.p_ready",
            "    plgpu.barrier_arrive(memory.p_ready",
        ),
        "sm100_values_are_those_of_the_next_tile": (
            f"{FWD}/sm100.py",
            "memory.scores[n][1], memory.v.at[slot]",
            "memory.scores[n][1], memory.v.at[block.slot(step + 1)]",
        ),
        "sm100_nothing_is_rescaled": (
            f"{FWD}/sm100.py",
            "pl.when(jnp.min(factor) < 1.0)",
            "pl.when(jnp.min(factor) < 0.0)",
        ),
        "sm100_an_infinite_logit_keeps_other_rows_from_being_rescaled": (
            f"{FWD}/sm100.py",
            "jnp.where(row_max == rows.row_max, 1.0, jnp.exp2(rows.row_max - base))",
            "jnp.exp2(rows.row_max - base)",
        ),
        "sm100_factors_are_overwritten": (
            f"{FWD}/sm100.py",
            "    plgpu.barrier_wait(memory.factor_free.at[n])\n    memory.factors",
            "    memory.factors",
        ),
        "sm100_tensor_memory_changes_hands_without_a_fence": (
            f"{FWD}/sm100.py",
            "p_ready=_tensor_memory_barriers(count)",
            "p_ready=barrier(num_barriers=count)",
        ),
        "sm100_a_hidden_exponential_is_a_polynomial": (
            f"{FWD}/sm100.py",
            "0 if masked or plan.logit_rules.adds else",
            "0 if plan.logit_rules.adds else",
        ),
        "sm100_a_warp_computes_what_mosaic_does_not_lower": (
            f"{FWD}/sm100.py",
            "pl.when(end <= tile.kv_len)(whole)",
            "pl.when(jnp.logical_not(end > tile.kv_len))(whole)",
        ),
        "sm100_kv_tiles_begin_128_keys_apart": (
            f"{FWD}/sm100.py",
            "self.listed.tile(t)) * self.ctx.plan.config.block_kv",
            "self.listed.tile(t)) * TILE",
        ),
        "sm100_a_q_tile_ends_with_the_other": (
            f"{FWD}/sm100.py",
            "return self.first + step < self.spans[n].hi",
            "return self.first + step < self.spans[0].hi",
        ),
    },
    "tests/kernels/flash_bwd/test_sm100.py -k 'not machine_code'": {
        "bwd_sm100_q_is_overwritten": (
            f"{BWD}/sm100.py",
            "pl.when(n >= config.q_stages)(lambda: wait(memory.q_free.at[slot]))",
            "pass",
        ),
        "bwd_sm100_do_is_overwritten": (
            f"{BWD}/sm100.py",
            "pl.when(n >= config.do_stages)(lambda: wait(memory.do_free.at[do_slot]))",
            "pass",
        ),
        "bwd_sm100_scores_overwrite_p": (
            f"{BWD}/sm100.py",
            "        wait(memory.p_free)\n        scores(n + 1)",
            "        scores(n + 1)",
        ),
        "bwd_sm100_p_overwrites_scores_that_the_other_has_not_read": (
            f"{BWD}/sm100.py",
            "            plgpu.barrier_wait(memory.s_read)  #",
            "            pass  #",
        ),
        "bwd_sm100_scores_are_read_after_all": (
            f"{BWD}/sm100.py",
            "    plgpu.wait_load_tmem()\n    plgpu.barrier_arrive(memory.s_read)",
            "    plgpu.barrier_arrive(memory.s_read)",
        ),
        "bwd_sm100_p_is_not_stored_yet": (
            f"{BWD}/sm100.py",
            "    plgpu.commit_tmem()\n    plgpu.barrier_arrive(memory.p_ready",
            "    plgpu.barrier_arrive(memory.p_ready",
        ),
        "bwd_sm100_one_warpgroup_has_stored_p": (
            f"{BWD}/sm100.py",
            "p_ready=_tensor_memory_barrier(WARPGROUPS)",
            "p_ready=_tensor_memory_barrier(1)",
        ),
        "bwd_sm100_ds_is_not_stored_yet": (
            f"{BWD}/sm100.py",
            "        wait(memory.ds_ready)\n",
            "",
        ),
        "bwd_sm100_dp_overwrites_dq": (
            f"{BWD}/sm100.py",
            "        if shares_columns:\n            wait(memory.dq_read)\n",
            "",
        ),
        "bwd_sm100_dq_overwrites_dq": (
            f"{BWD}/sm100.py",
            "            pl.when(n > 0)(lambda: wait(memory.dq_read))",
            "            pass",
        ),
        "bwd_sm100_dq_is_overwritten_on_its_way": (
            f"{BWD}/sm100.py",
            "plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)",
            "plgpu.wait_smem_to_gmem(count, wait_read_only=True)",
        ),
        "bwd_sm100_sums_are_read_before_the_last_matmul": (
            f"{BWD}/sm100.py",
            "    pl.when(has_steps)(lambda: plgpu.barrier_wait(memory.sums_ready))\n",
            "",
        ),
        "bwd_sm100_dk_is_of_the_next_query_tile": (
            f"{BWD}/sm100.py",
            "plgpu.tcgen05_mma(memory.dk, ds, memory.q.at[slot]",
            "plgpu.tcgen05_mma(memory.dk, ds, memory.q.at[block.q_slot(n + 1)]",
        ),
        "bwd_sm100_keys_without_rows_get_what_was_in_tensor_memory": (
            f"{BWD}/sm100.py",
            "        x = jnp.where(mosaic.broadcast_scalar(has_steps, x.shape), x, 0.0)\n",
            "",
        ),
        "bwd_sm100_tensor_memory_changes_hands_without_a_fence": (
            f"{BWD}/sm100.py",
            "dq_read=_tensor_memory_barrier()",
            "dq_read=barrier()",
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
            "index = thread.to_int64(head) * tokens + thread.to_int64(token)",
            "index = thread.to_int64(at.head) * tokens + thread.to_int64(token)",
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
    # ---- data that hurts -------------------------------------------------------------------------
    f"{TEST_EVERY} -k 'hard_data and (decode. or decode_mla)'": {
        "decode_rescales_its_row_sum_alone": (
            f"{DECODE}/mainloop.py",
            "acc, row_sum = softmax.rescaled(new, (state.acc, state.row_sum))",
            "acc, row_sum = state.acc, softmax.rescaled(new, state.row_sum)",
        ),
        "latent_rows_rescale_their_row_sum_alone": (
            f"{MLA}/sm90_few_rows.py",
            "accs = tuple(acc * down_columns(rescale, acc.shape) for acc in state.accs)",
            "accs = state.accs",
        ),
        "latent_values_are_never_rescaled": (
            f"{MLA}/sm90.py",
            "mosaic.any_in_warp(row_max - state.row_max, 0.0) != 0,",
            "mosaic.any_in_warp(row_max - state.row_max, 0.0) > 1,",
        ),
        "portable_latent_values_are_never_rescaled": (
            f"{MLA}/sm80.py",
            "lax.cond(moved != 0, rescaled,",
            "lax.cond(moved > 1, rescaled,",
        ),
        "decode_begins_with_a_row_max_of_zero": (
            f"{DECODE}/mainloop.py",
            "        mosaic.filled((ROWS,), -jnp.inf),\n",
            "        mosaic.filled((ROWS,), 0.0),\n",
        ),
    },
    f"{TEST_EVERY} -k 'hard_data and flash_fwd'": {
        "the_forward_rescales_its_row_sum_alone": (
            f"{FWD}/warpgroups.py",
            "acc, row_sum = softmax.rescaled(new, (acc, state.row_sum))",
            "row_sum = softmax.rescaled(new, state.row_sum)",
        ),
        "the_portable_forward_never_rescales": (
            f"{FWD}/sm80.py",
            "lax.cond(moved != 0, raised, lambda: (row_max, older))",
            "lax.cond(moved > 1, raised, lambda: (row_max, older))",
        ),
    },
    f"{TEST_MLA} -k test_interpreted": {
        "probabilities_are_put_where_other_warps_still_read_keys": (
            f"{MLA}/sm90.py",
            "            threads.each_thread(lambda thread, *_: thread.sync(), (), ())\n",
            "",
        ),
    },
    # ---- boundaries ------------------------------------------------------------------------------
    f"{TEST_EVERY} -k 'boundaries and flash_bwd'": {
        "a_key_tile_one_key_short_is_whole": (
            f"{BWD}/work_order.py",
            "cut = key + self.block_kv > kv_len",
            "cut = key + self.block_kv > kv_len + 1",
        ),
    },
    f"{TEST_EVERY} -k 'boundaries and prefill and paged'": {
        "the_last_partial_page_is_not_read": (
            f"{PREFILL}/tma_producer.py",
            "start < length)(copy)\n                pl.when(start >= length)(",
            "start + size <= length)(copy)\n                pl.when(start + size > length)(",
        ),
    },
    "tests/guards/test_emitted_code.py -k test_masks": {
        "a_trees_bits_are_those_of_the_first_lane": (
            f"{SHARED}/logits.py",
            "[arith.shrui(bits, first) for (bits,) in operands[word]]",
            "[bits for (bits,) in operands[word]]",
        ),
    },
    "tests/caches/test_keep.py -k 'looked_at and interpreted'": {
        "keep_does_not_look_at_the_last_partial_page": (
            f"{APPEND}/keep.py",
            "plan.layout.entry(length - 1) + 1",
            "plan.layout.entry(length)",
        ),
    },
    "tests/caches/test_prefixes.py -k 'saves or interpreted'": {
        "a_part_that_saves_nothing_is_shared": (
            "pallas_attn/prefixes.py",
            "(others * (end - begun) >= -(-LEAST_SAVED // size))",
            "(others * (end - begun) >= 1)",
        ),
        "the_ninth_partial_of_a_part_is_the_first_again": (
            f"{PREFILL}/merge_parts.py",
            "numbers = [(batch + 1) * AT_ONCE + i for i in range(AT_ONCE)]",
            "numbers = [batch * AT_ONCE + i for i in range(AT_ONCE)]",
        ),
    },
    f"{TEST_APPEND} -k 'test_interpreted or wraps'": {
        "a_length_that_wraps_is_a_start": (
            f"{APPEND}/plan.py",
            "jnp.where(start | end >= 0, rows, 0)",
            "jnp.where(start >= 0, rows, 0)",
        ),
    },
    "tests/kernels/flash_fwd/test_fetch.py": {
        "a_launch_ends_when_one_peer_has_read": (
            f"{FWD}/fetch.py",
            "jnp.int32((sizes.devices - 1) * sizes.fetchers)",
            "jnp.int32(sizes.fetchers)",
        ),
    },
    f"{TEST_BWD} -k 'test_interpreted and bias_float32'": {
        "dbias_of_float32_reads_the_keys_of_the_query_head": (
            f"{BWD}/sm90_dbias.py",
            "units_of(refs.units, step.batch, lax.div(step.head, jnp.int32(problem.group)))",
            "units_of(refs.units, step.batch, step.head)",
        ),
    },
    "tests/caches/test_ragged.py -k interpreted": {
        "boxes_hold_rows_past_a_length": (
            f"{DECODE}/box_copies.py",
            "begins & (live >= tile))",
            "begins & (live >= 1))",
        ),
        "boxes_are_those_of_the_first_head": (
            f"{SHARED}/cache_layout.py",
            "return row.page, self.row_in_slab(row.position), row.head\n",
            "return row.page, self.row_in_slab(row.position), row.head * 0\n",
        ),
        "interleaved_values_are_keys": (
            f"{DECODE}/plan.py",
            "return self.problem.head_dim if self.layout.joined else 0",
            "return 0",
        ),
        "new_values_are_written_over_keys": (
            f"{APPEND}/plan.py",
            "return sum(nbytes[:array]) // word, sum(nbytes) // word\n",
            "return 0, sum(nbytes) // word\n",
        ),
    },
    f"{TEST_EVERY} -k 'boundaries and quantized'": {
        "portable_scales_past_a_length_are_read": (
            f"{DECODE}/thread_copies.py",
            "Word(array, source), row < live, inside, 4)",
            "Word(array, source), row < tile, inside, 4)",
        ),
    },
    "tests/kernels/flash_fwd/test_masks_and_scores.py -k 'bounds or blocks'": {
        "keys_past_the_last_make_a_whole_tile": (
            "pallas_attn/_functions/tile_bounds.py",
            "    full = grid.first_keys + grid.block <= grid.kv_len\n",
            "    full = grid.first_keys >= 0\n",
        ),
    },
    "tests/caches/test_packed_rows.py -k 'interpreted'": {
        "packed_sequences_arrive_at_one_counter": (
            f"{DECODE}/combine_splits.py",
            "line, queries = at.sequence, plan.queries",
            "line, queries = at.sequence * 0, plan.queries",
        ),
    },
    # ---- 36 of forty further faults; the other four live -----------------------------------------
    f"{TEST_EVERY} {TEST_FWD} -k 'flash_fwd.sm or test_interpreted'": {
        "float32_outputs_are_scaled_as_scores": (
            f"{FWD}/warpgroups.py",
            "factor = factor * refs.units[1, tile.batch, head]",
            "factor = factor * refs.units[0, tile.batch, head]",
        ),
        "outputs_past_a_query_length_are_one": (
            f"{SHARED}/softmax.py",
            "jnp.where(mosaic.broadcast_rows(inside, x.shape), x, 0.0), acc",
            "jnp.where(mosaic.broadcast_rows(inside, x.shape), x, 1.0), acc",
        ),
        "a_loop_over_whole_tiles_leaves_one_out": (
            f"{FWD}/warpgroups.py",
            "lax.fori_loop(-high, -low, functools.partial(counted, False), carry)",
            "lax.fori_loop(-high, -low - 1, functools.partial(counted, False), carry)",
        ),
        "values_are_those_of_the_keys_of_an_entry": (
            f"{FWD}/warpgroups.py",
            "Entry(e, last, t, t + 1)",
            "Entry(e, last, t, t)",
        ),
        "a_cut_tile_of_values_is_read_whole": (
            f"{FWD}/warpgroups.py",
            "cut = (t + 1) * block > tile.kv_len",
            "cut = t * block > tile.kv_len",
        ),
        "the_portable_forward_writes_rows_past_the_end": (
            f"{FWD}/sm80.py",
            "at = (tile.batch, tile.head, rows.row, plan.problem.q_len - rows.row)",
            "at = (tile.batch, tile.head, rows.row, plan.problem.q_len + 0 * rows.row)",
        ),
        "the_portable_forward_loads_the_same_keys_again": (
            f"{FWD}/sm80.py",
            'copy_async(copy(t - 1, "k"), pending=0)',
            'copy_async(copy(t, "k"), pending=0)',
        ),
        "one_key_past_the_last_is_seen": (
            f"{SHARED}/logits.py",
            "tile.kv_len - start, jnp.int32)",
            "tile.kv_len - start + 1, jnp.int32)",
        ),
        "a_sink_does_not_rescale_the_row_sum": (
            f"{SHARED}/softmax.py",
            "row_sum = row_sum * jnp.exp2(row_max - higher) + jnp.exp2(sink - higher)",
            "row_sum = row_sum + jnp.exp2(sink - higher)",
        ),
        "a_tile_that_the_mask_cuts_is_whole": (
            f"{SHARED}/tiles.py",
            "full_hi=_divided(larger(full_hi, 0), block)",
            "full_hi=_divided(larger(full_hi + block - 1, 0), block)",
        ),
    },
    f"{TEST_EVERY} {TEST_BWD} -k 'flash_bwd.sm or test_interpreted'": {
        "the_slope_of_a_softcap_forgets_the_cap": (
            f"{SHARED}/logits.py",
            "slope = 1.0 - s * s * (1.0 / problem.softcap**2)",
            "slope = 1.0 - s * s",
        ),
        "delta_is_added": (
            f"{SHARED}/tile_logits.py",
            "else dp - delta",
            "else dp + delta",
        ),
        "delta_is_overwritten_while_it_is_read": (
            f"{BWD}/sm90_dkdv.py",
            "        plgpu.commit_smem()  # delta has been read",
            "        pass  # delta has been read",
        ),
        "dq_past_a_length_is_what_came": (
            f"{BWD}/sm90_dq.py",
            "jnp.where(mosaic.broadcast_rows(inside, part.shape), part, 0.0)",
            "jnp.where(mosaic.broadcast_rows(inside, part.shape), part, part)",
        ),
        "queries_are_loaded_where_dq_still_leaves": (
            f"{BWD}/sm90_dq.py",
            "plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n            _load_queries",
            "_load_queries",
        ),
        "dq_is_not_scaled": (
            f"{BWD}/sm90_dq.py",
            "unit = plan.problem.scale if rows.units.dq is None",
            "unit = 1.0 if rows.units.dq is None",
        ),
        "the_last_queries_of_a_length_meet_no_key": (
            f"{BWD}/key_tiles.py",
            "rows = lax.div(q_len + (block - 1), jnp.int32(block)) * block",
            "rows = lax.div(q_len, jnp.int32(block)) * block",
        ),
        "all_batch_rows_have_the_length_of_the_first": (
            f"{BWD}/key_tiles.py",
            "kv_len = refs.kv_lengths[batch]",
            "kv_len = refs.kv_lengths[0]",
        ),
    },
    f"{TEST_EVERY} {TEST_DECODE} -k 'decode.sm or test_interpreted'": {
        "blocks_of_larger_shares_overlap": (
            f"{DECODE}/scheduler.py",
            "first = block_id * base + jnp.minimum(block_id, rest)",
            "first = block_id * base",
        ),
        "a_lost_sequence_is_an_empty_one": (
            f"{DECODE}/scheduler.py",
            "lost.append(thread.select(good, m * 0, 1))",
            "lost.append(thread.select(good, m * 0, 0))",
        ),
        "the_first_partial_lies_with_the_later_ones": (
            f"{DECODE}/combine_splits.py",
            "index = thread.choose(p < 1, first, later + p * plan.partials_a_block)",
            "index = later + p * plan.partials_a_block",
        ),
        "a_tile_one_key_short_needs_no_mask": (
            f"{DECODE}/mainloop.py",
            "(start + plan.keys.tile <= hi)",
            "(start + plan.keys.tile <= hi + 1)",
        ),
        "a_tile_has_more_keys_than_it_holds": (
            f"{DECODE}/loads.py",
            "thread.minimum(at.live, plan.keys.tile), 0)",
            "at.live, 0)",
        ),
        "int8_values_are_not_rescaled": (
            f"{DECODE}/quantized_mainloop.py",
            "acc = softmax.rescaled(heavy, state.acc)",
            "acc = state.acc",
        ),
        "copies_of_threads_are_awaited_one_too_few": (
            f"{DECODE}/thread_copies.py",
            "stages == 1 else stages - 2)",
            "stages == 1 else stages - 1)",
        ),
    },
    f"{TEST_EVERY} {TEST_MLA} -k 'decode_mla.sm or test_interpreted'": {
        "latent_row_sums_are_not_rescaled": (
            f"{MLA}/sm90.py",
            "row_sum = softmax.rescaled(new, row_sum) + new.row_sum",
            "row_sum = row_sum + new.row_sum",
        ),
        "flags_of_warps_are_read_unsynced": (
            f"{MLA}/sm90_few_rows.py",
            "_Flag(parity, moved))\n    plgpu.commit_smem()\n",
            "_Flag(parity, moved))\n",
        ),
        "a_value_past_the_length_is_not_cleared": (
            f"{MLA}/producer.py",
            "inside = mosaic.positions((TILE, WIDTH), 0, 0) < live",
            "inside = mosaic.positions((TILE, WIDTH), 0, 0) <= live",
        ),
    },
    f"{TEST_EVERY} {TEST_PREFILL} -k 'prefill.sm90 or test_interpreted'": {
        "all_heads_of_a_tile_have_one_sink": (
            f"{PREFILL}/queries.py",
            "sink = sinks[jnp.minimum(rows.head + n, plan.problem.q_heads - 1)]",
            "sink = sinks[jnp.minimum(rows.head, plan.problem.q_heads - 1)]",
        ),
        "a_split_that_does_not_exist_counts": (
            f"{PREFILL}/combine_partials.py",
            "exists = lane < splits",
            "exists = lane <= splits",
        ),
        "a_partial_of_a_lost_sequence_is_not_spoiled": (
            f"{PREFILL}/queries.py",
            "result.row_sum.sum(axis=1) + end.spoil)",
            "result.row_sum.sum(axis=1))",
        ),
        "the_first_value_past_a_length_stays": (
            f"{PREFILL}/tma_producer.py",
            "inside = mosaic.positions((ROWS, wide), 0, 0) < live",
            "inside = mosaic.positions((ROWS, wide), 0, 0) <= live",
        ),
    },
    "tests/kernels/append/test_append_quantized.py tests/caches/test_keep.py -k 'interpreted'": {
        "an_infinite_row_has_a_scale": (
            "pallas_attn/kernels/mma/scales.py",
            "finite = top < _INFINITY\n",
            "finite = top < _INFINITY + 1\n",
        ),
        "keep_moves_a_row_past_the_newest": (
            f"{APPEND}/keep.py",
            "thread.minimum(thread.maximum(source, 0), at.last)",
            "thread.minimum(thread.maximum(source, 0), at.last + 1)",
        ),
    },
    f"{TEST_EVERY} -k 'pairs_of_options and flash_bwd.sm80'": {
        "a_config_divides_by_what_it_is_to_refuse": (
            f"{BWD}/sm80.py",
            "(4 * max(self.warpgroups, 1))",
            "(4 * self.warpgroups)",
        ),
    },
    # ---- addresses past 2**31 --------------------------------------------------------------------
    "tests/kernels/test_addresses.py": {
        "rounding_multiplies_batch_rows_in_32_bits": (
            f"{SOURCE}/kernels/quantize/blocks.py",
            "thread.to_int64(batch) * (plan.rows * row_words) +",
            "thread.to_int64(batch * (plan.rows * row_words)) +",
        ),
        "rounding_multiplies_rows_in_32_bits": (
            f"{SOURCE}/kernels/quantize/blocks.py",
            "+ thread.to_int64(row) * row_words",
            "+ thread.to_int64(row * row_words)",
        ),
        "float8_values_multiply_batch_rows_in_32_bits": (
            f"{FWD}/float8_values.py",
            "begin = thread.to_int64(at.batch) * (sizes.rows * row_words)",
            "begin = thread.to_int64(at.batch * (sizes.rows * row_words))",
        ),
        "float8_values_multiply_heads_in_32_bits": (
            f"{FWD}/float8_values.py",
            "(at.batch * sizes.heads + at.head) * (sizes.width * sizes.keys // UNIT)",
            "((at.batch * sizes.heads + at.head) * (sizes.width * sizes.keys // UNIT))",
        ),
        "statistics_multiply_rows_in_32_bits": (
            f"{BWD}/statistics.py",
            "index = thread.to_int64(line) * chunks + thread.to_int64(chunk)",
            "index = thread.to_int64(line * chunks + chunk)",
        ),
        "results_of_decode_multiply_rows_in_32_bits": (
            f"{DECODE}/combine_splits.py",
            "index = line * words + thread.to_int64(place.column)\n    if",
            "index = (line * words).astype(np.int32) + thread.to_int64(place.column)\n    if",
        ),
        "float8_tiles_count_heads_in_32_bits": (
            f"{PREFILL}/float8_tiles.py",
            "head = thread.to_int64(at.sequence * plan.layout.kv_heads + at.head)",
            "head = at.sequence * plan.layout.kv_heads + at.head",
        ),
    },
    # ---- turns, which blocks that run one after the other take as they come ----------------------
    "tests/kernels/flash_bwd/test_turns.py -m 'not gpu' -k interpreted": {
        "a_turn_is_taken_one_early": (
            f"{BWD}/turns.py",
            "least = jnp.where(step.number >= 0, kv_tile, 0)",
            "least = jnp.where(step.number >= 0, jnp.maximum(kv_tile - 1, 0), 0)",
        ),
        "a_turn_is_taken_one_late": (
            f"{BWD}/turns.py",
            "least = jnp.where(step.number >= 0, kv_tile, 0)",
            "least = jnp.where(step.number >= 0, kv_tile + 1, 0)",
        ),
        "the_first_turn_is_that_of_the_second_tile": (
            f"{BWD}/turns.py",
            "jax.new_ref(jnp.zeros((shares,), jnp.int32))",
            "jax.new_ref(jnp.ones((shares,), jnp.int32))",
        ),
        "dq_is_added_before_its_turn": (
            f"{BWD}/turns.py",
            "        _wait_for(ctx, work, wg, step)\n        self.store(at, step)\n",
            "        self.store(at, step)\n        _wait_for(ctx, work, wg, step)\n",
        ),
        "a_turn_is_looked_up_for_the_other_warpgroup": (
            f"{BWD}/turns.py",
            "    place = _place(ctx, work, wg, jnp.maximum(step.number, 0))\n",
            "    place = _place(ctx, work, 1 - wg, jnp.maximum(step.number, 0))\n",
        ),
        "a_step_that_is_none_passes_a_turn_on": (
            f"{BWD}/turns.py",
            "place = jnp.where(number >= 0, _place(ctx, work, wg, number), -1)",
            "place = _place(ctx, work, wg, jnp.maximum(number, 0))",
        ),
    },
    "tests/kernels/flash_bwd/test_any_size.py -k 'test_any_size and interpreted and rows'": {
        "a_block_leaves_the_last_lines_of_dq": (
            f"{BWD}/statistics.py",
            "for line in range(0, lines, zeros.shape[0]):",
            "for line in range(0, lines - zeros.shape[0], zeros.shape[0]):",
        ),
        "zeros_of_dq_begin_with_the_head_of_their_tile_number": (
            f"{BWD}/statistics.py",
            "some = pl.ds((row * tiles + t) * lines + line, zeros.shape[0])",
            "some = pl.ds((row + t) * lines + line, zeros.shape[0])",
        ),
        "zeros_of_dq_are_stored_uncommitted": (
            f"{BWD}/statistics.py",
            "    plgpu.commit_smem()\n    for array, zeros",
            "    for array, zeros",
        ),
    },
    "tests/kernels/flash_bwd/test_step_parts.py tests/kernels/flash_bwd/test_any_size.py "
    "-k interpreted": {
        "blocks_of_a_gradient_begin_one_late": (
            f"{BWD}/step_parts.py",
            "own = own - each.blocks()",
            "own = own - each.blocks() - 1",
        ),
        "the_second_gradient_has_the_blocks_of_the_first": (
            f"{BWD}/step_parts.py",
            "own = own - each.blocks()",
            "own = own - 0 * each.blocks()",
        ),
        "sums_of_dq_are_rounded_without_their_factor": (
            f"{BWD}/step_parts.py",
            "total = total if pieces.scale == 1.0 else total * pieces.scale",
            "total = 1.0 * total",
        ),
    },
    f"{TEST_MATMULS} tests/guards/test_emitted_code.py": {
        "a_portable_result_has_a_row_too_many": (
            f"{MMA}/mma_sync.py",
            "            there = row + below < live if there is None else there",
            "            there = row + below <= live if there is None else there",
        ),
        "a_running_sum_ends_at_sixteen_lanes": (
            f"{LANG}/threads.py",
            "for distance in (1, 2, 4, 8, 16):",
            "for distance in (1, 2, 4, 8):",
        ),
    },
    # ---- the layers of the language model --------------------------------------------------------
    "tests/lm/test_kernels.py -k test_interpreted": {
        "linear_released_early": (
            "pallas_lm/kernels/linear.py",
            "plgpu.wgmma_wait(1)",
            "plgpu.wgmma_wait(2)",
        ),
        "linear_drops_last_columns": (
            "pallas_lm/kernels/linear.py",
            "return -(-self.problem.inner // (self.config.block_in * self.config.splits))",
            "return self.problem.inner // (self.config.block_in * self.config.splits)",
        ),
    },
}
