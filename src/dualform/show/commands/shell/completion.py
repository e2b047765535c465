"""``dualform completion``: a script that completes commands and options in bash, zsh or fish.

The words stand in the script, so that completing starts no Python: pressing the tab key takes no time.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True)
class CommandWords:
    """What can follow the name of a command: its options, and the values of those that have a choice."""

    summary: str
    options: Mapping[str, str]
    """The help of each option."""
    values: Mapping[str, Sequence[str]]


def script(group: Any, everywhere: Sequence[str], shell: Shell) -> str:
    """The script for a shell. ``group`` is the command line; the options ``everywhere`` stand after any command."""
    shared = {option: p.help.split(".")[0] for p in group.params for option in p.opts if option in everywhere}
    commands = {name: _words(command, shared) for name, command in sorted(group.commands.items())}
    top = [*commands, *everywhere, *(option for parameter in group.params for option in parameter.opts)]
    return _fish(commands) if shell == "fish" else _bash(commands, list(dict.fromkeys(top)), shell)


def _words(command: Any, shared: Mapping[str, str]) -> CommandWords:
    options = {
        option: (parameter.help or "").split(".")[0]
        for parameter in command.params
        if parameter.param_type_name == "option"
        for option in [*parameter.opts, *parameter.secondary_opts]
    }
    context = command.make_context(command.name, [], resilient_parsing=True)
    values = {
        option: choices
        for parameter in command.params
        for option in (parameter.opts if parameter.param_type_name == "option" else [""])
        if (choices := [item.value for item in parameter.shell_complete(context, "") if item.type == "plain"])
    }
    summary = (command.help or "").strip().split("\n")[0].split(".")[0]
    return CommandWords(summary, {**options, "--help": "Show the help", **shared}, values)


BASH = r"""_dualform() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" name="" words="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    if [[ "${COMP_WORDS[i]}" != -* ]]; then name="${COMP_WORDS[i]}"; break; fi
  done
  if [[ "$word" != -* ]]; then
    case "$name $before" in
VALUES
    esac
  fi
  if [[ -z "$words" ]]; then
    if [[ -n "$name" && "$word" != -* ]]; then COMPREPLY=(); return; fi
    case "$name" in
OPTIONS
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o bashdefault -o default -F _dualform dualform
"""


def _bash(commands: Mapping[str, CommandWords], top: Sequence[str], shell: Shell) -> str:
    values = [
        f'      "{name} {option or name}") words={shlex.quote(" ".join(choices))} ;;'
        for name, words in commands.items()
        for option, choices in words.values.items()
    ]
    options = [f'      "") words={shlex.quote(" ".join(top))} ;;']
    options += [f"      {name}) words={shlex.quote(' '.join(words.options))} ;;" for name, words in commands.items()]
    text = BASH.replace("VALUES", "\n".join(values)).replace("OPTIONS", "\n".join(options))
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text


def _fish(commands: Mapping[str, CommandWords]) -> str:
    lines = []
    for name, words in commands.items():
        lines.append(f"complete -c dualform -n __fish_use_subcommand -f -a {name} -d {shlex.quote(words.summary)}")
        after = f"complete -c dualform -n '__fish_seen_subcommand_from {name}'"
        for choices in (choices for option, choices in words.values.items() if not option):
            lines.append(f"{after} -f -a {shlex.quote(' '.join(choices))}")
        for option, text in words.options.items():
            kind = "-l" if option.startswith("--") else "-s"
            choices = words.values.get(option)
            more = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            lines.append(f"{after} {kind} {option.lstrip('-')}{more} -d {shlex.quote(text)}")
    return "\n".join(lines) + "\n"
