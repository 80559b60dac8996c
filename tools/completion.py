"""``shardwright completion SHELL``: the script by which bash, zsh or fish completes our commands.

It is made from the parsers of the commands. A wheel holds the three scripts ready made, so that
printing one costs nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module

from . import options
from .all_commands import COMMANDS, PROG
from .train_ckpt import SUBCOMMANDS

EXAMPLES = (
    "bash > ~/.shardwright.bash && echo '. ~/.shardwright.bash' >> ~/.bashrc",
    'zsh > "${fpath[1]}/_shardwright"',
    "fish > ~/.config/fish/completions/shardwright.fish",
)
_FILES = ("DIR", "PATH", "FILE", "B", ".png", ".yaml")  # ends of a metavar that stands for a file
FOLDER = "completions"  # of the package: where a wheel holds the scripts


def parser(prog: str = "shardwright completion") -> argparse.ArgumentParser:
    """The options, and the examples of the help."""
    made = options.parser(prog, __doc__ or "", EXAMPLES)
    made.add_argument("shell", choices=tuple(SHELLS), help="which shell")
    return made


def command(argv: Sequence[str], prog: str = "shardwright completion") -> int:
    """Run with dashed arguments; the exit code."""
    shell = parser(prog).parse_args(argv).shell
    print(_ready(shell) or script(shell), end="")
    return options.DONE


def _ready(shell: str) -> str:
    """The script that the wheel was built with; empty where nothing was built."""
    import shardwright

    try:
        folder = os.path.join(os.path.dirname(shardwright.__file__ or ""), FOLDER)
        with open(os.path.join(folder, f"shardwright.{shell}"), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its spellings, and what follows it."""

    flags: tuple[str, ...]
    help: str
    metavar: str  # empty if nothing follows
    choices: tuple[str, ...]

    @property
    def takes_file(self) -> bool:
        """Whether a path follows."""
        return self.metavar.endswith(_FILES)


@dataclass(frozen=True, slots=True)
class Node:
    """One command or sub-command, under each of its names."""

    names: tuple[str, ...]  # e.g. ("train-ckpt doctor", "shardwright doctor")
    options: tuple[Option, ...]
    words: dict[str, str]  # what may follow directly: sub-command or choice -> what it does
    takes_file: bool  # whether an argument is a path

    @property
    def flags(self) -> list[str]:
        """Every spelling of every option."""
        return [flag for option in self.options for flag in option.flags]


def nodes() -> list[Node]:
    """Every command that completes, from the parsers."""
    tops = {name: row.what for name, row in COMMANDS.items()}
    found = [Node((PROG,), (Option(("--help", "--version"), "", "", ()),), tops, False)]
    for name, row in COMMANDS.items():
        names = tuple(filter(None, (row.alone, f"{PROG} {name}")))
        module = import_module(f"{__package__}.{row.module}")
        second = SUBCOMMANDS if row.module == "train_ckpt" else {}
        parts = {word: import_module(where) for word, where in second.items()}
        said = {word: _first_line(made.__doc__) for word, made in parts.items()}
        found.append(_node(names, module.parser(), said))
        for word, part in parts.items():
            if word not in COMMANDS:
                spelled = tuple(f"{n} {word}" for n in names)
                found.append(_node(spelled, part.parser(), {}))
    doctor = next(i for i, node in enumerate(found) if "train-ckpt doctor" in node.names)
    both = (*found[doctor].names, f"{PROG} train doctor")
    found[doctor] = Node(both, found[doctor].options, {}, False)
    return found


def _node(names: tuple[str, ...], made: argparse.ArgumentParser, words: dict[str, str]) -> Node:
    options_, files, known = [], False, dict(words)
    for action in made._actions:
        if action.help is argparse.SUPPRESS:
            continue
        if action.option_strings:
            options_.append(_option(action))
        else:
            known |= {str(choice): "" for choice in action.choices or ()}
            files = files or not action.choices
    return Node(names, tuple(options_), known, files)


def _option(action: argparse.Action) -> Option:
    metavar = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    text = (action.help or "") % {**vars(action), "prog": ""}
    choices = tuple(map(str, action.choices or ()))
    return Option(tuple(action.option_strings), " ".join(text.split()), metavar, choices)


def _first_line(text: str | None) -> str:
    said = (text or "").split("\n\n")[0].partition(": ")[2]
    return " ".join(said.split()).replace("``", "").rstrip(".")


def _bash() -> str:
    made = nodes()
    values: dict[str, list[str]] = {}  # what follows an option -> `command:option` of each
    for node in made:
        for option in node.options:
            if option.metavar:
                kind = " ".join(option.choices) or ("" if option.takes_file else "-")
                spelled = [f"{n}:{f}" for n in node.names for f in option.flags]
                values.setdefault(kind, []).extend(spelled)
    deeper = _any(n for node in made for n in node.names if " " in n)
    lines = [
        f"# bash completion of {PROG} and its commands",
        "_shardwright() {",
        '  local cur=${COMP_WORDS[COMP_CWORD]} key=${COMP_WORDS[0]##*/} at=1 words="" flags=""',
        "  COMPREPLY=()",
        "  while ((at < COMP_CWORD)); do",
        '    case "$key ${COMP_WORDS[at]}" in',
        f'      {deeper}) key+=" ${{COMP_WORDS[at]}}" ;;',
        "      *) break ;;",
        "    esac",
        "    ((at += 1))",
        "  done",
        '  case "$key:${COMP_WORDS[COMP_CWORD-1]}" in',
    ]
    for kind, spelled in values.items():
        if kind == "-":  # a number or a name: nothing to offer
            answer = "compopt +o default; return"
        elif kind:
            answer = f'COMPREPLY=($(compgen -W "{kind}" -- "$cur")); return'
        else:
            answer = "return"
        lines.append(f"    {_any(spelled)}) {answer} ;;")
    lines += ["  esac", '  case "$key" in']
    for node in made:
        names = "|".join(f'"{name}"' for name in node.names)
        lines.append(
            f'    {names}) words="{" ".join(node.words)}" flags="{" ".join(node.flags)}" ;;'
        )
    return "\n".join([
        *lines,
        "  esac",
        '  if [[ $cur == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$cur"))',
        '  elif ((at == COMP_CWORD)); then COMPREPLY=($(compgen -W "$words" -- "$cur")); fi',
        "}",
        f"complete -o default -F _shardwright {' '.join(_programs(made))}",
        "",
    ])  # fmt: skip


def _any(words: Iterable[str]) -> str:
    """A pattern of a shell's case."""
    return "|".join(f'"{word}"' for word in words)


def _programs(made: Sequence[Node]) -> list[str]:
    return list(dict.fromkeys(name.split()[0] for node in made for name in node.names))


def _zsh() -> str:
    made = nodes()
    deeper = _any(n for node in made for n in node.names if " " in n)
    lines = [
        f"#compdef {' '.join(_programs(made))}",
        f"# zsh completion of {PROG} and its commands",
        "_shardwright() {",
        "  local key=${words[1]:t}",
        "  while ((CURRENT > 2)); do",
        '    case "$key ${words[2]}" in',
        f'      {deeper}) key+=" ${{words[2]}}"; shift words; ((CURRENT -= 1)) ;;',
        "      *) break ;;",
        "    esac",
        "  done",
        '  case "$key" in',
    ]
    for node in made:
        lines.append(f"    {_any(node.names)})")
        said = " ".join(_quoted(f"{w}:{what.replace(':', ' ')}") for w, what in node.words.items())
        if said:
            lines.append(f"      local -a known=({said})")
            lines.append("      ((CURRENT == 2)) && _describe command known")
        each = [_zsh_option(flag, option) for option in node.options for flag in option.flags]
        each += ["'*:path:_files'"] if node.takes_file else []
        lines.append(f"      _arguments {' '.join(each)} ;;")
    return "\n".join([*lines, "  esac", "}", '_shardwright "$@"', ""])


def _zsh_option(flag: str, option: Option) -> str:
    text = option.help.translate(str.maketrans("[]:", "() "))
    follows = ""
    if option.metavar:
        kind = f"({' '.join(option.choices)})" if option.choices else ""
        kind = kind or ("_files" if option.takes_file else " ")
        follows = f":{option.metavar.replace(':', ' ')}:{kind}"
    return _quoted(f"*{flag}[{text}]{follows}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish() -> str:
    lines = [f"# fish completion of {PROG} and its commands"]
    for node in nodes():
        for name in node.names:
            program, *path = name.split()
            lines += _fish_node(node, program, path)
    return "\n".join([*lines, ""])


def _fish_node(node: Node, program: str, path: Sequence[str]) -> list[str]:
    seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in path)
    none = f"not __fish_seen_subcommand_from {' '.join(node.words)}" if node.words else ""
    where = "; and ".join(filter(None, (seen, none)))
    lines = [
        f"complete -c {program} {_condition(where)}-f -a {word} -d {_fish_quoted(what)}"
        for word, what in node.words.items()
    ]
    for option in node.options:
        longs = "".join(f" -l {flag[2:]}" for flag in option.flags if flag.startswith("--"))
        shorts = "".join(f" -s {flag[1:]}" for flag in option.flags if not flag.startswith("--"))
        follows = ""
        if option.choices:
            follows = f" -x -a {_fish_quoted(' '.join(option.choices))}"
        elif option.metavar:
            follows = " -r -F" if option.takes_file else " -x"
        text = f" -d {_fish_quoted(option.help)}" if option.help else ""
        lines.append(f"complete -c {program} {_condition(where)}{(longs + shorts).strip()}"
                     f"{follows}{text}")  # fmt: skip
    return lines


def _condition(text: str) -> str:
    return f"-n {_fish_quoted(text)} " if text else ""


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def script(shell: str) -> str:
    """The completion script of a shell, made from the parsers."""
    return SHELLS[shell]()
