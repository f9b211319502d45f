"""The demo: a Llama-family decoder, its checkpoints, the batch decode loop.

    import pallas_lm as lm

    model = lm.load()                                  # the small one inside the package
    texts = lm.generate(model, ["ROMEO:", "The sea"], max_new_tokens=40)
    for piece in lm.stream(model, ["ROMEO:"], stop="\\n\\n"):
        print(piece.text, end="")

`lm.load(folder)` reads a checkpoint in Hugging Face's layout, which takes the extra `lm`.
"""

from pallas_lm import mesh
from pallas_lm.generation import Completion, Model, complete, generate, load, stream
from pallas_lm.machine import keep_programs
from pallas_lm.options import Options
from pallas_lm.sampling import Sampling, sample
from pallas_lm.texts import Piece

__all__ = [
    "Completion",
    "Model",
    "Options",
    "Piece",
    "Sampling",
    "complete",
    "generate",
    "keep_programs",
    "load",
    "mesh",
    "sample",
    "stream",
]
