import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small gain nothing from a second one; before torch
sys.path.insert(0, str(Path(__file__).parents[1]))
