"""docs/use/your_own_loop.md: each block runs next to copies of losses.py and sampler.py, and learns."""

import re
import shutil

import processes
import pytest

PAGE = processes.ROOT / "docs" / "use" / "your_own_loop.md"
BLOCKS = re.findall(r"^## (\w+) .*?```python\n(.*?)```", PAGE.read_text(), re.M | re.S)


@pytest.mark.parametrize("name, code", BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_loop_of_the_page_learns(name, code, tmp_path):
    for file in ("losses", "sampler"):
        shutil.copy(processes.ROOT / "common" / f"{file}.py", tmp_path)
    alone = "import sys, transformers; sys.modules['transformers'] = None; import losses  # needs torch only\n"
    alone += "sys.modules['transformers'] = transformers\n"
    (tmp_path / "loop.py").write_text(alone + code)
    ended = processes.script(tmp_path / "loop.py", cwd=tmp_path, alone=True)
    assert ended.code == 0, ended.err
    lines = [line.split() for line in ended.out.splitlines()]
    if name == "DPO":
        assert lines[0][1] == "0.6931" and float(lines[-1][1]) < 0.5 and lines[-1][2] == "2"
    else:
        rewards = [float(line[-1]) for line in lines]
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_the_page_has_both_loops():
    assert [name for name, _ in BLOCKS] == ["DPO", "PPO"]
