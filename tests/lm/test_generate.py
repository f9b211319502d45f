"""lm.generate, complete and stream: compilations, stops, ids, log-probabilities, options."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_lm as lm
from pallas_lm import options, text, texts
from pallas_lm.buckets import bucket
from pallas_lm.cli import flags
from tests.lm.loops import refuses, shown

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


@pytest.fixture(scope="module")
def model():
    return lm.load()


# ---- compilations -------------------------------------------------------------------------------

COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: COMPILED.append(name) if "backend_compile" in name else None
)


@pytest.mark.by_xla
def test_other_prompts_in_the_same_buckets_compile_nothing():
    model, how = lm.load(), {"max_new_tokens": 6, "cache": "paged", "prefill_chunk": 16}
    lm.generate(model, ["ROMEO:", "The sea was"], **how)
    assert COMPILED
    COMPILED.clear()
    for prompts in (["To be, or not", "O"], ["My lord,", "Sweet prince"], ["Nurse:\n", "A"]):
        lm.generate(model, prompts, seed=len(prompts[1]), **how)
        assert not COMPILED
    lm.generate(model, ["ROMEO:", "The sea"], **how | {"max_new_tokens": 9, "stop": "zz"})
    assert not COMPILED
    lm.generate(model, ["ROMEO:", "x" * 100], **how)  # other buckets
    assert COMPILED


@pytest.mark.by_xla
def test_another_temperature_compiles_nothing():
    """Nor does another top_k or top_p, for all prompts or for each of them."""
    model, how = lm.load(), {"max_new_tokens": 6}
    both, drawn = ["ROMEO:", "The sea was"], {"temperature": 0.7, "top_k": 40, "top_p": 0.9}
    lm.generate(model, both, **how, **drawn)
    COMPILED.clear()
    for n in range(3):
        others = {"temperature": 0.1 + n, "top_k": n + 1, "top_p": 0.2 + n / 5}
        lm.generate(model, both, **how, **others, seed=n)
        lm.generate(model, both, **how, **{name: [x, drawn[name]] for name, x in others.items()})
        assert not COMPILED
    lm.generate(model, both, **how, temperature=0.7)  # nothing is sorted
    assert COMPILED
    COMPILED.clear()
    lm.generate(model, both, **how, temperature=[0.0, 0.2])
    assert not COMPILED


def test_buckets_hold_their_rows_and_are_few():
    sizes = [bucket(rows) for rows in range(1, 10000)]
    assert all(rows <= size for rows, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * rows + 1 for rows, size in enumerate(sizes, 1) if rows > 1024)
    assert sorted(set(sizes))[:9] == [64, 128, 256, 512, 1024, 1280, 1536, 1792, 2048]
    assert bucket(3, least=16) == 16 and bucket(17, least=16) == 32


# ---- texts and tokens ---------------------------------------------------------------------------


def test_a_completion_has_tokens_and_a_reason(model):
    both, ids = ["ROMEO:", "The sea"], [list(b"ROMEO:"), np.frombuffer(b"The sea", np.uint8)]
    made = lm.complete(model, both, max_new_tokens=20)
    assert [x.text for x in made] == ["\nWhat say'st thou? i", "l of the seasons and"]
    assert [bytes(x.tokens).decode() for x in made] == [x.text for x in made]
    assert [(x.prompt, x.sample, x.finish_reason) for x in made] == [
        (0, 0, "length"),
        (1, 0, "length"),
    ]
    assert [x.prompt_tokens for x in made] == [list(map(int, x)) for x in ids]
    assert lm.complete(model, ids, max_new_tokens=20) == made
    assert lm.complete(model, [both[1], ids[0]], max_new_tokens=20)[0].text == made[1].text
    (ended,) = lm.complete(model, both[1:], stop_ids=[ord(" ")], max_new_tokens=20)
    assert (ended.text, ended.finish_reason) == ("l ", "stop")
    (full,) = lm.complete(model, both[1:], max_new_tokens=20, capacity=16)
    assert (len(full.tokens), full.finish_reason) == (10, "length")


def test_no_prompts_give_no_texts(model):
    assert lm.generate(model, []) == lm.complete(model, []) == list(lm.stream(model, [])) == []
    refuses("batch: expected at least 1, got 0", lm.generate, model, [], batch=0)


@pytest.mark.parametrize(
    ("chunk", "changes"),
    [(1, {}), (5, {}), (5, {"prefill_chunk": 4}), (2, {"draft": "ngram", "drafts": 2})],
    ids=str,
)
def test_a_stream_is_the_texts_piece_by_piece(model, chunk, changes):
    prompts, how = ["ROMEO:", "The sea", "Nurse:\n"], {"max_new_tokens": 20, "chunk": chunk}
    how |= {"batch": 2, "stop": ["thou", "of the"], "logprobs": True} | changes
    pieces, whole = list(lm.stream(model, prompts, **how)), lm.complete(model, prompts, **how)
    assert [x.finish_reason for x in whole] == ["stop", "stop", "length"]
    assert [x.text for x in whole[:2]] == ["\nWhat say'st ", "l "]
    for n, completion in enumerate(whole):
        own = [piece for piece in pieces if piece.prompt == n]
        assert "".join(piece.text for piece in own) == completion.text
        assert sum((piece.tokens for piece in own), []) == completion.tokens
        assert sum((piece.logprobs for piece in own), []) == completion.logprobs
        assert [piece.finish_reason for piece in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == completion.finish_reason
        assert len(own) > 2
    # The tokens end with the stop string, the text before it.
    assert bytes(whole[0].tokens).decode() == whole[0].text + "thou"
    if chunk == 1 and not changes:
        assert max(len(piece.tokens) for piece in pieces) == 1


@pytest.mark.parametrize("cache", ["per_sequence", "paged"])
def test_a_place_that_a_stop_string_left_is_as_new(model, cache):
    """The device still decodes the sequence that the host has ended, until its place is taken."""
    prompts = ["The sea", "ROMEO:", "The sea", "Nurse:\n", "KING"]
    how = {"cache": cache, "max_new_tokens": 24, "chunk": 2, "stop": " "}
    how |= {"page_size": 8, "pages": 8} if cache == "paged" else {}
    alone = [lm.generate(model, [prompt], **how)[0] for prompt in prompts]
    assert len(set(alone)) == 4 and all(" " not in x for x in alone)
    for changes in ({"batch": 2}, {"batch": 2, "prefill_chunk": 3}, {"batch": 1}):
        assert lm.generate(model, prompts, **how | changes) == alone


def test_a_stream_that_is_left_gives_its_settings_back(model):
    before = jax.config.jax_default_matmul_precision
    pieces = lm.stream(model, ["ROMEO:"], chunk=1)
    next(pieces)
    assert jax.config.jax_default_matmul_precision == before
    pieces.close()
    assert jax.config.jax_default_matmul_precision == before


def test_samples_stand_together(model):
    how = {"samples": 2, "cache": "paged", "temperature": 0.7, "max_new_tokens": 8}
    made = lm.complete(model, ["ROMEO:", "The sea"], **how)
    assert [(x.prompt, x.sample) for x in made] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    pieces = list(lm.stream(model, ["ROMEO:", "The sea"], **how))
    for x in made:
        own = [piece.text for piece in pieces if (piece.prompt, piece.sample) == x[:2]]
        assert "".join(own) == x.text


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 2},
        {"draft": "ngram", "drafts": 3},
        {"cache": "paged", "prefill_chunk": 4, "draft": "ngram", "drafts": 2, "batch": 2},
    ],
    ids=str,
)
def test_each_prompt_has_its_own_sampling(model, changes):
    """Through slots that others left, beside greedy ones: the tokens of a call whose prompts all
    have the same.
    """
    prompts, how = ["ROMEO:", "The sea", "KING"], {"max_new_tokens": 9, "seed": 3} | changes
    own = {"temperature": [0.8, 0.0, 2.0], "top_k": [30, 4, 0], "top_p": [1.0, 0.5, 0.9]}
    made = lm.generate(model, prompts, **how, **own)
    greedy = lm.generate(model, prompts, **how)
    assert [x == y for x, y in zip(made, greedy, strict=True)] == [False, True, False]
    for n in (0, 2):
        same = {name: numbers[n] for name, numbers in own.items()}
        assert made[n] == lm.generate(model, prompts, **how, **same)[n]
    pieces = list(lm.stream(model, prompts, **how, sampling=lm.Sampling(**own)))
    for n, whole in enumerate(made):
        assert "".join(piece.text for piece in pieces if piece.prompt == n) == whole


def test_log_probabilities_are_those_of_the_whole_text(model):
    """Whatever the sampling, of all tokens; with drafts and in chunks too."""
    prompt = "The sea"
    for changes in ({}, {"temperature": 0.9, "top_k": 5}, {"prefill_chunk": 3, "draft": "ngram"}):
        (made,) = lm.complete(model, [prompt], max_new_tokens=12, logprobs=True, **changes)
        ids = [*prompt.encode(), *made.tokens]
        logits = lm.mesh.logits(
            model.config, None, model.params, np.asarray([ids[:-1]], np.int32), "reference"
        )
        wanted = np.asarray(jax.nn.log_softmax(logits[0], axis=-1))
        places = np.arange(len(prompt) - 1, len(ids) - 1)
        np.testing.assert_allclose(made.logprobs, wanted[places, made.tokens], atol=1e-4)
    assert lm.complete(model, [prompt], max_new_tokens=2)[0].logprobs is None


# ---- stop strings -------------------------------------------------------------------------------


def test_a_stop_string_may_come_in_any_pieces(rng):
    """Compared with the search in the whole text, byte by byte and in larger pieces."""
    seen = set()
    for _ in range(300):
        whole = "".join(rng.choice(list("ab€"), rng.integers(0, 12)))
        count = rng.integers(1, 3)
        stop = tuple("".join(rng.choice(list("ab€"), rng.integers(1, 4))) for _ in range(count))
        ids = text.Bytes().encode(whole)
        cursor, made, ended, at = texts.Cursor(text.Bytes(), stop), "", None, 0
        while ended is None and at <= len(ids):
            size = int(rng.integers(1, 5))
            piece, count = cursor.add(ids[at : at + size], last=at + size >= len(ids))
            made, ended = made + piece, None if count is None else at + count
            at += size
        place = texts.cut(whole, stop)
        assert made == whole[:place]
        if place is not None:  # no token more than the stop string takes
            assert any(text.Bytes().decode(ids[:ended]).endswith(end) for end in stop)
            assert texts.cut(text.Bytes().decode(ids[: ended - 1]), stop) is None
        seen.add(place is None)
    assert seen == {True, False}


# ---- options ------------------------------------------------------------------------------------


def test_options_have_the_names_of_flags():
    tasks = {flag.name: flag.tasks for flag in flags.FLAGS}
    for name in options.NAMES:
        assert name == "sampling" or flags.DECODE in tasks[name], name
    fields = {field.name for field in dataclasses.fields(lm.Options)}
    fields -= {"keep_logits"}  # the flag check
    assert fields <= set(options.NAMES)
    said = inspect.getdoc(lm.generate)
    assert all(name in said for name in options.NAMES)
    assert all(f"{name}:" in inspect.getdoc(lm.Options) for name in fields)


COLD = "expected none, since nothing is drawn without a temperature"
NAMES = ", ".join(options.NAMES)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"capcity": 3}, f"capcity: no option; did you mean capacity?; expected one of {NAMES}"),
        ({"slots": 3}, f"slots: no option; expected one of {NAMES}"),
        ({"keep_logits": True}, f"keep_logits: no option; expected one of {NAMES}"),
        ({"stop": [3]},
         "stop: expected a text or a list of texts, none of them empty, got (3,); tokens that end "
         "a sequence are stop_ids"),
        ({"stop": ""},
         "stop: expected a text or a list of texts, none of them empty, got ('',); tokens that end "
         "a sequence are stop_ids"),
        ({"stop_ids": (300,)}, "stop_ids: expected tokens from 0 to 255, got [300]"),
        ({"stop_ids": "a"}, "stop_ids: expected a tuple of tokens, ints, got 'a'"),
        ({"logprobs": 3}, "logprobs: expected True or False, got 3"),
        ({"chat": "yes"}, "chat: expected True or False, got 'yes'"),
        ({"precision": "low"},
         "precision: expected one of ('default', 'high', 'highest') or None, got 'low'"),
        ({"temperature": 0.7, "sampling": lm.Sampling()},
         "sampling: expected None beside temperature, which it holds"),
        ({"top_p": 0.0}, "top_p: expected above 0 and at most 1, got 0.0"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"seed": 2**32}, "seed: expected at most 4294967295, got 4294967296"),
        ({"chunk": 2**16 + 1}, "chunk: expected at most 65536, got 65537"),
        ({"implementation": "sm90"},
         "implementation: a model runs several operations, which no kernel does alone; expected "
         "'reference' or None, got 'sm90'"),
        ({"temperature": [0.5, 0.2]},
         "temperature: expected a number, or one for each of the 1 prompts, got 2 of them"),
        ({"samples": 2, "cache": "paged", "temperature": [0.0]},
         "samples: expected 1, or a temperature, for 2 samples of a prompt, got 2"),
        ({"mesh": "dp:2"}, "mesh: expected tp:N, N at least 1, got 'dp:2'"),
        ({"mesh": 3},
         "mesh: expected a mesh with the axis 'tp', as lm.mesh.make('tp:2', ('tp',)) makes it, or "
         "None, got 3"),
        # Options that the others leave nothing to do.
        ({"top_k": 40}, f"top_k: {COLD}, got 40; give one as well, or leave top_k out"),
        ({"top_p": 0.5, "temperature": 0.0},
         f"top_p: {COLD}, got 0.5; give one as well, or leave top_p out"),
        ({"top_k": [3], "temperature": [0.0]},
         f"top_k: {COLD}, got (3,); give one as well, or leave top_k out"),
        ({"sampling": lm.Sampling(top_k=3)},
         f"top_k: {COLD}, got 3; give one as well, or leave top_k out"),
        ({"drafts": 5},
         "drafts: expected none, since no step checks drafts without draft='ngram', got 5; give it "
         "as well, or leave drafts out"),
        ({"page_size": 8},
         "page_size: expected none, since only cache='paged' has pages, got 8; give it as well, or "
         "leave page_size out"),
        ({"pages": 8, "cache": "stacked"},
         "pages: expected none, since only cache='paged' has pages, got 8; give it as well, or "
         "leave pages out"),
        ({"prefill": 64, "prefill_chunk": 16},
         "prefill: expected none, since prefill_chunk says how many rows of prompts a step takes, "
         "got 64; leave that out, or leave prefill out"),
    ],
)  # fmt: skip
def test_options_refuse(model, how, message):
    """Whoever asks: the command's session has the same check."""
    for call in (lm.generate, lm.complete, lm.stream):
        refuses(message, call, model, ["a"], **how)
    refuses(message, shown, prompts=("a",), **how)


def test_a_mesh_is_that_of_the_model(model):
    """Its rows are in another order on a mesh: elsewhere they would make wrong tokens."""
    over = "Mesh('tp': 2, axis_types=(Auto,))"
    split, how = lm.load(mesh="tp:2"), {"max_new_tokens": 3}
    for ours, mesh in ((model, None), (split, None), (split, split.mesh), (split, "tp:2")):
        assert lm.generate(ours, ["The sea"], **how, mesh=mesh) == ["l o"]
    line = (
        "mesh: expected that of the model, {}, got Mesh('tp': {}, axis_types=(Auto,)); its weights "
        "lie where lm.load(.., mesh=..) puts them"
    )
    for mesh in (split.mesh, "tp:2"):
        refuses(line.format(None, 2), lm.generate, model, ["The sea"], mesh=mesh)
    refuses(line.format(over, 1), lm.generate, split, ["The sea"], mesh="tp:1")


def test_an_option_that_is_none_is_at_its_default(model):
    plain = lm.generate(model, ["The sea"], max_new_tokens=3)
    nothing = dict.fromkeys(options.NAMES) | {"max_new_tokens": 3, "seed": 0}
    assert lm.generate(model, ["The sea"], **nothing) == plain
    same = {"temperature": 0, "top_k": 0, "top_p": 1.0}  # requests tend to say it
    assert lm.generate(model, ["The sea"], max_new_tokens=3, **same) == plain


def test_a_traced_call_is_refused(model):
    """Whatever of it is traced, and before anything is computed."""
    line = (
        "lm: expected a call outside of jax.jit and the like, got one inside, which is traced: "
        "load, generate, complete and stream work on the host; call them outside, or take "
        "pallas_lm.model.mixed and lm.sample inside"
    )
    for call in (lm.generate, lm.complete, lm.stream):
        refuses(line, jax.jit(lambda x, call=call: call(model, ["a"]) and x), 1.0)
        ours = lambda params, call=call: call(model._replace(params=params), ["a"])  # noqa: E731
        refuses(line, jax.jit(ours), model.params)
        refuses(line, jax.eval_shape, ours, model.params)
    refuses(line, jax.jit(lambda x: lm.load() and x), 1.0)


def test_a_model_whose_arrays_were_donated_is_refused():
    model = lm.load()
    for x in jax.tree.leaves(model.params):
        x.delete()
    line = (
        "model: expected arrays in its params, got deleted ones, which were donated to a program; "
        "load it again, and donate a copy"
    )
    refuses(line, lm.generate, model, ["a"])


@pytest.mark.parametrize(
    ("prompt", "got"),
    [(3, "3"), ({"role": "user"}, "{'role': 'user'}"), ([1, "a"], "[1, 'a']"), (b"a", "b'a'")],
)
def test_a_prompt_that_is_none_is_named(model, prompt, got):
    line = f"prompt 2: expected a text, a list of token ids or a list of messages, got {got}"
    refuses(line, lm.generate, model, ["a", prompt])


def test_token_ids_may_be_in_any_list_or_array(model):
    ids, how = list(b"The sea"), {"max_new_tokens": 5}
    (text,) = lm.generate(model, [ids], **how)
    small = np.asarray(ids, np.uint8)
    for same in (tuple(ids), small, jnp.asarray(small), list(jnp.asarray(ids)), iter(ids)):
        assert lm.generate(model, [same], **how) == [text]
    for both in (np.stack([small, small]), jnp.asarray([ids, ids])):
        assert lm.generate(model, both, **how) == [text, text]
    stops = np.asarray([ord(" ")])
    for some in (stops.tolist(), tuple(stops.tolist()), stops, jnp.asarray(stops)):
        assert lm.generate(model, [ids], stop_ids=some, **how) == ["l "]
    what = "a text, a list of token ids or a list of messages"
    refuses(f"prompt 1: expected {what}, got float32[3]", lm.generate, model, [jnp.ones(3)])
    refuses(f"prompt 1: expected {what}, got int32[1, 7]", lm.generate, model, [jnp.asarray([ids])])
    refuses(f"prompt 1: expected {what}, got [True]", lm.generate, model, [[True]])
    lone = jnp.asarray(ids)
    with pytest.raises(ValueError, match=f"^prompt 1: expected {what}, got "):
        lm.generate(model, lone)
    refuses("prompts: expected a list of texts, got np.int32(7)", lm.generate, model, np.int32(7))


def test_token_ids_are_those_of_the_model(model):
    refuses("prompt 1: expected tokens from 0 to 255, got 3 to 300", lm.generate, model, [[3, 300]])
    refuses("prompt 1 is empty", lm.generate, model, [[]])


# ---- programs on disk ---------------------------------------------------------------------------


def test_programs_are_kept_in_a_folder(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
             "jax_persistent_cache_min_entry_size_bytes")  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update(names[0], None)
        lm.keep_programs(tmp_path / "new" / "folder")
        assert getattr(jax.config, names[0]) == str(tmp_path / "new" / "folder")
        lm.keep_programs(tmp_path / "other")  # jax's own folder stays
        assert getattr(jax.config, names[0]) == str(tmp_path / "new" / "folder")
        jax.config.update(names[0], None)
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file"):
            lm.keep_programs(tmp_path / "file")
        assert getattr(jax.config, names[0]) is None
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
