"""sft.py, reward.py and dpo_iterative.py against TRL 1.16's SFTTrainer, RewardTrainer and DPOTrainer, step by
step: the same weights, rows and order, no warm-up, fp32. Prints both losses of each step, and exits with 1
if they differ by more than 1e-5 of TRL's.

    pip install trl==1.16.0 accelerate         in an environment of its own, whose interpreter is --trl-python
    python tests/benchmarks/trl_steps.py --trl-python trl/bin/python

The tiny world's model with random weights, 20 steps of 8 rows in micro-batches of 4. The scripts run
unchanged, with shared prompts, except that rows are not shuffled and not packed, because a packed step is a
number of blocks. TRL has AdamW with the scripts' settings (its own would leave norms out of
the weight decay) and the learning rates that our run logged."""

import argparse
import importlib
import json
import sys
import tempfile
from unittest import mock

import peers

STEPS, ROWS, LIMIT = 20, 8, 1e-5
LR, DECAY, BETA = 3e-4, 0.1, 0.5
LOSSES = {"sft": "loss/nll", "reward": "loss/reward", "dpo_iterative": "loss/dpo"}


def make_inputs(folder):
    """The models policy/ and scorer/, the rows {sft,pairs}.jsonl and, held out, few_{sft,pairs}.jsonl."""
    import torch
    from transformers import LlamaForSequenceClassification

    from common.data import files, tiny

    policy = tiny.model()
    policy.save_pretrained(f"{folder}/policy")
    policy.config.num_labels = 1
    torch.manual_seed(0)
    LlamaForSequenceClassification(policy.config).save_pretrained(f"{folder}/scorer")
    for name in ("policy", "scorer"):
        tiny.tokenizer().save_pretrained(f"{folder}/{name}")
    enough = STEPS * ROWS * 9 // 8  # offline DPO holds out a twentieth of them
    for name, kind, columns in (
        ("sft", "sft", ("prompt", "completion")),
        ("pairs", "preferences", ("prompt", "chosen", "rejected")),
    ):
        for file, split, n in ((name, "train", enough), (f"few_{name}", "test", ROWS)):
            of_prompt = {row["prompt"]: {key: row[key] for key in columns} for row in tiny.rows(kind, split)}
            files.write_jsonl(f"{folder}/{file}.jsonl", list(of_prompt.values())[:n])


def ours(script, folder):
    """Runs the script in `folder`/SCRIPT. Returns its losses and learning rates, and the file of its rows."""
    import torch

    from common.data import files

    module, out = importlib.import_module(script), f"{folder}/{script}"
    options = {
        "sft": {
            "model": f"{folder}/policy", "dataset": f"{folder}/sft.jsonl", "max_steps": STEPS,
            "eval_dataset": f"{folder}/few_sft.jsonl", "packing": False, "sample_prompts": 0,
        },
        "reward": {
            "model": f"{folder}/scorer", "dataset": f"{folder}/pairs.jsonl", "max_steps": STEPS,
            "eval_dataset": f"{folder}/few_pairs.jsonl", "length_prompts": 0,
        },
        "dpo_iterative": {
            "model": f"{folder}/policy", "dataset": f"{folder}/few_sft.jsonl", "eval_prompts": 0,
            "offline_data": f"{folder}/pairs.jsonl", "offline_pairs": STEPS * ROWS, "iterations": 0,
            "epochs": 1, "beta": BETA,
        },
    }[script]  # fmt: skip
    with mock.patch("torch.randperm", lambda n, **_: torch.arange(n)):
        module.main(
            module.Args(
                output_dir=out, batch_size=ROWS, micro_batch_size=ROWS // 2, lr=LR, warmup_ratio=0.0,
                weight_decay=DECAY, max_grad_norm=1.0, save_every=0, **options,
            )
        )  # fmt: skip
    steps = [row for row in files.read_jsonl(f"{out}/metrics.jsonl") if LOSSES[script] in row]
    return {
        "losses": [row[LOSSES[script]] for row in steps],
        "rates": [row["optim/lr"] for row in steps],
        "rows": f"{out}/pairs.jsonl" if script == "dpo_iterative" else options["dataset"],
    }


def theirs(script, folder, rows, rates):
    """TRL's losses on the first rows of the file `rows` with these learning rates."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    trainer, config, kind, name = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, AutoModelForCausalLM, "policy"),
        "reward": (trl.RewardTrainer, trl.RewardConfig, AutoModelForSequenceClassification, "scorer"),
        "dpo_iterative": (trl.DPOTrainer, trl.DPOConfig, AutoModelForCausalLM, "policy"),
    }[script]
    model, reference = (kind.from_pretrained(f"{folder}/{name}", dtype="float32") for _ in range(2))
    is_dpo = script == "dpo_iterative"

    def messages(value, role):
        return [peers.message(value, role)] if isinstance(value, str) else value

    columns = {"prompt": "user", **dict.fromkeys(("completion", "chosen", "rejected"), "assistant")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [*rates, 0.0][step])
    settings = config(
        output_dir=tempfile.mkdtemp(), max_steps=len(rates), per_device_train_batch_size=ROWS // 2,
        gradient_accumulation_steps=2, max_grad_norm=1.0, train_sampling_strategy="sequential",
        max_length=128, logging_steps=1, save_strategy="no", report_to="none", bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, **({"beta": BETA} if is_dpo else {}),
    )  # fmt: skip
    with open(rows) as file:
        dialogues = [
            {column: messages(row[column], role) for column, role in columns.items() if column in row}
            for row in map(json.loads, file)
        ]
    run = trainer(
        model=model, processing_class=AutoTokenizer.from_pretrained(f"{folder}/{name}"), args=settings,
        train_dataset=Dataset.from_list(dialogues), optimizers=(optimizer, schedule),
        **({"ref_model": reference} if is_dpo else {}),
    )  # fmt: skip
    run.train()
    return [row["loss"] for row in run.state.log_history if "loss" in row]


def agree(script, folder, trl_python):
    """Prints the table of a run. Returns whether its losses agree."""
    command = [__file__, "--folder", folder, "--only", script]
    our = peers.last_line([sys.executable, *command])
    rates = map(str, our["rates"])
    losses = peers.last_line([trl_python, *command, "--rows", our["rows"], "--rates", *rates])
    if not len(losses) == len(our["losses"]) == STEPS:
        print(f"\n{script}: {len(our['losses'])} steps, TRL's {len(losses)}, wanted {STEPS}")
        return False
    print(f"\n{script}, learning rate {max(our['rates']):.3g} to {min(our['rates']):.3g}")
    print("step        ours         TRL  relative difference")
    differences = [abs(a - b) / abs(b) for a, b in zip(our["losses"], losses)]
    for step, (a, b, difference) in enumerate(zip(our["losses"], losses, differences), 1):
        print(f"{step:4} {a:11.7f} {b:11.7f}  {difference:.1e}{'  too much' * (not difference <= LIMIT)}")
    print(f"{script}: at most {max(differences):.1e}, wanted {LIMIT:.0e}", flush=True)
    return all(difference <= LIMIT for difference in differences)  # no nan is


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--only", choices=LOSSES, help="run it here (ours without --rows), print JSON")
    parser.add_argument("--folder", help="with --only: what make_inputs wrote")
    parser.add_argument("--rows", help="with --only: the file of TRL's rows")
    parser.add_argument("--rates", type=float, nargs="+", help="with --only: TRL's learning rates")
    args = parser.parse_args()
    if args.rows:
        return print(json.dumps(theirs(args.only, args.folder, args.rows, args.rates)))
    if args.only:
        return print(json.dumps(ours(args.only, args.folder)))
    folder = tempfile.mkdtemp()
    make_inputs(folder)
    sys.exit(not all([agree(script, folder, args.trl_python) for script in LOSSES]))


if __name__ == "__main__":
    main()
