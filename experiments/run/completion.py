"""Completion in the shell: commands and their options by us, configuration keys and options by Hydra's own query.

`schedlab completion bash` prints a script for the shell, which asks `schedlab complete` at every Tab.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from schedlab.framework.errors import ConfigError

BASH = """\
_schedlab() {
    local line=${COMP_LINE:0:$COMP_POINT} IFS=$'\\n'
    local word=${line##*[[:space:]]}
    COMPREPLY=($(schedlab complete "$line" 2>/dev/null))
    if [[ $COMP_WORDBREAKS == *=* && $word == *=* ]]; then  # bash replaces only what follows the last =
        COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
    fi
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} != *[=./] ]] || compopt -o nospace
}
complete -o default -F _schedlab schedlab
"""
ZSH = """\
#compdef schedlab
autoload -U +X compinit && compinit
_schedlab() {
    local -a found
    local told=1
    found=(${(f)"$(schedlab complete "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)"})
    [[ -n $found ]] || { _files; return }
    compadd -Q -S '' -- ${(M)found:#*[=./]} && told=0  # to go on with, without a space
    compadd -Q -- ${found:#*[=./]} && told=0
    return told
}
compdef _schedlab schedlab
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH}


def script(shell: str) -> str:
    """For `eval "$(schedlab completion bash)"` in the shell's start file."""
    if shell not in SCRIPTS:
        raise ConfigError(f"completion {shell}: expected {' or '.join(SCRIPTS)}")
    return SCRIPTS[shell]


def candidates(line: str, command: Any) -> list[str]:
    """What the last word of `line`, which ends at the cursor, may become. `command` is the program's click command.

    Empty for what only the shell knows, as file names.
    """
    _, *words = line.split(" ")
    while len(words) > 1 and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if hasattr(command, "commands"):
        names = [name for name, found in command.commands.items() if not found.hidden]
        return starting_with(words[-1], names) if len(words) == 1 else []
    if command.context_settings.get("ignore_unknown_options"):
        return overrides(" ".join(words))
    if not words[-1].startswith("-"):
        return []
    return starting_with(words[-1], [name for option in command.params for name in option.opts if name[:1] == "-"])


def overrides(line: str) -> list[str]:
    """Hydra's words for a command that takes them; in a list of values, for the last one."""
    word = line.rpartition(" ")[2]
    if word.startswith("-"):
        return starting_with(word, flags())
    key, equals, values = word.partition("=")
    before, comma, last = values.rpartition(",")
    found = hydra_query(f"{line.removesuffix(word)}{key}={last}" if comma else line)
    if not equals:  # Hydra leaves a group that has folders in it bare
        found = sorted(name if name[-1] in "=./" else f"{name}=" for name in found)
    return [name.replace(f"{key}=", f"{key}={before},", 1) for name in found] if equals and comma else found


def hydra_query(line: str) -> list[str]:
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.plugins.completion_plugin import DefaultCompletionPlugin

    from schedlab.experiments.run.compose import CONFIG_MODULE

    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        return DefaultCompletionPlugin(GlobalHydra.instance().config_loader())._query("config", line)


def flags() -> list[str]:
    from hydra._internal.utils import get_args_parser

    return sorted(name for action in get_args_parser()._actions for name in action.option_strings)


def starting_with(word: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(word))
