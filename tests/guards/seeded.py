"""More faults for tests/guards/faults.py, by the test that must catch them: name -> (file, text, the
one in its place). They lived once, each for a class of mistakes that no guard saw.
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
            "            plgpu.commit_smem()\n            plgpu.barrier_arrive(ring.ready.at[slot])\n",
            "            plgpu.barrier_arrive(ring.ready.at[slot])\n",
        ),
    },
}
