"""`schedlab COMMAND --help` of the commands that have keys of their own: these, with their comments."""

from __future__ import annotations

import re
from importlib.resources import files

OWN = {
    "roofline": ("config.yaml", "roofline"),
    "calibrate": ("config.yaml", "calibrate"),
    "fidelity": ("config.yaml", "fidelity"),
    "capacity": ("config.yaml", "capacity"),
    "policy check": ("config.yaml", "check"),
    "profile import": ("config.yaml", "import"),
    "generate": ("generate.yaml", "chat"),
}
"""Of each command, the file of the configuration and the key at which its keys begin."""
USAGE = {
    "generate": 'schedlab generate "prompt" … key=value …   continues prompts; several are answered together',
    "profile import": "schedlab profile import SOURCE [PATH] model=… hardware=… key=value …",
}
HELP = ("--help", "-h")


def page(command: str) -> str | None:
    """Usage and keys; None for a command without keys of its own, which Hydra's page tells of."""
    if command not in OWN:
        return None
    parts = [USAGE.get(command, f"schedlab {command} key=value …"), paragraph(*OWN[command])]
    if command == "generate":
        comment, *keys = _read("sampling/default.yaml").splitlines()
        parts.append("\n  ".join([f"sampling: {comment}", *keys]))
    return "\n\n".join([*parts, "All other keys and the config groups: schedlab run --help"])


def paragraph(name: str, key: str) -> str:
    """The lines of a file of the configuration from a top-level key to the next empty line."""
    found = re.search(rf"^{key}:.*?(?=\n\n|\Z)", _read(name), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{name} has {key}"
    return found[0]


def _read(name: str) -> str:
    return (files("schedlab.conf") / name).read_text(encoding="utf-8")
