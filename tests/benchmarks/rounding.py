"""What a GPU's bfloat16 rounds away, on a CPU: run a script in float32 whose forwards have weights rounded to bfloat16.

    python tests/benchmarks/rounding.py offsets sft.py tiny ...      with the offsets of dist.dither, as in bfloat16
    python tests/benchmarks/rounding.py none -m common.programs.evaluate ...      without

Embeddings and vectors are rounded too, as by FSDP and the sampler; activations are not. Without adapters only."""

import runpy
import sys

import peers  # noqa: F401 (it puts the project into sys.path)

from common import dist
from common.loading import pretrained
from common.run import checkpoints

masters = {}  # parameter -> its weight in float32


def unrounded(model):
    for p in model.parameters():
        p.data = masters[p]


def rounded(model):
    for p in model.parameters():
        masters[p] = p.data
        p.data = p.data.bfloat16().float()


def with_masters(function):
    """Wrap a function whose first argument is a model, or a list of them: it sees the weights in float32."""

    def wrapped(models, *args, **options):
        of_all = models if isinstance(models, list) else [models]
        for model in of_all:
            unrounded(model)
        try:
            return function(models, *args, **options)
        finally:
            for model in of_all:
                rounded(model)

    return wrapped


def main(offsets, *words):
    load, adamw = pretrained.load_policy, dist.adamw

    def load_policy(*args, **options):
        model = load(*args, **options)
        rounded(model)
        return model

    def dithered_adamw(model, *args):
        if offsets == "offsets":
            dist.dither(model)
        return adamw(model, *args)

    pretrained.load_policy = load_policy
    dist.adamw = with_masters(dithered_adamw)
    dist.optimizer_step = with_masters(dist.optimizer_step)
    checkpoints.save_model = with_masters(checkpoints.save_model)
    sys.argv = [word for word in words if word != "-m"]
    run = runpy.run_module if words[0] == "-m" else runpy.run_path
    run(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
