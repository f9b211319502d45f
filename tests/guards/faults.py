"""Faults in the kernels that tests have to catch: a list of them, and the means to try each.

    python -m tests.guards.faults              # all
    python -m tests.guards.faults ring prefill # those whose names contain one of the words

puts one fault after the other into a copy of the tree and runs its test there, which must fail; and
then the tests without any fault, which must pass. It runs one process for each core. The status is
0 if all were caught.

A fault changes lines of the package. tests/guards/test_faults.py holds that each has its place.
Whoever changes such a line moves the fault along, to the same mistake in new code, and tries it.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

from tests.guards.seeded import SEEDS

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Fault:
    """`old` -> `new`, in place of its one occurrence in `file`; `test`: the arguments of pytest;
    `more`: other texts of the file in place of others, where one is not enough.
    """

    file: str
    old: str
    new: str
    test: str
    more: tuple[tuple[str, str], ...] = ()

    def text(self, root: pathlib.Path = ROOT) -> str:
        """The file with the fault in it."""
        text = (root / self.file).read_text()
        for old, new in ((self.old, self.new), *self.more):
            if text.count(old) != 1:
                raise ValueError(f"{self.file} has {text.count(old)} times {old!r}")
            text = text.replace(old, new)
        return text


APPEND, DECODE = "pallas_attn/kernels/append", "pallas_attn/kernels/decode"
QUANTIZE = "pallas_attn/kernels/quantize/blocks.py"
TEST_QUANTIZE = "tests/kernels/quantize/test_quantize_blocks.py"
MLA, PREFILL = "pallas_attn/kernels/decode_mla", "pallas_attn/kernels/prefill"
FWD, BWD = "pallas_attn/kernels/flash_fwd", "pallas_attn/kernels/flash_bwd"
SHARED, MMA = "pallas_attn/kernels/attention", "pallas_attn/kernels/mma"
LANG, LISTS = "pallas_attn/kernels/lang", "pallas_attn/kernels/decode_listed"
TEST_LISTS = "tests/kernels/decode_listed/test_decode_listed.py"
TEST_LISTED_GRADIENTS = "tests/kernels/decode_listed/test_listed_gradients.py"

TEST_LISTED = "tests/kernels/flash_fwd/test_listed_tiles.py"
TEST_ONE_TILE = "tests/kernels/flash_fwd/test_one_tile.py"
TEST_AUX = "tests/kernels/flash_bwd/test_aux_gradients.py"
TEST_FWD, TEST_BWD = (
    "tests/kernels/flash_fwd/test_flash_fwd.py",
    "tests/kernels/flash_bwd/test_flash_bwd.py",
)
TEST_BYTES = "tests/caches/test_byte_rows.py"
TEST_DECODE, TEST_MLA = (
    "tests/kernels/decode/test_decode_kernel.py",
    "tests/kernels/decode_mla/test_decode_mla.py",
)
TEST_PREFILL, TEST_APPEND = (
    "tests/kernels/prefill/test_prefill.py",
    "tests/kernels/append/test_append_kernel.py",
)
TEST_LINEAR = "tests/api/test_functions.py -k a_slope_and_an_offset"
TEST_KEEP = "tests/caches/test_keep.py"
TEST_EMITTED, TEST_SCHEDULES = (
    "tests/guards/test_emitted_code.py",
    "tests/kernels/test_schedules.py",
)
TEST_FLOAT8 = "tests/kernels/prefill/test_prefill_float8.py"
TEST_NARROW = "tests/kernels/prefill/test_prefill_narrow.py"
TEST_FETCH = "tests/kernels/flash_fwd/test_fetch.py -k as_if_it_were_here"
TEST_MEMORY = "tests/kernels/test_shared_memory.py"
TEST_CLAIMS = "tests/kernels/flash_fwd/test_claims.py"
TEST_SIZES = "tests/kernels/flash_bwd/test_any_size.py"
TEST_ONE_TILE = "tests/kernels/flash_bwd/test_one_key_tile.py"
TEST_PARTS = "tests/kernels/flash_bwd/test_step_parts.py"
TEST_TURNS = "tests/kernels/flash_bwd/test_turns.py -m 'not gpu'"
TEST_HEADS = "tests/kernels/flash_bwd/test_heads.py"
TEST_ORDER = "tests/kernels/flash_bwd/test_work_order.py"
TEST_MERGE = "tests/kernels/decode/test_merge_over_gpus.py -k 'interpreted or waits'"

JVP = "pallas_attn/kernels/flash_jvp"
TEST_JVP = "tests/kernels/flash_jvp/test_flash_jvp.py"

FAULTS: dict[str, Fault] = {
    # ---- tangents --------------------------------------------------------------------------------
    "values_are_released_before_their_matmul": Fault(
        f"{JVP}/sm90.py",
        "v_ring.wait(last)\n            _issue_values(",
        "v_ring.wait(last)\n            v_ring.release(last)\n            _issue_values(",
        f"{TEST_JVP} -k hopper_interpreted_otherwise",
        more=(
            ("            v_ring.release(last)\n            return new", "            return new"),
        ),
    ),
    "out_is_not_subtracted_from_its_tangent": Fault(
        f"{JVP}/sm90.py",
        "x - out * mosaic.broadcast_rows(total, x.shape)",
        "x - 0 * out * mosaic.broadcast_rows(total, x.shape)",
        f"{TEST_JVP} -k 'hopper and plain'",
    ),
    "the_sum_of_moved_probabilities_is_not_rescaled": Fault(
        f"{JVP}/sm90_dual.py",
        "*outs, row_sum, dot_sum = softmax.rescaled(new, older)",
        "*outs, row_sum, _ = softmax.rescaled(new, older)\n    dot_sum = sums.dot_sum",
        f"{TEST_JVP} -k 'dual and ramp'",
    ),
    "a_tangent_has_no_slope_of_the_score": Fault(
        f"{SHARED}/functions.py",
        'if plan.problem.op != "flash_forward":',
        'if plan.problem.op == "flash_backward":',
        f"{TEST_JVP} -k 'portable and score'",
    ),
    "tangents_of_keys_come_from_the_keys": Fault(
        f"{JVP}/operands.py",
        '"k": ("q", "k_dot")}',
        '"k": ("q", "k")}',
        f"{TEST_JVP} -k 'portable and of_k'",
    ),
    # ---- order of reads and writes ---------------------------------------------------------------
    "a_work_tile_is_left_out_of_what_blocks_claim": Fault(
        f"{SHARED}/claims.py",
        "first) + grid",
        "first) + grid + 1",
        TEST_CLAIMS,
    ),
    "a_block_claims_on_past_the_last_work_tile": Fault(
        f"{SHARED}/claims.py",
        "thread.select(number < work_tiles, code, -1)",
        "thread.select(number < work_tiles + 1, code, -1)",
        f"{TEST_CLAIMS} -k counts",
    ),
    "a_block_claims_again_at_every_kv_tile": Fault(
        f"{SHARED}/claims.py",
        "lax.cond(entry == 1,",
        "lax.cond(entry >= 1,",
        f"{TEST_CLAIMS} -k counts",
    ),
    "chunks_that_share_keys_are_claimed_apart": Fault(
        f"{SHARED}/claims.py",
        "problem.kv_heads, group).swapaxes(1, 2)",
        "problem.kv_heads, group)",
        f"{TEST_CLAIMS} -k claimed_together",
    ),
    "chunks_are_claimed_longest_first": Fault(
        f"{BWD}/work_order.py",
        "group = np.where(whole, head - order.heads, head // together)",
        "group = head // together",
        f"{TEST_ORDER} -k chunks",
    ),
    "blocks_in_lockstep_begin_past_the_last_query_tile": Fault(
        f"{BWD}/key_tiles.py",
        "self.span.hi - 1 - i",
        "self.span.hi - i",
        TEST_ORDER,
    ),
    "the_heads_of_a_query_tile_are_not_all_taken": Fault(
        f"{BWD}/key_tiles.py",
        "        over = g + 1 == group\n",
        "        over = g + 2 >= group\n",
        TEST_ORDER,
    ),
    "the_last_head_of_the_backward_goes_by_no_rank": Fault(
        f"{SHARED}/tile_lists.py",
        "codes = jnp.where(head >= first, codes, table)",
        "codes = jnp.where(head > first, codes, table)",
        f"{TEST_ORDER} -k order_of_keys",
    ),
    "query_tiles_of_two_documents_meet_no_mask": Fault(
        f"{BWD}/key_tiles.py",
        "refs.segment_spans[batch, i, tile] for i in range(4)",
        "refs.segment_spans[batch, i, tile] for i in (0, 0, 3, 3)",
        f"{TEST_ORDER} -k within_a_document",
    ),
    "the_backward_claims_at_every_query_tile": Fault(
        f"{BWD}/producer.py",
        "            return count + 1\n\n        count = lax.fori_loop",
        "            _ = claims.claim(ctx, n + 1) if plan.order.claims else None\n"
        "            return count + 1\n\n        count = lax.fori_loop",
        f"{TEST_ORDER} -k counts",
    ),
    "an_addition_to_dq_waits_for_no_turn": Fault(
        f"{BWD}/turns.py",
        "thread.wait_until(refs.counters, at.place, at.least)",
        "del thread, refs, at",
        f"{TEST_TURNS} -k before_its_turn",
    ),
    "a_turn_passes_before_dq_is_in_memory": Fault(
        f"{BWD}/turns.py",
        "plgpu.wait_smem_to_gmem(0)",
        "plgpu.wait_smem_to_gmem(0, wait_read_only=True)",
        f"{TEST_TURNS} -k interpreted",
    ),
    "the_turn_of_the_last_query_tile_does_not_pass": Fault(
        f"{BWD}/sm90_fused.py",
        "                turns.pass_on(ctx, work, wg, added)\n        results",
        "                pass\n        results",
        f"{TEST_TURNS} -k interpreted",
    ),
    "blocks_in_turn_do_not_claim_their_first_work_tiles": Fault(
        f"{BWD}/operands.py",
        "claims.counter(-plan.order.grid if plan.order.turns else 0)",
        "claims.counter()",
        f"{TEST_TURNS} -k interpreted",
    ),
    "a_claim_is_read_before_it_is_written": Fault(
        f"{SHARED}/claims.py",
        "    plgpu.barrier_wait(smem.ready.at[slot])\n",
        "",
        TEST_CLAIMS,
    ),
    "the_last_head_goes_by_no_rank": Fault(
        f"{FWD}/segments.py",
        "known = counts | (head < plan.order.first_ranked_head)",
        "known = counts | (head < plan.order.first_ranked_head + plan.problem.group)",
        f"{TEST_CLAIMS} -k by_rank",
    ),
    "by_xla_the_last_head_goes_by_no_rank": Fault(
        f"{SHARED}/tile_lists.py",
        "jnp.where(head >= first, codes, table)",
        "jnp.where(head > first, codes, table)",
        f"{TEST_CLAIMS} -k by_rank",
    ),
    "a_work_tile_that_needs_no_key_waits_for_one_that_is_not_fetched": Fault(
        f"{FWD}/fetch.py",
        "needed |= at[None] == 0",
        "needed |= at[None] < 0",
        TEST_FETCH,
    ),
    "fetched_rows_are_read_before_they_are_here": Fault(
        f"{FWD}/fetch_producer.py", "pl.when(where)", "pl.when(where & (t < 0))", TEST_FETCH
    ),
    "fetch_reuses_a_slot_before_it_is_read": Fault(
        f"{FWD}/fetch.py",
        "wait_copies_back(1, read=True)",
        "wait_copies_back(9, read=True)",
        TEST_FETCH,
    ),
    "fetch_signals_a_piece_too_early": Fault(
        f"{FWD}/fetch.py", "wait_copies_back(BEHIND)", "wait_copies_back(BEHIND + 1)", TEST_FETCH
    ),
    "fetch_signals_its_last_pieces_too_early": Fault(
        f"{FWD}/fetch.py", "wait_copies_back(0)", "wait_copies_back(1)", TEST_FETCH
    ),
    "fetch_signals_several_pieces_with_the_first": Fault(
        f"{FWD}/fetch.py", "(number + 1) % sizes.run < 1", "number % sizes.run < 1", TEST_FETCH
    ),
    "fetch_leaves_out_what_rows_past_the_end_take": Fault(
        f"{FWD}/fetch.py",
        "return tma_operands.round_up(plan.problem.q_len, ROWS)",
        "return plan.problem.q_len",
        TEST_FETCH,
    ),
    "a_kv_tile_that_some_rows_mask_is_taken_as_it_arrives": Fault(
        f"{FWD}/fetch_producer.py",
        "jnp.clip(functools.reduce(jnp.minimum, whole), *kv_range)",
        "jnp.clip(functools.reduce(jnp.maximum, whole), *kv_range)",
        TEST_FETCH,
    ),
    "kv_tiles_of_a_chunk_are_taken_from_the_first_on": Fault(
        f"{FWD}/fetch_producer.py",
        "TileRange(entry, count, end - 1, place)",
        "TileRange(entry, count, first, place)",
        "tests/kernels/flash_fwd/test_fetch.py -k as_they_arrive",
    ),
    "fetch_does_not_say_that_it_has_read": Fault(
        f"{FWD}/fetch.py", "zero + READ, first,", "zero + DONE, first,", TEST_FETCH
    ),
    "a_merge_over_devices_reads_no_other": Fault(
        f"{DECODE}/merge_over_gpus.py",
        "(at.device < n) | (at.device > n)",
        "(at.device < n) & (at.device > n)",
        TEST_MERGE,
    ),
    "a_merge_over_devices_sends_to_the_first_place": Fault(
        f"{DECODE}/merge_over_gpus.py",
        "sent, words = _sent(ctx, line, at.device)",
        "sent, words = _sent(ctx, line, at.device * 0)",
        TEST_MERGE,
    ),
    "a_merge_over_devices_takes_the_lse_of_another_row": Fault(
        f"{DECODE}/merge_over_gpus.py",
        "* problem.rows + token % problem.rows",
        "* problem.rows",
        TEST_MERGE,
    ),
    "a_merge_over_devices_counts_what_has_no_key": Fault(
        f"{DECODE}/merge_over_gpus.py",
        "thread.choose(none, zero, x)",
        "thread.choose(none, x, x)",
        TEST_MERGE,
    ),
    "a_merge_over_devices_does_not_wait_for_the_lse": Fault(
        f"{DECODE}/merge_over_gpus.py",
        "words(problem.words - 1, line.exists)",
        "words(problem.words - 1, line.number < 0)",
        TEST_MERGE,
    ),
    "decode_ring_is_refilled_while_it_is_read": Fault(
        f"{DECODE}/sm90.py",
        "    threads.run(copies.meet, plan, (), ())\n",
        "",
        f"{TEST_DECODE} -k 'test_interpreted and plain'",
    ),
    "forward_stores_by_tma_before_the_commit": Fault(
        f"{FWD}/warpgroups.py",
        """        plgpu.commit_smem()
        where = tile.batch, pl.ds(rows.row, ROWS), tile.head
        panels.store(staged, rows.wg, refs.out, where, column)
""",
        """        where = tile.batch, pl.ds(rows.row, ROWS), tile.head
        panels.store(staged, rows.wg, refs.out, where, column)
        plgpu.commit_smem()
""",
        f"{TEST_FWD} -k 'test_interpreted and t_equals_s'",
    ),
    "forward_stores_a_panel_at_the_first_column": Fault(
        "pallas_attn/kernels/lang/panels.py",
        "        first += view.shape[-1]\n",
        "",
        f"{TEST_FWD} -k 'test_any_size_interpreted and 136'",
    ),
    "forward_stores_the_lse_of_rows_past_the_end": Fault(
        "pallas_attn/kernels/lang/mosaic.py",
        "inside = (ours & (row + below < length)).value",
        "inside = (ours & (row + below <= length)).value",
        "tests/guards/test_emitted_code.py -k numbers_of_rows",
    ),
    "a_batch_row_sees_a_key_of_the_next_in_its_tile": Fault(
        f"{FWD}/batch_rows.py",
        "end = first + self.rows",
        "end = first + self.rows + 1",
        f"{TEST_ONE_TILE} -k 'test_batch_rows and interpreted and frames16'",
    ),
    "the_last_keys_are_eight_too_few": Fault(
        f"{SHARED}/tile_scheduler.py",
        "tma_operands.round_up(problem.kv_len % block or block, 8)",
        "tma_operands.round_up(problem.kv_len % block or block, 8) - 8",
        f"{TEST_FWD} -k 'test_last_keys_in_eights_interpreted and 13-77'",
    ),
    "consumers_apart_read_values_that_are_under_way": Fault(
        f"{FWD}/sm90_one_tile.py",
        "        plgpu.barrier_wait(smem.ready.at[slot])\n",
        "",
        f"{TEST_ONE_TILE} -k 'test_interpreted and softcap'",
    ),
    "forward_releases_keys_before_they_are_multiplied": Fault(
        f"{FWD}/warpgroups.py",
        """    s = wgmma.matmul((ROWS, keys), q, k, meanwhile, wgmma.score_panels)
    read_later = rows.segments is not None or ctx.plan.score_tiles
    if not read_later:
        ring.release(slot)
""",
        """    read_later = rows.segments is not None or ctx.plan.score_tiles
    if not read_later:
        ring.release(slot)
    s = wgmma.matmul((ROWS, keys), q, k, meanwhile, wgmma.score_panels)
""",
        f"{TEST_FWD} -k 'test_interpreted and t_equals_s'",
    ),
    "prefill_consumers_wait_for_a_turn_that_nobody_gives": Fault(
        f"{FWD}/alternation.py",
        "pl.when(self.wg == 1)(self.give)",
        "pl.when(self.wg == 2)(self.give)",
        f"{TEST_PREFILL} -k 'test_interpreted and plain'",
    ),
    "forward_keeps_entries_that_others_need": Fault(
        f"{FWD}/sm90.py",
        "return result, _release_unused(ctx, rows.span.lo - lo, slot)",
        "return result, slot",
        f"{TEST_FWD} -k 'test_interpreted and band'",
    ),
    "float8_scales_values_by_the_next_block": Fault(
        f"{FWD}/float8_mainloop.py",
        "factors.of_tile(1, t), factors.of_tile(2, t + 1)\n",
        "factors.of_tile(1, t), factors.of_tile(2, t)\n",
        "tests/kernels/flash_fwd/test_float8.py -k 'test_sums and True'",
    ),
    "float8_takes_the_scales_of_another_head": Fault(
        "pallas_attn/kernels/attention/score_tiles.py",
        "kv_head = lax.div(at.head, jnp.int32(ctx.plan.problem.group))",
        "kv_head = lax.div(at.head, jnp.int32(ctx.plan.problem.group)) * 0",
        "tests/kernels/flash_fwd/test_float8.py -k 'test_interpreted and rows'",
    ),
    "float8_releases_scales_that_are_still_read": Fault(
        f"{FWD}/float8_mainloop.py",
        "        plgpu.commit_smem()  # TMA will write where they lie\n",
        "        pass\n",
        "tests/kernels/flash_fwd/test_float8.py -k 'test_sums and False'",
    ),
    "float8_adds_a_part_twice": Fault(
        f"{FWD}/float8_mainloop.py",
        "accs.append(_added(ctx, by, acc, out))",
        "accs.append(_added(ctx, by, _added(ctx, by, acc, out), out))",
        "tests/kernels/flash_fwd/test_float8.py -k 'test_sums and True'",
    ),
    "portable_float8_scales_values_by_the_next_tile": Fault(
        f"{FWD}/sm80_float8.py",
        "factors.of_tile(1, t), factors.of_tile(2, t)\n",
        "factors.of_tile(1, t), factors.of_tile(2, t + 1)\n",
        "tests/kernels/flash_fwd/test_float8.py -k 'portable_interpreted and blocks'",
    ),
    "portable_float8_reads_the_values_of_another_head": Fault(
        f"{FWD}/sm80_float8.py",
        "(_kv_head(ctx, rows) * tiles_of_head + rows.kv_tile(t)) * width",
        "rows.kv_tile(t) * width",
        "tests/kernels/flash_fwd/test_float8.py -k 'portable_interpreted and rows'",
    ),
    "portable_float8_copies_values_too_late": Fault(
        f"{FWD}/sm80_float8.py",
        '    copy_async(sm80.kv_copy(ctx, rows, t - 1, "k"), pending=0)\n',
        '    copy_async(sm80.kv_copy(ctx, rows, t - 1, "k"), pending=1, sync=True)\n',
        "tests/kernels/flash_fwd/test_float8.py -k 'portable_interpreted and plain'",
    ),
    "float8_keeps_a_value_past_the_length": Fault(
        f"{FWD}/float8_values.py",
        "inside & (key < at.live)",
        "inside & (key <= at.live)",
        "tests/kernels/flash_fwd/test_float8.py -k test_values",
    ),
    "float8_forgets_the_offset_of_exponents": Fault(
        f"{FWD}/float8_mainloop.py",
        "row_sum = state.row_sum * (1 / SPREAD)",
        "row_sum = state.row_sum",
        "tests/kernels/flash_fwd/test_float8.py -k 'test_interpreted and plain'",
    ),
    "portable_forward_waits_for_one_copy_less": Fault(
        f"{FWD}/sm80.py",
        "copy_async(*coming, pending=config.stages - 2)",
        "copy_async(*coming, pending=config.stages - 1)",
        f"{TEST_FWD} -k 'test_interpreted and band'",
    ),
    "backward_writes_a_ds_that_is_being_read": Fault(
        f"{BWD}/sm90_fused.py",
        "pl.when(now.own.count >= 2)(lambda: plgpu.barrier_wait(smem.ds_free.at[slot]))",
        "pass",
        f"{TEST_BWD} -k 'test_interpreted and t_above_s'",
    ),
    "backward_adds_dq_by_tma_before_the_commit": Fault(
        f"{BWD}/dq_sum.py",
        "        plgpu.commit_smem()\n        columns",
        "        columns",
        f"{TEST_BWD} -k 'test_interpreted and t_equals_s'",
    ),
    "backward_puts_dq_where_tma_still_reads": Fault(
        f"{BWD}/dq_sum.py",
        "        plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n        ctx.smem.dq[wg]",
        "        ctx.smem.dq[wg]",
        f"{TEST_BWD} -k 'test_interpreted and t_equals_s'",
    ),
    "dk_dv_release_a_tile_one_matmul_early": Fault(
        f"{BWD}/sm90_dkdv.py",
        "plgpu.wgmma_wait(role.product_form.copies)",
        "plgpu.wgmma_wait(1 + role.product_form.copies)",
        f"{TEST_BWD} -k 'test_interpreted and dim192_128'",
    ),
    "wide_keys_are_freed_while_their_gradients_are_stored": Fault(
        f"{BWD}/sm90_dkdv.py",
        "producer.store_rows(rows, 0, consumer.out, at, first * width)\n"
        "    plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n",
        "producer.store_rows(rows, 0, consumer.out, at, first * width)\n",
        f"{TEST_BWD} -k wide_key_tiles_of_a_block",
    ),
    "a_window_is_loaded_where_gradients_are_being_stored": Fault(
        f"{BWD}/sm90_window.py",
        "    plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n",
        "",
        f"{TEST_BWD} -k test_a_block_walks_over_a_window",
    ),
    "a_list_of_keys_is_read_past_its_end": Fault(
        f"{BWD}/sm80_scores.py",
        "self.listed.tile_ahead(t)",
        "self.listed.tile(t)",
        "tests/kernels/flash_fwd/test_masks_and_scores.py -k lists_of_one_tile",
    ),
    "a_list_of_queries_is_read_past_its_end": Fault(
        f"{BWD}/key_tiles.py",
        "work.q_tiles.tile_ahead(i)",
        "work.q_tiles.tile(i)",
        "tests/kernels/flash_fwd/test_masks_and_scores.py -k lists_of_one_tile",
    ),
    "a_short_backward_stores_by_tma_before_the_commit": Fault(
        f"{BWD}/epilogue.py",
        "to[...] = part.astype(to.dtype)\n    plgpu.commit_smem()\n",
        "to[...] = part.astype(to.dtype)\n",
        f"{TEST_SIZES} -k 'test_short and interpreted and one_tile'",
    ),
    "a_short_backward_reads_v_before_it_is_there": Fault(
        f"{BWD}/sm90_short.py",
        '    _wait(smem, pair, ("v", "do"))\n    wgmma',
        "    wgmma",
        f"{TEST_SIZES} -k 'test_short and interpreted and one_tile'",
    ),
    "delta_without_the_gradient_of_the_lse": Fault(
        f"{BWD}/statistics.py",
        "thread.sum_of_lanes(total, LANES) - thread.as_float(d_lse[n])",
        "thread.sum_of_lanes(total, LANES)",
        f"{TEST_SIZES} -k 'test_short and interpreted and one_tile'",
    ),
    "rows_that_see_no_key_have_probabilities": Fault(
        f"{BWD}/statistics.py",
        "scaled = thread.choose(thread.nothing_yet(value), never, scaled)",
        "scaled = scaled",
        f"{TEST_SIZES} -k 'test_short and interpreted and rows_without_keys'",
    ),
    "a_dq_tile_is_stored_before_the_commit": Fault(
        f"{BWD}/epilogue.py",
        "to[...] = part.astype(to.dtype)\n    plgpu.commit_smem()\n",
        "to[...] = part.astype(to.dtype)\n",
        f"{TEST_HEADS} -k 'interpreted and heads_in_turn'",
    ),
    "ds_is_written_while_dv_is_stored_from_there": Fault(
        f"{BWD}/sm90_heads.py",
        "    def stored() -> None:\n        plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n",
        "    def stored() -> None:\n",
        f"{TEST_HEADS} -k 'interpreted and two_swizzles'",
    ),
    "v_is_loaded_while_it_is_read": Fault(
        f"{BWD}/sm90_heads.py",
        "pl.when(is_last)(lambda: plgpu.barrier_arrive(smem.v_free))",
        "pl.when(now.t == 0)(lambda: plgpu.barrier_arrive(smem.v_free))",
        f"{TEST_HEADS} -k 'interpreted and two_swizzles'",
    ),
    "ds_is_written_while_dq_reads_it": Fault(
        f"{BWD}/sm90_heads.py",
        "pl.when(now.count >= ds_slots)(lambda: plgpu.barrier_wait(smem.ds_free.at[to]))",
        "pass",
        f"{TEST_HEADS} -k 'interpreted and heads_in_turn'",
    ),
    "dk_is_stored_where_dq_still_reads_k": Fault(
        f"{BWD}/sm90_heads.py",
        "    plgpu.barrier_wait(smem.dq_done.at[slot])\n",
        "",
        f"{TEST_HEADS} -k 'interpreted and heads_in_turn'",
    ),
    "dv_is_written_where_dq_is_stored_from": Fault(
        f"{BWD}/sm90_heads.py",
        "        if _shares_dv(ctx.plan.problem, slots):\n"
        "            plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n",
        "",
        f"{TEST_HEADS} -k 'interpreted and dq_beside_dv'",
    ),
    "a_head_begins_at_its_first_tile_though_hidden": Fault(
        f"{BWD}/sm90_heads.py",
        "        return self.j == self.first\n",
        "        return self.j == 0\n",
        f"{TEST_HEADS} -k 'interpreted and bias_and_padding'",
    ),
    "dq_of_one_key_tile_is_written_to_the_rows_of_the_other_warpgroup": Fault(
        f"{BWD}/dq_sum.py",
        "(step.t * 2 + wg) * ROWS\n",
        "(step.t * 2 + 1 - wg) * ROWS\n",
        f"{TEST_ONE_TILE} -k 'interpreted and parts_of_a_group'",
    ),
    "a_part_begins_at_the_first_step": Fault(
        f"{BWD}/sm90_fused.py",
        "key_tiles.steps_of(plan, work)[0])",
        "jnp.int32(0))",
        f"{TEST_PARTS} -k 'interpreted and group'",
    ),
    "a_part_of_wide_heads_has_a_step_of_the_next": Fault(
        f"{BWD}/sm90_dkdv.py",
        "lax.fori_loop(first_step + 1, end_step, step, start)",
        "lax.fori_loop(first_step, end_step, step, start)",
        f"{TEST_PARTS} -k 'interpreted and wide_lockstep'",
    ),
    "parts_share_a_piece": Fault(
        f"{BWD}/step_parts.py",
        "* self.parts + part",
        "* self.parts",
        f"{TEST_PARTS} -k pieces_differ",
    ),
    "the_last_part_is_not_added": Fault(
        f"{BWD}/step_parts.py",
        "range(1, pieces.parts)",
        "range(1, pieces.parts - 1)",
        f"{TEST_PARTS} -k 'interpreted and band_apart'",
    ),
    "narrow_columns_of_parts_are_read_from_the_first": Fault(
        f"{BWD}/step_parts.py",
        "first * pieces.in_all // of + ",
        "",
        f"{TEST_PARTS} -k 'interpreted and narrow_panel'",
    ),
    "an_empty_part_has_no_keys": Fault(
        f"{BWD}/producer.py",
        "end == first if plan.order.parts > 1 else work.steps == 0",
        "work.steps == 0",
        f"{TEST_PARTS} -k 'interpreted and empty_parts_wide'",
    ),
    "parts_overwrite_each_others_sums_for_arrays": Fault(
        f"{BWD}/aux_sums.py",
        "work.part * softmax.PARTIALS",
        "0 * softmax.PARTIALS",
        f"{TEST_AUX} -k 'sums_of_keys_interpreted and alibi and parts'",
    ),
    "dq_is_added_to_what_was_there": Fault(
        f"{BWD}/statistics.py",
        "zeros[...] = jnp.zeros(zeros.shape, zeros.dtype)",
        "zeros[...] = jnp.ones(zeros.shape, zeros.dtype)",
        f"{TEST_SIZES} -k 'test_any_size and interpreted and rows'",
    ),
    "keys_are_loaded_into_a_slot_in_use": Fault(
        f"{BWD}/producer.py",
        "pl.when(n > slots - 1)",
        "pl.when(n > 2 * slots - 2)",
        f"{TEST_ONE_TILE} -k 'interpreted and two_slots'",
    ),
    "panels_of_dq_lie_over_each_other": Fault(
        f"{BWD}/dq_sum.py",
        "first = before * self._pieces(",
        "first = 0 * self._pieces(",
        f"{TEST_SIZES} -k 'test_any_size and interpreted and rows_of_two_swizzles'",
    ),
    "dq_of_a_tail_is_not_multiplied_by_all_keys": Fault(
        f"{MMA}/wgmma_swizzles.py",
        "_issue_transposed(x, a, [panels[n] for panels in b])",
        "_issue_transposed(x, a[:1], [panels[n] for panels in b[:1]])",
        f"{TEST_HEADS} -k 'interpreted and dq_beside_dv'",
    ),
    "wide_gradients_are_stored_at_the_first_columns": Fault(
        f"{BWD}/sm90_dkdv.py",
        "consumer.out, at, first * width)",
        "consumer.out, at, 0)",
        f"{TEST_SIZES} -k 'test_any_size and interpreted and wide_values'",
    ),
    "latent_values_are_released_one_matmul_early": Fault(
        f"{MLA}/sm90.py",
        "plgpu.wgmma_wait(columns.blocks - 1 - n)",
        "plgpu.wgmma_wait(columns.blocks - n)",
        f"{TEST_MLA} -k 'test_interpreted and two_chunks_side_by_side'",
    ),
    "latent_partials_of_a_launch_are_not_rescaled": Fault(
        f"{MLA}/combine_apart.py",
        "acc = state.acc * mosaic.broadcast_rows(rescale, shape)",
        "acc = state.acc",
        f"{TEST_MLA} -k test_partials_of_many_splits",
    ),
    "latent_partials_of_the_next_chunk_are_combined": Fault(
        f"{MLA}/combine_apart.py",
        "places = scheduler.Partials(count, *(n * together + member for n in others))",
        "places = scheduler.Partials(count, *(n * together for n in others))",
        f"{TEST_MLA} -k 'test_interpreted and two_chunks_apart'",
    ),
    "rows_of_bytes_are_released_before_all_columns_are_in_registers": Fault(
        f"{MLA}/sm90_byte_rows.py",
        "if block == blocks[-1]:",
        "if block == blocks[0]:",
        f"{TEST_BYTES} -k test_all_tiles_by_one_block",
    ),
    "scores_of_rows_of_bytes_have_the_scales_of_other_columns": Fault(
        f"{MLA}/sm90_byte_rows.py",
        "zip(accs, scales.of_scores, strict=True)",
        "zip(accs, scales.of_scores[::-1], strict=True)",
        f"{TEST_BYTES} -k 'test_what_is_read and interpreted-stacked'",
    ),
    "probabilities_of_rows_of_bytes_are_overwritten": Fault(
        f"{MLA}/sm90_byte_rows.py",
        "pl.when(count >= P_SLOTS)(lambda: plgpu.barrier_wait(smem.p_free.at[slot]))",
        "pl.when(count > P_SLOTS)(lambda: plgpu.barrier_wait(smem.p_free.at[slot]))",
        f"{TEST_BYTES} -k test_all_tiles_by_one_block",
    ),
    "rows_of_bytes_have_the_scale_of_their_neighbours": Fault(
        "pallas_attn/kernels/append/byte_rows.py",
        "scale = row.columns[start] * word // SCALE_COLUMNS",
        "scale = row.columns[start] * word // SCALE_COLUMNS * 0",
        f"{TEST_BYTES} -k 'test_rows_are_written and interpreted'",
    ),
    "latent_blocks_of_few_rows_are_released_early": Fault(
        f"{MLA}/sm90_few_rows.py",
        "plgpu.wgmma_wait(len(values) - 1 - done)",
        "plgpu.wgmma_wait(len(values) - done)",
        f"{TEST_MLA} -k 'test_interpreted and stacked'",
    ),
    "prefill_loads_q_where_the_last_is_read": Fault(
        f"{PREFILL}/kernel.py",
        "return wg if config.q_slots == 1 else wg + (i & 1) * config.warpgroups",
        "return wg",
        f"{TEST_PREFILL} -k 'test_interpreted and plain'",
    ),
    # ---- which work is done, and where -----------------------------------------------------------
    "a_window_walk_loses_tiles": Fault(
        f"{BWD}/sm90_window.py",
        "    length = pl.cdiv(plan.tiling.kv_tiles, count)\n",
        "    length = plan.tiling.kv_tiles // count\n",
        TEST_SCHEDULES,
    ),
    "forward_schedule_loses_a_head": Fault(
        f"{SHARED}/tile_scheduler.py",
        "min(n + order.l2_heads, order.heads)",
        "min(n + order.l2_heads, order.heads - 1)",
        TEST_SCHEDULES,
    ),
    "work_tiles_of_one_length_are_in_no_order": Fault(
        f"{SHARED}/tile_lists.py",
        "(across < down)",
        "(across > down)",
        f"{TEST_LISTED} -k longest_first",
    ),
    "lists_of_one_length_share_a_rank": Fault(
        f"{LANG}/threads.py",
        "            more = thread.select(other < number, more + 1, more)",
        "            more = thread.select(other < number, more, more)",
        f"{TEST_LISTED} -k test_lists_and_codes",
    ),
    "a_list_puts_later_tiles_among_the_first": Fault(
        f"{SHARED}/listed_tiles.py",
        "thread.select(tile < begin, seen, seen + wholes - whole)",
        "seen",
        f"{TEST_LISTED} -k test_lists_and_codes",
    ),
    "lists_of_one_head_rank_those_of_all": Fault(
        f"{SHARED}/listed_tiles.py",
        "            owner = owner + own",
        "            owner = owner + own * 0",
        f"{TEST_LISTED} -k test_lists_and_codes",
    ),
    "lists_that_heads_share_are_those_of_single_heads": Fault(
        f"{SHARED}/listed_tiles.py",
        "                own = own * sizes.heads // sizes.heads_of_codes",
        "                own = own % sizes.heads",
        f"{TEST_LISTED} -k test_lists_and_codes",
    ),
    "gradients_of_lists_read_keys_that_are_not_committed": Fault(
        f"{LISTS}/gradients_sm90.py",
        "    plgpu.commit_smem()\n    plgpu.barrier_arrive(smem.ready.at[barrier])",
        "    plgpu.barrier_arrive(smem.ready.at[barrier])",
        f"{TEST_LISTED_GRADIENTS} -k interpreted",
    ),
    "gradients_of_lists_count_entries_of_none": Fault(
        f"{LISTS}/gradients_sm90.py",
        "jnp.where(mosaic.broadcast_rows(rows >= 0, shape), softmax.to_log2(s), -jnp.inf)",
        "softmax.to_log2(s)",
        f"{TEST_LISTED_GRADIENTS} -k interpreted",
    ),
    "gradients_of_lists_overwrite_ds_in_use": Fault(
        f"{LISTS}/gradients_sm90.py",
        "    plgpu.commit_smem()  # all warps have read dS\n",
        "",
        f"{TEST_LISTED_GRADIENTS} -k interpreted",
    ),
    "rows_of_a_list_are_added_a_half_tile_off": Fault(
        f"{MMA}/row_sums.py",
        "for pair in registers[half::2]",
        "for pair in registers[1 - half :: 2]",
        "tests/guards/test_emitted_code.py -k test_rows_are_added",
    ),
    "heads_in_one_work_tile_are_all_the_first": Fault(
        f"{SHARED}/block_tables.py",
        "    return tile._replace(head=tile.head + wg), tile.row",
        "    return tile, tile.row",
        "tests/api/test_kv_blocks.py -k 'interpreted and by_kv_head'",
    ),
    "keys_that_a_mask_cuts_count_as_whole": Fault(
        f"{BWD}/key_tiles.py",
        "span.lo), code == 2",
        "span.lo), code >= 1",
        f"{TEST_BWD} -k 'test_interpreted and padding'",
    ),
    "queries_of_a_tile_have_the_bits_of_its_first_word": Fault(
        f"{SHARED}/mask_bits.py",
        "first + n, pl.ds",
        "first + 0 * n, pl.ds",
        f"{TEST_BWD} -k 'test_interpreted and everything'",
    ),
    "bits_past_the_last_query_are_those_of_the_next_head": Fault(
        f"{LANG}/booleans.py",
        "(row + i < rows)",
        "(row + i < rows + WORD)",
        "tests/guards/test_emitted_code.py -k masks_become_bits",
    ),
    "a_bias_is_read_for_the_rows_of_the_first_warpgroup": Fault(
        f"{SHARED}/score_tiles.py",
        "panel.tile.at[slot, pl.ds(wg * ROWS, ROWS)]",
        "panel.tile.at[slot, pl.ds(wg * 0, ROWS)]",
        f"{TEST_BWD} -k 'test_interpreted and bias_shared'",
    ),
    "dbias_counts_a_tile_of_scores_twice": Fault(
        f"{BWD}/dbias.py",
        "    live = (n < math.prod(walk.readers)) & (row < q_len)\n",
        "    live = row < q_len\n",
        f"{TEST_BWD} -k test_every_tile_of_scores_is_summed_once",
    ),
    "a_far_tile_is_summed_by_the_walk_too": Fault(
        f"{BWD}/dbias.py",
        "(away > walk.far.low)",
        "(away >= walk.far.low)",
        f"{TEST_AUX} -k 'hopper and both_ways_far'",
    ),
    "sums_of_keys_take_the_other_side": Fault(
        f"{BWD}/aux_sums.py",
        "counts = away >= far.high if side > 0 else away <= far.low",
        "counts = away <= far.low if side > 0 else away >= far.high",
        f"{TEST_AUX} -k 'hopper and both_ways_far'",
    ),
    "a_distance_is_off_by_one": Fault(
        f"{BWD}/aux_sums.py",
        "- (keys - 1)\n    return (counted(0)",
        "- keys\n    return (counted(0)",
        f"{TEST_AUX} -k 'hopper and t5_window'",
    ),
    "decode_counts_a_block_too_many": Fault(
        f"{DECODE}/scheduler.py",
        "last = jnp.maximum(end - tiles_before - 1, 0) * fine",
        "last = jnp.maximum(end - tiles_before, 0) * fine",
        f"{TEST_DECODE} -k test_every_unit_is_taken_once",
    ),
    "prefill_splits_lose_a_tile": Fault(
        f"{PREFILL}/queries.py",
        "lax.div(span.hi - span.lo + (config.splits - 1), jnp.int32(config.splits))",
        "lax.div(span.hi - span.lo, jnp.int32(config.splits))",
        TEST_SCHEDULES,
    ),
    "prefill_blocks_begin_at_the_wrong_end": Fault(
        f"{PREFILL}/plan.py",
        "jnp.where(i & 1 == 0, self.first, self.back)",
        "jnp.where(i & 1 == 1, self.first, self.back)",
        TEST_SCHEDULES,
    ),
    "wide_keys_are_loaded_over_keys_that_are_read": Fault(
        f"{FWD}/sm90_wide.py",
        "block.acquire(number >= ctx.plan.config.k_ring)",
        "block.acquire(number > ctx.plan.config.k_ring)",
        "tests/kernels/flash_fwd/test_wide.py -k interpreted",
    ),
    "keys_of_a_group_are_loaded_over_keys_that_are_read": Fault(
        f"{FWD}/sm90_group_window.py",
        "pl.when(i >= plan.config.stages)",
        "pl.when(i > plan.config.stages)",
        "tests/kernels/flash_fwd/test_group_window.py -k interpreted",
    ),
    "a_window_of_a_group_begins_a_key_late": Fault(
        f"{FWD}/sm90_group_window.py",
        "low = query + (window.reach - window.width + 1)",
        "low = query + (window.reach - window.width + 2)",
        "tests/kernels/flash_fwd/test_group_window.py -k interpreted",
    ),
    "keys_of_a_group_are_those_of_the_first_consumer": Fault(
        f"{FWD}/sm90_group_window.py",
        "skipped = first - window.first_key(unit.row)",
        "skipped = 0 * first",
        "tests/kernels/flash_fwd/test_group_window.py -k interpreted",
    ),
    "a_group_stores_dq_where_others_write_ds": Fault(
        f"{BWD}/sm90_group_window.py",
        "pl.when(now.s >= TILES)",
        "pl.when(now.s > TILES)",
        "tests/kernels/flash_bwd/test_group_window.py -k interpreted",
    ),
    "statistics_of_a_group_are_loaded_while_they_are_read": Fault(
        f"{BWD}/sm90_group_window.py",
        "    plgpu.commit_smem()  # all warps have read the step's statistics, too\n"
        "    pl.when(now.is_own)(lambda: plgpu.barrier_arrive(smem.ds_ready.at[to]))\n",
        "    pl.when(now.is_own)(plgpu.commit_smem)\n"
        "    pl.when(now.is_own)(lambda: plgpu.barrier_arrive(smem.ds_ready.at[to]))\n",
        "tests/kernels/flash_bwd/test_group_window.py -k interpreted",
    ),
    "keys_of_a_group_are_loaded_over_keys_that_are_read_late": Fault(
        f"{BWD}/sm90_group_window.py",
        "following = lax.div(s, jnp.int32(walk.of_tile)) + TILES\n",
        "following = lax.div(s, jnp.int32(walk.of_tile)) + 2 * TILES\n",
        "tests/kernels/flash_bwd/test_group_window.py -k 'interpreted and long_chunk'",
    ),
    "keys_before_the_first_are_seen": Fault(
        f"{BWD}/sm90_group_window.py",
        "first = jnp.where(exists, key - query, QUERIES)",
        "first = key - query",
        "tests/kernels/flash_bwd/test_group_window.py -k interpreted",
    ),
    "wide_probabilities_are_stored_over_others": Fault(
        f"{FWD}/sm90_wide.py",
        "pl.when(sums.used >= P_SLOTS)",
        "pl.when(sums.used > P_SLOTS)",
        "tests/kernels/flash_fwd/test_wide.py -k interpreted",
    ),
    "wide_outputs_are_relative_to_an_older_max": Fault(
        f"{FWD}/sm90_wide.py",
        "return Output(accs, row_max, out.used + 1)",
        "return Output(accs, out.row_max, out.used + 1)",
        "tests/kernels/flash_fwd/test_wide.py -k interpreted",
    ),
    "wide_streamed_rows_are_loaded_over_rows_that_are_read": Fault(
        f"{BWD}/sm90_wide.py",
        "block.acquire(number >= buffers.ring)",
        "block.acquire(number > buffers.ring)",
        "tests/kernels/flash_bwd/test_bwd_wide.py -k interpreted",
    ),
    "wide_weights_are_stored_over_others": Fault(
        f"{BWD}/sm90_wide.py",
        "pl.when(tile.number >= SLOTS)",
        "pl.when(tile.number > SLOTS)",
        "tests/kernels/flash_bwd/test_bwd_wide.py -k interpreted",
    ),
    "wide_weights_meet_the_first_values": Fault(
        f"{BWD}/sm90_wide.py",
        "smem.weights.at[weights * PARTS + part]",
        "smem.weights.at[weights * PARTS]",
        "tests/kernels/flash_bwd/test_bwd_wide.py -k interpreted",
    ),
    "parts_of_columns_are_of_other_registers": Fault(
        "pallas_attn/kernels/mma/column_parts.py",
        "thread.shared_floats(to, other + n * mosaic.THREADS, 4)",
        "thread.shared_floats(to, other + 0 * mosaic.THREADS, 4)",
        "tests/guards/test_emitted_matmuls.py -k scores_of_all_columns",
    ),
    "each_launch_makes_the_first_columns": Fault(
        "pallas_attn/kernels/attention/sm80_common.py",
        "return range(first, first + count)",
        "return range(0, count)",
        "tests/kernels/flash_bwd/test_flash_bwd.py -k 'interpreted and dim264'",
    ),
    "gathered_rows_of_a_missing_page_count": Fault(
        f"{DECODE}/lost.py",
        "missing = (table < 0) | (table >= (problem.pages or 0))",
        "missing = table >= (problem.pages or 0)",
        "tests/kernels/test_every_kernel.py -k 'gathered_sm80 and missing'",
    ),
    "gathered_rows_stand_at_the_first_keys": Fault(
        f"{PREFILL}/gathered.py",
        "q_offset=lengths - (problem.q_len if rows is None else rows)",
        "q_offset=lengths * 0",
        "tests/kernels/prefill/test_prefill_gathered.py -k 'test_interpreted and per_sequence'",
    ),
    "packed_wide_rows_of_others_are_overwritten": Fault(
        f"{PREFILL}/gathered_packed_sm90.py",
        "mine = (row >= start) & (row < start + rows)",
        "mine = row >= start",
        "tests/kernels/test_every_kernel.py -k 'test_boundaries and gathered_packed'",
    ),
    "narrow_tiles_are_widened_before_they_are_there": Fault(
        f"{PREFILL}/widening_producer.py",
        "_wait(plan, asked - 1 - n)",
        "_wait(plan, asked - n)",
        f"{TEST_NARROW} -k test_interpreted",
    ),
    "float8_tiles_have_the_scale_of_the_first_lanes": Fault(
        f"{PREFILL}/float8_tiles.py",
        "return thread.warp_highest(top)",
        "return top",
        f"{TEST_FLOAT8} -k test_tiles",
    ),
    "float8_rows_past_a_length_are_read": Fault(
        f"{PREFILL}/float8_tiles.py",
        "narrow = thread.select(position < at.live, narrow, 0)",
        "narrow = thread.select(position < at.live + 1, narrow, 0)",
        f"{TEST_FLOAT8} -k test_tiles",
    ),
    "float8_sums_keep_the_scale_of_v": Fault(
        f"{PREFILL}/float8_mainloop.py",
        "row_sum=new.row_sum * tile.sum",
        "row_sum=new.row_sum",
        f"{TEST_FLOAT8} -k test_interpreted",
    ),
    "float8_queries_are_multiplied_before_they_are_stored": Fault(
        f"{PREFILL}/float8_mainloop.py",
        "    ctx.smem.producer.q[rows.wg] = q.astype(Q_DTYPE)\n    plgpu.commit_smem()",
        "    ctx.smem.producer.q[rows.wg] = q.astype(Q_DTYPE)",
        f"{TEST_FLOAT8} -k test_interpreted",
    ),
    "a_cut_chunk_of_rows_is_not_widened": Fault(
        f"{PREFILL}/widened_sm90.py",
        "lax.div(live + (plan.rows - 1), jnp.int32(plan.rows))",
        "lax.div(live, jnp.int32(plan.rows))",
        "tests/kernels/prefill/test_prefill_widened.py -k rounded_once",
    ),
    "rows_past_a_length_are_widened": Fault(
        f"{PREFILL}/widened_sm90.py",
        "thread.store(ref, index, thread.rounded(values, problem.dtype), 2 * NUMBERS, exists)",
        "thread.store(ref, index, thread.rounded(values, problem.dtype), 2 * NUMBERS, index >= 0)",
        "tests/kernels/prefill/test_prefill_widened.py -k rounded_once",
    ),
    "scales_of_rows_past_a_length_are_read": Fault(
        f"{PREFILL}/widening_producer.py",
        "thread.copy_async(place, Word(scales, line(row)), row < tile.live, inside, 4)",
        "thread.copy_async(place, Word(scales, line(row)), row < block, inside, 4)",
        f"{TEST_NARROW} -k test_interpreted",
    ),
    "narrow_rows_are_stored_with_neighbours_swapped": Fault(
        "pallas_attn/kernels/mma/narrow_rows.py",
        "swizzled_place(row, word * 2 + n,",
        "swizzled_place(row, word * 2 + 1 - n,",
        f"{TEST_EMITTED} -k test_narrow_rows",
    ),
    "partials_of_two_blocks_lie_in_one_place": Fault(
        f"{PREFILL}/shared_parts.py",
        "line=number + share.block",
        "line=number",
        f"{TEST_SCHEDULES} -k test_shared_parts",
    ),
    "a_part_is_merged_without_own_rows": Fault(
        f"{PREFILL}/merge_parts.py",
        "return [row_max, thread.choose(empty, zero, row_sum)]",
        "return [row_max, thread.choose(empty, zero, zero)]",
        "tests/caches/test_prefixes.py -k test_interpreted",
    ),
    "a_part_with_a_sink_of_inf_is_nan": Fault(
        f"{PREFILL}/merge_parts.py",
        "row_max, base = thread.lowest(level, softmax.LARGEST), thread.choose(empty, zero, level)",
        "row_max, base = level, thread.choose(empty, zero, level)",
        "tests/caches/test_prefixes.py -k test_interpreted",
    ),
    "a_sink_of_inf_is_nan": Fault(
        f"{SHARED}/softmax.py",
        "jnp.minimum(jnp.maximum(row_max, sink), LARGEST)",
        "jnp.maximum(row_max, sink)",
        "tests/api/test_gradients.py -k test_sinks_without_end",
    ),
    "a_row_of_a_thread_is_nan_by_a_sink_of_inf": Fault(
        f"{SHARED}/partials.py",
        "thread.lowest(thread.highest(base, sink), softmax.LARGEST)",
        "thread.highest(base, sink)",
        "tests/kernels/decode/test_decode_kernel.py -k full_softcap_sinks",
    ),
    "all_partials_of_a_part_weigh_as_the_first": Fault(
        f"{PREFILL}/merge_parts.py",
        "                w = thread.of_lane(weight, n)\n",
        "                w = thread.of_lane(weight, n * 0)\n",
        "tests/caches/test_prefixes.py -k test_interpreted",
    ),
    "a_row_is_merged_with_the_partial_of_the_next_block": Fault(
        f"{PREFILL}/merge_parts.py",
        "thread.maximum(step - within, 0) // each",
        "thread.maximum(step - within + 1, 0) // each",
        "tests/caches/test_prefixes.py -k test_interpreted",
    ),
    "a_number_past_the_prefixes_is_the_last_one": Fault(
        "pallas_attn/_cache/attend_in_parts.py",
        "jnp.where((groups >= 0) & (groups < facts.sequences), groups, -1)",
        "jnp.clip(groups, -1, facts.sequences - 1)",
        "tests/caches/test_prefixes.py -k test_a_prefix_stands",
    ),
    "the_newest_rows_are_shared": Fault(
        "pallas_attn/prefixes.py",
        "jnp.where(fits & (cache.lengths > new), (cache.lengths - new) // size, 0)",
        "jnp.where(fits & (cache.lengths > new), cache.lengths // size, 0)",
        "tests/caches/test_prefixes.py -k test_what_is_shared_is_found",
    ),
    "packed_rows_of_other_starts_keep_their_parts": Fault(
        "pallas_attn/prefixes.py",
        "kept &= same[:-1] & same[1:]",
        "kept &= same[:-1]",
        "tests/caches/test_prefixes.py -k test_packed_rows_of_another_state",
    ),
    "shared_pages_of_an_earlier_state_are_not_compared": Fault(
        "pallas_attn/prefixes.py",
        "equal = page_table == shared.of_page_table",
        "equal = page_table == page_table",
        "tests/caches/test_prefixes.py -k test_prefixes_of_another_state",
    ),
    "latent_neighbours_take_the_same_rows": Fault(
        f"{MLA}/sm90.py",
        "        head = work.head * neighbours(plan) + member.number\n",
        "        head = work.head * neighbours(plan)\n",
        f"{TEST_MLA} -k 'test_interpreted and two_chunks_side_by_side'",
    ),
    "latent_rows_of_a_list_are_not_committed": Fault(
        f"{MLA}/row_gathers.py",
        "    plgpu.commit_smem()\n    plgpu.barrier_arrive(to.ready)",
        "    plgpu.barrier_arrive(to.ready)",
        f"{TEST_LISTS} -k 'interpreted and latent_pages'",
    ),
    "latent_holes_of_a_list_count": Fault(
        f"{MLA}/row_gathers.py",
        "    return jnp.minimum(s, bound)",
        "    return s",
        f"{TEST_LISTS} -k 'interpreted and latent_pages'",
    ),
    "blocks_before_q_is_free_are_kept_back": Fault(
        f"{MLA}/row_gathers.py",
        "pl.when(tile == work.tile + 2)",
        "pl.when(tile == work.tile + 3)",
        f"{TEST_LISTS} -k 'interpreted and latent_neighbours_no_rest'",
    ),
    "listed_rows_ignore_the_mask": Fault(
        f"{LISTS}/lists.py",
        "    seen &= mask.allows(position[:, None], key)\n",
        "",
        f"{TEST_LISTS} -k 'interpreted and threads'",
    ),
    "append_drops_the_last_row": Fault(
        f"{APPEND}/plan.py",
        "    exists = row < at.rows  #",
        "    exists = row + 1 < at.rows  #",
        f"{TEST_APPEND} -k test_interpreted",
    ),
    "keep_looks_at_the_first_pages_alone": Fault(
        f"{APPEND}/keep.py",
        "_look(ctx, (i + 1) * step, LOOKS)",
        "_look(ctx, i * step, LOOKS)",
        f"{TEST_KEEP} -k 'looked_at and interpreted'",
    ),
    "keep_takes_sequences_that_took_more_than_they_have": Fault(
        f"{APPEND}/keep.py",
        "(new > 0) & (length >= new) & (length <= held)",
        "(new > 0) & (length <= held)",
        f"{TEST_KEEP} -k 'test_every_byte and interpreted'",
    ),
    "keep_writes_before_all_threads_have_looked": Fault(
        f"{APPEND}/keep.py",
        "    thread.sync()\n    missed, held",
        "    missed, held",
        f"{TEST_KEEP} -k 'looked_at and interpreted'",
    ),
    "append_writes_past_the_capacity": Fault(
        f"{APPEND}/plan.py",
        "    rows = jnp.minimum(rows, problem.new_rows)\n",
        "    rows = jnp.minimum(rows + 1, problem.new_rows)\n",
        f"{TEST_APPEND} -k test_interpreted",
    ),
    # ---- score functions over caches -------------------------------------------------------------
    "scores_of_a_chunk_are_those_of_the_first": Fault(
        f"{DECODE}/score_functions.py",
        "row = places.row() + chunk * plan.queries.chunk_rows",
        "row = places.row()",
        f"{TEST_DECODE} -k 'test_interpreted and alibi_72_rows'",
    ),
    "scores_of_folded_rows_forget_half_of_the_keys": Fault(
        f"{DECODE}/score_functions.py",
        "split.first_key(warp) + split.key(row, 0)",
        "split.first_key(warp)",
        f"{TEST_DECODE} -k 'test_interpreted and alibi-'",
    ),
    "scores_of_prefill_are_those_of_one_head": Fault(
        f"{SHARED}/logits.py",
        "tile = rows.mapping.placed(tile, program)",
        "pass",
        f"{TEST_PREFILL} -k 'test_interpreted and scores_window'",
    ),
    "scores_of_lists_take_entries_for_positions": Fault(
        "pallas_attn/_functions/program.py",
        "            values[kv] = program.inputs + count\n",
        "",
        f"{TEST_LISTS} -k 'interpreted and threads_scores'",
    ),
    "sinks_of_lists_leave_out_as_it_is": Fault(
        "pallas_attn/_autodiff/listed.py",
        "return some.astype(out.dtype), lse",
        "return out, lse",
        "tests/api/test_kv_indices.py -k 'test_forward_and_gradients and sinks'",
    ),
    # ---- masks, lengths, pages -------------------------------------------------------------------
    "forward_mask_is_off_by_one": Fault(
        f"{SHARED}/logits.py",
        "LESS, EQUAL = arith.CmpIPredicate.slt,",
        "LESS, EQUAL = arith.CmpIPredicate.sle,",
        TEST_EMITTED,
    ),
    "forward_mask_forgets_the_second_of_two_rows": Fault(
        f"{SHARED}/logits.py",
        'arith.cmpi(arith.CmpIPredicate.sge, column, operands["low"][row])',
        'arith.cmpi(arith.CmpIPredicate.sge, column, operands["low"][0])',
        TEST_EMITTED,
    ),
    "keys_are_ragged_by_64_only": Fault(
        f"{SHARED}/logits.py",
        "problem.kv_len % block_kv != 0",
        "problem.kv_len % ROWS != 0",
        f"{TEST_FWD} -k test_half_a_tile_of_keys",
    ),
    "full_tiles_begin_too_early": Fault(
        f"{SHARED}/tiles.py",
        "full_lo=_divided(full_lo + block - 1, block)",
        "full_lo=_divided(full_lo, block)",
        f"{TEST_FWD} -k test_spans_hold_what_the_mask_says",
    ),
    "values_past_a_length_are_read": Fault(
        f"{SHARED}/tma_operands.py",
        "return jnp.where((where < lengths[:, None])[..., None, None], taken, 0)",
        "return jnp.where((where <= lengths[:, None])[..., None, None], taken, 0)",
        f"{TEST_FWD} -k 'test_interpreted and everything'",
    ),
    "a_page_past_the_pool_is_a_page": Fault(
        f"{SHARED}/cache_layout.py",
        "return (page >= 0) & (page < self.slabs)",
        "return (page >= 0) & (page <= self.slabs)",
        "tests/kernels/test_every_kernel.py -k 'prefill.sm90 and missing'",
    ),
    "a_missing_page_is_seen_in_the_first_stretch_alone": Fault(
        f"{MLA}/producer.py",
        "        if finds_missing:\n",
        "        if finds_missing and first == 0:\n",
        "tests/kernels/test_every_kernel.py -k 'decode_mla and missing'",
    ),
    "skipped_pages_are_looked_up_by_whole_blocks": Fault(
        f"{SHARED}/cache_layout.py",
        "thread.loop((count + (mosaic.THREADS - 1)) // mosaic.THREADS, [], look)",
        "thread.loop(count // mosaic.THREADS, [], look)",
        "tests/kernels/test_every_kernel.py -k 'decode.sm and missing'",
    ),
    "a_band_of_a_function_moves_all_rows": Fault(
        "pallas_attn/_context_parallel/layout.py",
        "mask = problem.mask if problem.mask_program is None else problem.mask_within",
        "mask = problem.mask",
        "tests/parallel/test_context.py -k test_a_window_moves_its_rows",
    ),
    "keys_behind_the_last_one_are_seen": Fault(
        "pallas_attn/_context_parallel/gather.py",
        "if window is not None and lengths is None and window[1] > split.keys:",
        "if False:",
        "tests/parallel/test_context.py -k 'test_as_on_one_device and end'",
    ),
    # ---- numbers ---------------------------------------------------------------------------------
    "a_number_less_a_multiple_of_the_key_is_more": Fault(
        f"{SHARED}/linear_scores.py",
        "            first = np.zeros((), operation.dtype)[()]\n",
        "            return second\n",
        TEST_LINEAR,
    ),
    "a_score_that_is_taken_away_is_added": Fault(
        f"{SHARED}/linear_scores.py",
        '        if operation.name == "sub" and scores[1]:\n            raise _NotLinear\n',
        "",
        TEST_LINEAR,
    ),
    "a_slope_that_is_rounded_is_a_slope": Fault(
        f"{SHARED}/linear_scores.py",
        '(convert or any(scores) or operation.name == "mul")',
        "any(scores)",
        TEST_LINEAR,
    ),
    "linear_slopes_are_not_divided_by_the_scale": Fault(
        f"{SHARED}/linear_scores.py",
        "slope * (1 / ctx.plan.problem.scale)",
        "slope",
        "tests/kernels/flash_fwd/test_masks_and_scores.py -k 'test_in_the_interpreter and linear'",
    ),
    "float32_leaves_one_of_three_products_out": Fault(
        f"{MMA}/wgmma.py",
        "(2, 2): ((1, 0), (0, 1), (0, 0)),",
        "(2, 2): ((1, 0), (0, 0)),",
        f"{TEST_FWD} -k 'test_interpreted and dim72_24_float32_highest'",
    ),
    "dq_is_summed_in_bfloat16": Fault(
        f"{BWD}/dq_sum.py",
        "problem.q_heads, width), jnp.float32)",
        "problem.q_heads, width), jnp.bfloat16)",
        f"{TEST_BWD} -k test_dq_of_many_keys",
        (
            (
                "mosaic.swizzled(shape, jnp.float32,",
                "mosaic.swizzled(shape, jnp.bfloat16,",
            ),
            ("smem.dq[wg] = parts[0]", "smem.dq[wg] = parts[0].astype(jnp.bfloat16)"),
        ),
    ),
    # ---- visibility ------------------------------------------------------------------------------
    "a_tree_in_a_window_reaches_as_far_as_a_token": Fault(
        "pallas_attn/trees.py",
        "    reach = left + drafts - 1\n",
        "    reach = left\n",
        "tests/caches/test_trees.py -k test_a_window_over_more_drafts",
    ),
    "a_tree_begins_among_queries_as_among_keys": Fault(
        "pallas_attn/_cache/blocks.py",
        "return jnp.clip(end, 0, jnp.asarray(held, jnp.int32)) - rows, end - rows",
        "return end - rows, end - rows",
        "tests/parallel/test_sharded_caches.py -k test_as_on_one_device",
    ),
    "store_forgets_the_problem": Fault(
        "pallas_attn/_call/store.py",
        "_text((chosen.module, problem, str(tree), types, _tuned(",
        "_text((chosen.module, str(tree), types, _tuned(",
        "tests/api/test_stored_kernels.py -k told_apart",
    ),
    "store_reads_files_of_other_users": Fault(
        "pallas_attn/_call/store.py",
        "if owner not in _trusted_users():",
        "if owner < 0:",
        "tests/api/test_stored_kernels.py -k other_users",
    ),
    "store_trusts_a_damaged_file": Fault(
        "pallas_attn/_call/store.py",
        "return content[size:] if _DIGEST(content[size:]).digest() == content[:size] else None",
        "return content[size:]",
        "tests/api/test_stored_kernels.py -k damaged_file",
    ),
    "packed_queries_count_from_their_own_starts": Fault(
        "pallas_attn/_call/bind.py",
        "positions, static_offset = (kv_starts[own] + within)[None], 0",
        "positions, static_offset = (q_starts[own] + within)[None], 0",
        "tests/api/test_packed_attention.py -k 'reference and offsets'",
    ),
    "decode_tree_is_not_looked_at_in_whole_tiles": Fault(
        f"{DECODE}/mainloop.py",
        "        hi = jnp.minimum(hi, begin)\n",
        "        pass\n",
        f"{TEST_DECODE} -k 'test_interpreted and tree and not float32'",
    ),
    "prefill_tree_ends_a_tile_late": Fault(
        f"{PREFILL}/mask_functions.py",
        "jnp.maximum(drafts, 0)",
        "jnp.maximum(drafts + block_kv, 0)",
        f"{TEST_PREFILL} -k 'test_interpreted and tree'",
    ),
    "prefill_tree_of_packed_rows_reads_the_first_sequence": Fault(
        f"{PREFILL}/mask_functions.py",
        "refs.starts[tile.batch] + tile.query if self.packed",
        "refs.starts[0] + tile.query if self.packed",
        "tests/caches/test_packed_rows.py -k 'test_trees and interpreted and paged'",
    ),
    "prefill_function_has_the_head_of_the_next_rows": Fault(
        f"{PREFILL}/plan.py",
        "return lax.div(mosaic.positions((ROWS,), 0, 0), rows)",
        "return lax.div(mosaic.positions((ROWS,), 0, 8), rows)",
        f"{TEST_PREFILL} -k 'test_interpreted and function'",
    ),
    "decode_combines_sixteen_parts": Fault(
        f"{DECODE}/combine_splits.py",
        "            start = (number + 1) * batch.loads\n",
        "            start = number * batch.loads\n",
        f"{TEST_DECODE} -k test_many_parts",
    ),
    "prefill_weighs_all_splits_as_the_first": Fault(
        f"{PREFILL}/combine_partials.py",
        "w = thread.of_lane(whole.weight, thread.index * 0 + split)",
        "w = thread.of_lane(whole.weight, thread.index * 0)",
        f"{TEST_PREFILL} -k 'test_interpreted and splits'",
    ),
    "a_row_without_a_key_has_an_lse": Fault(
        f"{SHARED}/partials.py",
        'return factor, thread.choose(empty, thread.number(float("-inf")), lse)',
        "return factor, lse",
        f"{TEST_DECODE} -k 'test_interpreted and plain'",
    ),
    "quantize_reads_a_row_past_the_length": Fault(
        QUANTIZE,
        "live_stop = thread.minimum(stop, thread.load(refs.lengths, batch, 4))",
        "live_stop = thread.minimum(stop, thread.load(refs.lengths, batch, 4) + 1)",
        f"{TEST_QUANTIZE} -k 'interpreted and lengths'",
    ),
    "quantize_asks_two_warps_for_the_largest": Fault(
        QUANTIZE,
        "for warp in range(WARPS)]",
        "for warp in range(WARPS // 2)]",
        f"{TEST_QUANTIZE} -k 'interpreted and blocks'",
    ),
    "quantize_forgets_the_barrier_of_the_largest": Fault(
        QUANTIZE,
        "        thread.sync()\n",
        "",
        f"{TEST_QUANTIZE} -k 'interpreted and blocks'",
    ),
    "quantize_compares_the_low_half_of_a_word_alone": Fault(
        "pallas_attn/kernels/mma/scales.py",
        "top = thread.maximum(low, high >> 16)",
        "top = low",
        f"{TEST_QUANTIZE} -k 'interpreted and blocks'",
    ),
    "all_threads_of_a_row_write_its_scale": Fault(
        f"{APPEND}/quantize.py",
        "leads = place.exists & (thread.index % plan.lanes < 1)",
        "leads = place.exists",
        "tests/kernels/append/test_append_quantized.py",
    ),
    "portable_latent_rescales_the_other_way": Fault(
        f"{MLA}/sm80.py",
        "    rescale = jnp.exp2(state.row_max - base)\n",
        "    rescale = jnp.exp2(base - state.row_max)\n",
        f"{TEST_MLA} -k 'test_interpreted and portable'",
    ),
    # ---- code that only a GPU runs ---------------------------------------------------------------
    "gradients_are_addressed_in_32_bits": Fault(
        f"{MMA}/mma_sync.py",
        "        start = thread.to_int64(batch) * length + thread.to_int64(first)\n",
        "        start = batch * length + first\n",
        TEST_EMITTED,
        (
            (
                "(start * heads + thread.to_int64(head)) * (dim // 2)",
                "(start * heads + head) * (dim // 2)",
            ),
            (
                "start = start + thread.to_int64(row *",
                "start = thread.to_int64(start) + thread.to_int64(row *",
            ),
        ),
    ),
    "dq_is_read_in_another_order_than_it_is_added": Fault(
        f"{MMA}/global_accumulate.py",
        "places = [(4 * n + i) * mosaic.THREADS for i in range(4)]",
        "places = [4 * n * mosaic.THREADS + i for i in range(4)]",
        TEST_EMITTED,
    ),
    "at_most_means_less_than": Fault(
        f"{LANG}/asm.py",
        "__le__ = _comparison(arith.CmpIPredicate.sle)",
        "__le__ = _comparison(arith.CmpIPredicate.slt)",
        TEST_EMITTED,
    ),
    "addresses_are_computed_ahead_of_a_loop_and_spilled": Fault(
        f"{BWD}/sm90_fused.py",
        "    now = now._replace(wg=now.wg + mosaic.opaque_zero(now.own.count))\n",
        "",
        f"{TEST_BWD} -m machine_code -k 'test_compiles_without_serialised and h128_causal_b2'",
    ),
    "shared_memory_is_added_up_unrounded": Fault(
        f"{LANG}/mosaic.py",
        "return sum(-(-size // 1024) * 1024 for size in sizes)",
        "return sum(sizes)",
        f"{TEST_MEMORY} -k each_build",
    ),
    "shared_memory_is_not_asked_for": Fault(
        "pallas_attn/_call/dispatch.py",
        "return self.kernel.limit(problem) or _config.no_room(self.kernel, problem)",
        "return self.kernel.limit(problem)",
        f"{TEST_MEMORY} -k every_choice",
    ),
    "shared_memory_of_few_packed_rows_is_not_counted": Fault(
        f"{DECODE}/sm90.py",
        "return max(bytes_of_launch(*each) for each in _launches_of(problem, config))",
        "return bytes_of_launch(problem, config)",
        f"{TEST_MEMORY} -k each_build",
    ),
}

FAULTS |= {
    name: Fault(*seed, test) for test, seeds in SEEDS.items() for name, seed in seeds.items()
}


# ---- trying them ---------------------------------------------------------------------------------


def _try(test: str, fault: Fault | None = None) -> tuple[bool, str]:
    """Whether a test fails in a tree with a fault, and what it says then."""
    with tempfile.TemporaryDirectory(prefix="pallas_attn_faults_") as folder:
        tree = pathlib.Path(folder)
        for name in ("pallas_attn", "pallas_lm", "benchmarks", "tests"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        if fault is not None:
            (tree / fault.file).write_text(fault.text(tree))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += shlex.split(test)
        env = os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # nothing collected, or not even that
        raise RuntimeError(f"{test}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    said = re.findall(r"(?m)^E  +(\w*(?:Error|RACE).*)|\+ (Timeout) \+", done.stdout)
    return done.returncode == 1, "".join(said[-1]) if said else ""


def main(words: list[str], write: Callable[[str], object]) -> int:
    """Tries those whose names contain one of the words, all without any; how many lived."""
    chosen = {name: x for name, x in FAULTS.items() if not words or any(w in name for w in words)}
    tests = list(dict.fromkeys(fault.test for fault in chosen.values()))
    lived = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        tried = {pool.submit(_try, x.test, x): name for name, x in chosen.items()}
        clean = {pool.submit(_try, test): test for test in tests}
        for done in concurrent.futures.as_completed([*tried, *clean]):
            fails, said = done.result()
            if done in clean:
                lived += fails
                write(f"FAILS without any fault: {clean[done]}: {said}\n" if fails else "")
                continue
            lived += not fails
            write(f"{'caught' if fails else 'LIVED '}  {tried[done]}: {said[:100]}\n")
    return lived


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:], lambda line: print(line, end="", flush=True)) else 0)  # noqa: T201
