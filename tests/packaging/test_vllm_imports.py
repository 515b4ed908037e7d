"""In vLLM's environment there is no Hydra, and schedlab brings no second torch: what `schedlab.vllm` imports."""

import subprocess
import sys

CODE = """
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

class Anything(type):
    def __getattr__(cls, name):
        return name

class Pretended(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "vllm" else None
    def exec_module(self, module):
        module.__getattr__ = lambda name: Anything(name, (), {})

sys.meta_path.insert(0, Pretended())
import schedlab.vllm, schedlab.policies.prefix_reuse
tops = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("schedlab.")}
print(sorted(name for name in tops if not name.startswith("_")), sorted(rooms))
"""


def test_nothing_but_numpy_and_schedlab_is_imported_besides_vllm():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tops, rooms = (set(part.strip("[]'").split("', '")) for part in done.stdout.strip().split("] ["))
    assert {"numpy", "schedlab", "vllm"} <= tops
    assert not {"torch", "hydra", "omegaconf", "wandb", "rich"} & tops
    assert not {"experiments", "workloads", "kernels"} & rooms
