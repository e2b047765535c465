"""``dualform completion``: a script that completes commands and options in bash, zsh or fish.

The words stand in the script, so that completing starts no Python: pressing the tab key takes no time.
"""

import re
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
    shared = {option: _first_sentence(p.help) for p in group.params for option in p.opts if option in everywhere}
    commands = {name: _words(command, shared) for name, command in sorted(group.commands.items())}
    before = {option: _first_sentence(p.help) for p in group.params for option in p.opts}
    top = {**before, "--help": "Show the help"}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands, top)


def _words(command: Any, shared: Mapping[str, str]) -> CommandWords:
    options = {
        option: _first_sentence(parameter.help)
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
    return CommandWords(_first_sentence(command.help), {**options, "--help": "Show the help", **shared}, values)


def _first_sentence(help: str | None) -> str:
    """The first sentence without its full stop; that of a file's name ends nothing."""
    return re.split(r"\.(?:\s|$)", (help or "").strip())[0]


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


def _bash(commands: Mapping[str, CommandWords], top: Mapping[str, str]) -> str:
    values = [
        f'      "{name} {option or name}") words={shlex.quote(" ".join(choices))} ;;'
        for name, words in commands.items()
        for option, choices in words.values.items()
    ]
    options = [f'      "") words={shlex.quote(" ".join([*commands, *top]))} ;;']
    options += [f"      {name}) words={shlex.quote(' '.join(words.options))} ;;" for name, words in commands.items()]
    return BASH.replace("VALUES", "\n".join(values)).replace("OPTIONS", "\n".join(options))


ZSH = r"""(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
_dualform() {
  local word="${words[CURRENT]}" before="${words[CURRENT-1]}" name="" i
  local -a offered
  for ((i = 2; i < CURRENT; i++)); do
    if [[ "${words[i]}" != -* ]]; then name="${words[i]}"; break; fi
  done
  if [[ "$word" != -* ]]; then
    case "$name $before" in
VALUES
    esac
  fi
  if (( ! $#offered )); then
    if [[ -n "$name" && "$word" != -* ]]; then _files; return; fi
    case "$name" in
OPTIONS
    esac
  fi
  _describe 'dualform' offered
}
compdef _dualform dualform
"""


def _zsh(commands: Mapping[str, CommandWords], top: Mapping[str, str]) -> str:
    def described(texts: Mapping[str, str]) -> str:
        return " ".join(shlex.quote(f"{word}:{text}" if text else word) for word, text in texts.items())

    values = [
        f'      "{name} {option or name}") offered=({" ".join(map(shlex.quote, choices))}) ;;'
        for name, words in commands.items()
        for option, choices in words.values.items()
    ]
    names = {name: words.summary for name, words in commands.items()}
    options = [f'      "") offered=({described({**names, **top})}) ;;']
    options += [f"      {name}) offered=({described(words.options)}) ;;" for name, words in commands.items()]
    return ZSH.replace("VALUES", "\n".join(values)).replace("OPTIONS", "\n".join(options))


def _fish(commands: Mapping[str, CommandWords], top: Mapping[str, str]) -> str:
    first = "complete -c dualform -n __fish_use_subcommand"
    lines = [f"{first} {_fish_option(option)} -d {shlex.quote(text)}" for option, text in top.items()]
    for name, words in commands.items():
        lines.append(f"{first} -f -a {name} -d {shlex.quote(words.summary)}")
        after = f"complete -c dualform -n '__fish_seen_subcommand_from {name}'"
        for choices in (choices for option, choices in words.values.items() if not option):
            lines.append(f"{after} -f -a {shlex.quote(' '.join(choices))}")
        for option, text in words.options.items():
            choices = words.values.get(option)
            more = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            lines.append(f"{after} {_fish_option(option)}{more} -d {shlex.quote(text)}")
    return "\n".join(lines) + "\n"


def _fish_option(option: str) -> str:
    return f"{'-l' if option.startswith('--') else '-s'} {option.lstrip('-')}"
