import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: for matrices this small, threads only wait for each other
sys.path.insert(0, str(Path(__file__).parents[1]))
