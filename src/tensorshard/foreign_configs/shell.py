"""Launch scripts, read and never run: their variables, arrays and branches followed, to the arguments of one command."""

import fnmatch
import re
import shlex
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
from typing import Any

LAUNCHER = (
    "nnodes nproc_per_node node_rank master_addr master_port rdzv_endpoint rdzv_id rdzv_backend rdzv_conf local_rank "
    "standalone max_restarts monitor_interval start_method log_dir redirects tee no_python job_name "
    "partition account nodes ntasks ntasks_per_node gpus_per_node gres time exclusive dependency output error container_image "
    "container_mounts container_workdir no_container_mount_home mpi kill_on_bad_exit wait requeue parsable pty export "
    "distributed_backend distributed_timeout_minutes no_sync termination_id cpus_per_task mem signal "
    "num_gpus num_nodes hostfile include launcher launcher_args"
)
"""Options of torchrun, Slurm and other launchers."""

_NAME = re.compile(r"\$\{?(\w+)")
_ASSIGN = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(.*)$")


def arguments(text: str, given: Mapping[str, str], known: Container[str] = ()) -> dict[str, Any]:
    """The arguments of a launch script: of the command that has most of the `known` ones.

    Args:
        text: the script. given: variables that are set from outside; they win.
        known: names of arguments.
    """
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text)
    text = re.sub(r"\$\((?!\()[^()]*\)", "$(COMMAND)", text)  # what it prints is not known
    text = re.sub(r"`[^`]*`", lambda match: "$(COMMAND)" if " " in match[0] else match[0], text)
    text = re.sub(r"\(([^()]*)\)", lambda match: "(" + match[1].replace("\n", " ") + ")", text)
    text = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text)  # as many words as the array has
    text = re.sub(r"(?ms)^\s*case\s.*?^\s*esac\b", _arms_apart, text)
    text = re.sub(r"(?m);[ \t]*(then|do|else|elif|fi|done|esac)\b", r"\n\1", text)
    text = re.sub(r"(?m)^([ \t]*(?:then|else|do))[ \t]+(?=\S)", r"\1\n", text)
    text = re.sub(r"(?m)(?<=\w)(\+?=[^\s;\"'()]*)[ \t]*;", r"\1\n", text)  # A=1; B=2
    variables, branches, uses = dict(given), _Branches(), dict[str, set[str]]()
    lines = []
    for line in _joined(text):
        match = _ASSIGN.match(line)
        if match:
            uses.setdefault(match[1], set()).update(_NAME.findall(match[3]))
        if branches.take(line, variables):
            continue
        if match:
            name, more, value = match.groups()
            value = value.strip()
            if len(value) > 1 and value[0] + value[-1] in ("()", "''", '""'):
                value = value[1:-1]
            value = expand(value, variables, name)
            variables[name] = given.get(name, f"{variables.get(name, '')} {value}" if more else value)
        elif "--" in line or "$" in line:
            lines.append(line)
    commands = [_split(expand(line, variables)) for line in lines]
    commands = [words for words in commands if any(word.startswith("--") for word in words)]
    if not commands:
        commands = [[word for value in variables.values() for word in _split(value)]]
    read = [pairs(words) for words in commands]
    counts = [sum(name in known for name in options) for options in read]
    main = counts.index(max(counts))
    others = {f"command {number + 1}": " ".join(commands[number][:8]) for number in range(len(read)) if number != main}
    return {**read[main], **others, **branches.that_matter(lines, uses)}


def _arms_apart(block: re.Match[str]) -> str:
    """A ``case`` with its patterns, its commands and the ``;;`` between them on lines of their own."""
    return re.sub(r"(?m)^(\s*[^()\n]*\))(.*)$", r"\1\n\2", block[0].replace(";;", "\n;;\n"))


@dataclass
class _Frame:
    """An ``if``, a ``case`` or a loop that is open.

    Attributes:
        runs: whether its commands run; None if that is not known.
        ran: whether an earlier branch ran.
        condition: what is not known. subject: what a ``case`` compares; None for the others.
    """

    runs: bool | None
    ran: bool = False
    condition: str = ""
    subject: str | None = None


class _Branches:
    """Which lines of a script are run, where it branches by ``if`` or ``case``, or loops over its own arguments.

    Attributes:
        undecided: the lines of the branches of each condition by what is not known.
    """

    def __init__(self) -> None:
        self.undecided: dict[str, list[str]] = {}
        self._stack: list[_Frame] = []

    def take(self, line: str, variables: Mapping[str, str]) -> bool:
        """Whether nothing is to be done with `line`: it belongs to a branch that is not taken, or opens or ends one."""
        top = self._stack[-1] if self._stack else None
        arm = re.match(r"\s*([^()]*)\)\s*$", line)
        if top is not None and top.subject is not None and arm is not None:
            fits = any(fnmatch.fnmatchcase(top.subject, word.strip().strip("\"'")) for word in arm[1].split("|"))
            top.runs = None if "$" in top.subject else fits and not top.ran
            top.ran = top.ran or bool(top.runs)
            return True
        match = re.match(r"\s*(if|elif|else|fi|then|case|esac|while|until|for|do|done|;;)(?!\w)\s*(.*?)\s*;?\s*$", line)
        if match is None:
            for frame in self._stack:
                if (
                    frame.runs is None
                    and all(one.runs is not False for one in self._stack)
                    and ("--" in line or _ASSIGN.match(line))
                ):
                    self.undecided.setdefault(frame.condition, []).append(line.strip())
            return any(not frame.runs for frame in self._stack)
        word, condition = match[1], match[2]
        if word == "if":
            self._stack.append(self._branch(condition, variables, False))
        elif word == "case":
            subject = expand(condition.removesuffix("in").strip(), variables).strip("\"'")
            self._stack.append(_Frame(False, condition=f"case {condition}", subject=subject))
        elif word in ("while", "until", "for"):
            self._stack.append(_Frame("$#" not in condition))  # no arguments are given
        elif top is not None and word in ("fi", "esac", "done"):
            self._stack.pop()
        elif top is not None and word == ";;":
            top.runs = False
        elif top is not None and word in ("elif", "else"):
            top.ran = top.ran or bool(top.runs)
            if word == "else" and top.runs is not None:
                self._stack[-1] = _Frame(not top.ran, top.ran)
            elif top.runs is not None:
                self._stack[-1] = self._branch(condition, variables, top.ran)
        return True

    def that_matter(self, commands: Iterable[str], uses: Mapping[str, set[str]]) -> dict[str, str]:
        """The undecided conditions whose branches set what the `commands` use, directly or by other variables."""
        used: set[str] = set()
        found = {name for line in commands for name in _NAME.findall(line)}
        while found - used:
            used |= found
            found = {name for variable in used for name in uses.get(variable, ())}
        return {
            condition: " ".join(lines)
            for condition, lines in self.undecided.items()
            if any((match := _ASSIGN.match(line)) is None or match[1] in used for line in lines)
        }

    @staticmethod
    def _branch(condition: str, variables: Mapping[str, str], ran: bool) -> _Frame:
        holds = False if ran else _holds(condition, variables)
        return _Frame(holds, ran, re.sub(r"\s*\.\s*", ".", f"if {condition}") if holds is None else "")


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": eq, "==": eq, "!=": ne, "-eq": eq, "-ne": ne, "-gt": gt, "-lt": lt, "-ge": ge, "-le": le
}  # fmt: skip


def _holds(condition: str, variables: Mapping[str, str]) -> bool | None:
    """Whether a condition of the shell holds; None if that is not known from the variables."""
    for joint, joined in ((r"\|\||-o", any), (r"&&|-a", all)):
        parts = re.split(rf"\s(?:{joint})\s", condition.strip().strip("[]"))
        if len(parts) > 1:
            found = [_holds(part, variables) for part in parts]
            decides = joined is any
            return decides if decides in found else None if None in found else not decides
    words = _split(expand(condition, variables).strip().strip("[]"))
    negated = words[:1] == ["!"]
    words = words[negated:]
    holds: bool | None = None
    if len(words) == 2 and words[0] in ("-z", "-n"):
        is_set = bool(re.sub(r"\$\{?\w+\}?", "", words[1]))  # what the script does not set is empty
        holds = is_set is (words[0] == "-n")
    elif len(words) == 1 and words[0] in ("-z", "-n"):
        holds = words[0] == "-z"
    elif len(words) == 3 and words[1] in _COMPARISONS and "$" not in words[0] + words[2]:
        one, other = words[0], words[2]
        if not words[1].startswith("-"):
            holds = _COMPARISONS[words[1]](one, other)
        elif re.fullmatch(r"-?\d+", one) and re.fullmatch(r"-?\d+", other):
            holds = _COMPARISONS[words[1]](int(one), int(other))
    elif words in (["true"], ["false"]):
        holds = words == ["true"]
    return holds if holds is None else holds is not negated


def _joined(text: str) -> list[str]:
    """Lines, those within double quotes joined."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and lines[-1].count('"') % 2:
            lines[-1] += " " + line
        else:
            lines.append(line)
    return lines


def expand(text: str, variables: Mapping[str, str], own: str = "") -> str:
    """`text` with known variables replaced, defaults ``${A:-1}`` taken, and ``$((...))`` of whole numbers reckoned."""
    for _ in range(8):
        before = text
        text = re.sub(
            r"\$\{(\w+)(?::?-([^{}]*))?(?:\[[@*]\])?\}",
            lambda m: variables.get(m[1], m[2] if m[2] is not None else m[0]),
            text,
        )
        text = re.sub(r"\$([A-Za-z_]\w*|\d)", lambda m: variables.get(m[1], m[0]), text)
        text = re.sub(
            r"\$\(\([^()]*\)\)",
            lambda m: re.sub(r"(?<![\w$])[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), m[0]),
            text,
        )
        text = re.sub(r"\$\(\(([\d\s+*/%-]+)\)\)", lambda m: _reckoned(m[1]) or m[0], text)
        if text == before or len(text) > 100_000:
            break
    return text


def _reckoned(text: str) -> str | None:
    """The value of a sum or product of whole numbers, from left to right within one kind of operator."""
    terms = re.findall(r"\d+|[+*/%-]", text)
    kinds = set(terms[1::2])
    if not terms or not terms[0].isdigit() or (kinds & set("+-") and kinds & set("*/%")):
        return None
    value = int(terms[0])
    for operator, term in zip(terms[1::2], terms[2::2], strict=False):
        if not term.isdigit() or (operator in "/%" and int(term) == 0):
            return None
        number = int(term)
        value = {"+": value + number, "-": value - number, "*": value * number}.get(operator) or (
            value // max(1, number) if operator == "/" else value % max(1, number) if operator == "%" else 0
        )
    return str(value)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()


def pairs(words: Any) -> dict[str, Any]:
    """Arguments by name, with ``_`` for ``-``, from words, or from pairs of a name and a value.

    An option of the launcher has one value: what follows is the program. What the shell redirects, pipes or runs next
    belongs to no option.
    """
    options: dict[str, Any] = {}
    if words and isinstance(words[0], list | tuple):
        for name, value in words:
            options[_name(str(name))] = value
        return options
    name = None
    for word in (part for given in words for part in _parts(str(given))):
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word.partition("=")
            name = _name(name)
            options[name] = value if equals else ""
        elif _SHELL.match(word):
            name = None
        elif name is not None and word != "\\" and ("$" in word or not _ends_launcher(name, options[name], word)):
            options[name] = f"{options[name]} {word}".strip()
    return options


def _parts(word: str) -> list[str]:
    """`word`, or the words of one that has options in quotes, as ``sh -c "python a.py --lr 1"`` does."""
    return _split(word) if re.search(r"\s--[A-Za-z]|^--[A-Za-z][\w-]*\s", word) else [word]


_SHELL = re.compile(r"(\d*|&)>|(<|\||\|\||&|&&|;)$")
_PROGRAM = re.compile(r"(.*/)?(python[\d.]*|torchrun|bash|sh|[\w.-]+\.(py|sh))$")


def _ends_launcher(name: str, value: str, word: str) -> bool:
    """Whether `word` is no part of the value of `name`, but the program that a launcher starts, or an option of it."""
    return name in LAUNCHER.split() and (bool(value) or _PROGRAM.match(word) is not None)


def _name(word: str) -> str:
    return word.lstrip("-").replace("-", "_")
