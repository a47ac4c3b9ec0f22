"""Shared parts of the benchmarks: models with random weights, a clock for transformers' trainers, programs that
take turns."""

import argparse
import json
import math
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SKIP = 2  # steps that do not count
TRAINER = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True}
STEPS = {**TRAINER, "logging_steps": 1, "gradient_checkpointing": False, "seed": 0}


def environment(*folders):
    """That of a program which imports from these folders of the project, then from those of PYTHONPATH."""
    paths = [str(ROOT / folder) for folder in folders] + [*filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def llama(hidden, layers, heads, vocabulary, positions, **more):
    """The shape of a Llama."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 8 * 8,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=positions, **more,
    )  # fmt: skip


def tiny_llama(width, seed, folder) -> tuple[str, int]:
    """The folder of a random Llama of this width, and its number of parameters."""
    import torch
    from transformers import LlamaForCausalLM

    from common.data import tiny

    config = tiny.model().config
    config.hidden_size = width
    config.intermediate_size = width * 11 // 4
    config.num_attention_heads = config.num_key_value_heads = max(1, width // 32)
    config.head_dim = width // config.num_attention_heads
    config.initializer_range = 0.9 / math.sqrt(width)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    path = f"{folder}/models/{width}_{seed}"
    model.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path, model.num_parameters()


def make_models(tokenizer, folder):
    """`folder`/policy and `folder`/reward: Llamas of hidden size 256 and 6 layers. The end token's row of the
    unembedding points along the mean hidden state, so that its logit is about the same everywhere:
    log(V / 64)."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    config = llama(
        256, 6, 4, len(words), 2048, num_labels=1, tie_word_embeddings=True, pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id, bos_token_id=words.bos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.add_(0.05)
        mean = model.model(torch.randint(len(words), (8, 64))).last_hidden_state.flatten(0, 1).mean(0)
        model.lm_head.weight[words.eos_token_id] += mean / mean.square().sum() * math.log(len(words) / 64)
    model.save_pretrained(f"{folder}/policy")
    LlamaForSequenceClassification(config).save_pretrained(f"{folder}/reward")
    for name in ("policy", "reward"):
        words.save_pretrained(f"{folder}/{name}")


def message(text, role="assistant"):
    return {"role": role, "content": text}


def clock():
    """A callback for transformers' trainers whose `times` are the ends of the steps."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.times = []

        def on_step_end(self, args, state, control, **kwargs):
            self.times.append(time.perf_counter())

    return Clock()


def make_prompts(source, folder, tokenizer, n):
    """The first n single-turn prompts of at most 128 tokens in prompts.jsonl, one more in one.jsonl."""
    from common.data import files, prompt_sets
    from common.loading import pretrained

    words = pretrained.load_tokenizer(tokenizer, quiet=True)
    prompts = [p for p in prompt_sets.load_prompts(source, "train", words, 128) if len(p.turns) == 1]
    for name, chosen in (("prompts", prompts[:n]), ("one", prompts[-1:])):
        files.write_jsonl(f"{folder}/{name}.jsonl", [{"prompt": p.turns[0]["content"]} for p in chosen])


def rows_of(folder, key):
    """The rows of a run's metrics.jsonl that have this key."""
    from common.data import files

    return [row for row in files.read_jsonl(f"{folder}/metrics.jsonl") if key in row]


def per_second(n, times):
    """Of n a step, by the times of the ends of steps."""
    return n * (len(times) - SKIP) / (times[-1] - times[SKIP - 1])


def tool(module, out, flags) -> dict:
    """summary.json of `python -m module` with these flags in the folder `out`; a finished one is not run
    again. Ends the program if it fails, or if the finished one had other flags."""
    out = Path(out).resolve()
    command = [sys.executable, "-m", module, *map(str, flags), "--output-dir", str(out), "--resume"]
    check_ended(subprocess.run(command, cwd=ROOT, capture_output=True, text=True), out, shlex.join(command))
    return json.loads((out / "summary.json").read_text())


def check_ended(ended, out, command):
    """End the program if a command failed, or if it found in `out` a finished run of other flags."""
    if ended.returncode:
        sys.exit(f"{command}\n{ended.stderr[-2000:]}")
    if "changed and not used" in ended.stdout:
        sys.exit(f"{command}\n{ended.stdout[-2000:]}\nAnother command made {out}. Delete it, or give it another name.")


def last_line(command):
    """Return the JSON that a program prints last; if it fails, end with its error."""
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode:
        sys.exit(out.stderr[-2000:])
    return json.loads(out.stdout.strip().splitlines()[-1])


def compare(file, doc, flags, runs, against, prepare=lambda args: None):
    """The command of a benchmark: run each of `runs` {name: function of the arguments that gives a speed}
    (--only) --repeats times, one after the other, those that begin with trl by --trl-python, and print the ratios
    of `against` {name: its base}, taken turn by turn.

    flags: {name: help of one that must be given, or the default of a number}; prepare: makes files from them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in flags.items():
        is_help = isinstance(value, str)
        how = {"required": True, "help": value} if is_help else {"type": int, "default": value}
        parser.add_argument(f"--{name}", **how)
    parser.add_argument("--tokenizer", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help="run this one here and print JSON")
    parser.add_argument("--models", help="with --only: the folder of the models")
    args = parser.parse_args()
    if args.only:
        speed = runs[args.only](args)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        return print(json.dumps({"per_s": speed, "peak_gb": peak}))
    args.models = tempfile.mkdtemp()
    make_models(args.tokenizer, args.models)
    prepare(args)
    figures = {name: [] for name in runs}
    given = [x for name in ("models", *flags) for x in (f"--{name}", str(vars(args)[name.replace("-", "_")]))]
    for _ in range(args.repeats):
        for name in runs:
            python = args.trl_python if name.startswith("trl") else sys.executable
            figures[name].append(last_line([python, file, "--only", name, *given]))
            speed, peak = figures[name][-1].values()
            print(f"{name:12} {speed:8.2f} a second, peak {peak:.2f} GB", flush=True)
    for name, base in against.items():
        for key, what in (("per_s", "times the speed"), ("peak_gb", "of the peak memory")):
            ratios = sorted(a[key] / b[key] for a, b in zip(figures[name], figures[base]))
            middle = statistics.median(ratios)
            print(f"{name} against {base}: {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) {what}")
