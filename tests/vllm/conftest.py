"""vLLM where it is installed: `make test-vllm` makes environments that have it; elsewhere rig.py skips these tests."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(sys.prefix) / "vllm-cache"))  # what it knows of model classes
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
