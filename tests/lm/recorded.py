"""Tokens of transformers for the folders of `witness`, recorded once and compared everywhere.

With torch and transformers installed (and neither jax nor this package's other needs):

    python tests/lm/recorded.py            # compares transformers with the file
    python tests/lm/recorded.py --write    # writes the file anew

`tests/lm/test_recorded.py` compares the demo with the file. A text of every family is drawn from a
seed, as its weights are; transformers decodes it greedily in float32, with its cache.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import numpy as np

FILE = pathlib.Path(__file__).with_name("recorded.json")
PROMPTS, TOKENS = (23, 9), 12
# Two logits that are closer than this could come in either order.
MARGIN = 1e-3
CLOSE = 2e-4


def prompts(family, vocab):
    """Token ids of a family's prompts."""
    rng = np.random.default_rng([len(family), vocab])
    return [rng.integers(0, vocab, length).tolist() for length in PROMPTS]


def decoded(folder, ids):
    """A prompt, the tokens after it and the log-probability of each."""
    import torch
    import transformers

    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    how = {"max_new_tokens": TOKENS, "do_sample": False, "return_dict_in_generate": True}
    how |= {"output_logits": True, "eos_token_id": None, "pad_token_id": 0}
    text = torch.tensor([ids])
    made = model.generate(text, attention_mask=torch.ones_like(text), **how)
    logits = torch.stack(made.logits)[:, 0]
    tokens = made.sequences[0, len(ids) :]
    logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    best = logits.topk(2).values
    if (lead := (best[:, 0] - best[:, 1]).min().item()) < MARGIN:
        raise ValueError(f"{folder}: two tokens are within {lead} of each other")
    rounded = [round(x, 5) for x in logprobs.tolist()]
    return {"prompt": ids, "tokens": tokens.tolist(), "logprobs": rounded}


def recorded_anew():
    """The file's contents, by the transformers that is installed."""
    import transformers

    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    from tests.lm import witness

    families = {}
    for family in witness.CONFIGS:
        config, tensors = witness.made(family)
        total = float(sum(np.abs(x).sum(dtype=np.float64) for x in tensors.values()))
        with tempfile.TemporaryDirectory() as folder:
            witness.write(pathlib.Path(folder), config, tensors)
            texts = [decoded(folder, ids) for ids in prompts(family, config["vocab_size"])]
        families[family] = {"weights": round(total, 3), "texts": texts}
    return {"transformers": transformers.__version__, "families": families}


def differences(held, new):
    """Families whose tokens or log-probabilities differ."""
    for family in held | new:
        texts = [x.get(family, {}).get("texts", []) for x in (held, new)]
        same = [text["tokens"] for text in texts[0]] == [text["tokens"] for text in texts[1]]
        if not same or not all(
            np.allclose(a["logprobs"], b["logprobs"], rtol=0, atol=CLOSE)
            for a, b in zip(*texts, strict=True)
        ):
            yield family


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    new = recorded_anew()
    if write:
        FILE.write_text(_lines(new), "utf-8")
        return 0
    wrong = list(differences(json.loads(FILE.read_text("utf-8"))["families"], new["families"]))
    sys.stdout.write(
        f"transformers {new['transformers']}: {', '.join(wrong) or 'nothing'} differs\n"
    )
    return int(bool(wrong))


def _lines(contents):
    """JSON with a text a line."""
    parts = [f'{{\n"transformers": {json.dumps(contents["transformers"])},\n"families": {{\n']
    families = []
    for family, facts in contents["families"].items():
        texts = ",\n".join(map(json.dumps, facts["texts"]))
        families.append(f'"{family}": {{"weights": {facts["weights"]}, "texts": [\n{texts}\n]}}')
    return "".join(parts) + ",\n".join(families) + "\n}}\n"


if __name__ == "__main__":
    sys.exit(main())
