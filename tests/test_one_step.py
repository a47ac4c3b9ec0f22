"""docs/learn/one_step.md: its code runs, and the notebook has the same content."""

import json
import shutil
import sys

import helpers
import torch

sys.path.insert(0, str(helpers.ROOT / "tests" / "benchmarks"))
import one_step

CELLS = one_step.cells(one_step.PAGE.read_text())


def test_the_notebook_has_the_page_s_text_code_and_outputs():
    notebook = json.loads(one_step.PAGE.with_suffix(".ipynb").read_text())
    printed = ["".join(out["text"] for out in cell.get("outputs", [])) for cell in notebook["cells"]]
    assert [(cell["cell_type"], cell["source"]) for cell in notebook["cells"]] == [
        (kind, text.strip()) for kind, text in CELLS
    ]
    assert one_step.as_page(CELLS, printed) == one_step.PAGE.read_text()


def test_the_code_of_the_page_runs_on_other_runs(tmp_path, monkeypatch):
    """On models with other weights than those of the page: the first ratio is 1, nothing is clipped, a token's
    reward is minus the coefficient times its KL except at the end, and A + V is the return."""
    rows = helpers.write_rows(tmp_path / "rows.jsonl", helpers.tiny.rows("sft", "train")[:400])
    helpers.smaller_model(tmp_path / "base")
    helpers.train_small(tmp_path / "base", rows, tmp_path / "runs" / "ppo")
    (tmp_path / "runs" / "sft").mkdir()
    shutil.copytree(tmp_path / "base", tmp_path / "runs" / "sft" / "model")
    helpers.make_scorer(tmp_path / "runs" / "reward" / "model")
    monkeypatch.chdir(tmp_path)
    namespace = {}
    printed = one_step.run(CELLS, namespace)
    action_mask, kl, rewards = (namespace[name] for name in ("action_mask", "kl", "rewards"))
    last = torch.zeros_like(action_mask)
    last[namespace["rows"], namespace["last"]] = True
    torch.testing.assert_close(rewards[~last], -0.3 * kl[~last])
    torch.testing.assert_close(rewards[last], namespace["scores"] - 0.3 * kl[last])
    assert (action_mask.sum(1) == namespace["rollout"].sample_mask.sum(1)).all()
    [updates] = [text for text in printed if text.startswith("step 0")]
    assert "largest ratio 1.00, clipped 0 of" in updates.splitlines()[0]
