import sys
from pathlib import Path

for folder in ("evidence", "framework", "experiments"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))  # helpers beside these tests and beside others
