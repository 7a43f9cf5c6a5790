"""The commands of a shell script with the variables that it sets put in, as bash expands them (Bash Reference
Manual, 3.5); nothing is run."""

import contextlib
import re
from collections.abc import Iterator

_BRACES = r"\$\{(?:[^{}]|\{[^{}]*\})*\}"
_ANSWER = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
_QUOTED = r"""'[^']*'|"(?:\\[\s\S]|[^"\\])*\""""
_PIECES = re.compile(
    rf"""(?x) (?P<blank> \\\r?\n | [ \t\r]+ | (?<![^\s;()])\#[^\n]* | [\d&]?>[>&]?\s*[^\s;&|()<>]* )
    | (?P<end> \n | ;;? | (?: && | \|\| )\s* | [|&()] )
    | (?P<word> (?: {_QUOTED} | {_ANSWER} | {_BRACES} | \\. | <[A-Za-z][\w .-]*> | [^\s'"\\$`;&|<>()] | \$
                  | (?<==)\((?: (?<=\s)\#[^\n]* | {_QUOTED} | {_ANSWER} | [^()'"] )*+\) )+ )
    | (?P<rest> ['"`] )"""
)
_PARTS = re.compile(rf"{_QUOTED}|(?:\\.|{_BRACES}|{_ANSWER}|[^'\"])+")
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*['\"]?(\w+)['\"]?([^\n]*)\n[\s\S]*?\n[ \t]*\1(?=\s|$)")
_VARIABLE = re.compile(
    rf"""(?x) \\(?P<escaped>[\s\S]) | (?P<answer>{_ANSWER}) | \$(?P<plain>\w+|[\#@*])
    | \$\{{(?P<name>\w+)(?: \[[@*]\] | :?(?P<sign>[-=+]) (?P<other>(?: [^{{}}] | \{{[^{{}}]*\}} )*) )?\}}"""
)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=([\s\S]*)")
_IF_EMPTY = re.compile(
    r"""if\s+\[+\s+(?:-z\s+"?\$\{?(\w+)\}?"?|"?\$\{?(\w+)\}?"?\s+==?\s+"")\s+\]+[;\s]+then\s+"""
    r"(?:export\s+)?(?:\1|\2)=(\S+)\s+fi\b"
)
_SUM = re.compile(r"\$\(\(([\s\S]*)\)\)|(?:\$\(|`)\s*expr\s+([\s\S]*?)[)`]")
_DEPTH = {"if": 1, "case": 1, "fi": -1, "esac": -1}
_SKIPPED = {
    *"then elif else for while until do done { } ! time export local declare readonly".split(),
    *"env eval exec command -a -A -g -i -r -x".split(),  # and options of declare
}
# variables that programs read themselves: launchers, accelerate, MaxText (M_ and a key of its configuration)
_LAUNCHED = (
    r"(NNODES|NPROC_PER_NODE|NGPU)=\d+|((ACCELERATE|FSDP|PARALLELISM_CONFIG)_\w+|M_[A-Z]\w*)=\S+"
)
_PASTED = {
    r"(?<!\S)[\u2013\u2014](?=[a-z])": "--",
    r"(?m)^[ \t]*```[ \t]*\w*[ \t]*$": "",
    r"\\[ \t]+(?=\r?\n)": r"\\",
    r"(?m)^([^#\n]*[^#\s\\])[ \t\r]*\n(?=[ \t]*--[A-Za-z])": r"\1 \\\n",
    r"(?m)^[ \t]*(?:\([\w.-]+\)[ \t]*)?(?:[$%+]|>(?=[ \t]+(?:-|\w+=))|\w+@[\w.-]+:\S*[$#])[ \t]+": "",
}
"""What pages add to a line, or take away: fences, blanks behind a backslash, the backslash before a line of
flags, prompts (bash -x's, too), dashes for two hyphens."""
_SBATCH = re.compile(
    r"(?m)^#SBATCH[ \t]+((?:--(?:nodes|ntasks-per-node|gpus-per-node|gres)\b|-N)[^#\n]*?)[ \t\r]*$"
)
_SLURM = {
    r"(?:--nodes[= ]|-N ?)(\d+)": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    r"(?:--gpus-per-node|--gres)[= ](?:gpu:)?(?:\w+:)?(\d+)": (
        "SLURM_GPUS_ON_NODE",
        "SLURM_GPUS_PER_NODE",
    ),
}
"""What sbatch reads of a script's first lines, and what it sets by that: srun takes its options, too."""
_BLANKS = str.maketrans(" \n\t\1\2\3", "\1\2\3 \n\t")  # there and back
_SCRIPT = re.compile(r"\s(--?[A-Za-z]|\S+\.py\s|[a-z][\w.]*=)")


def script_commands(text: str) -> list[list[str]]:
    """Return the words of each command of a script, with its variables put in, and behind them the words of
    variables that no command uses. A variable that nothing sets has its default in ${X:-default} and stays
    $X elsewhere, and so does one that is set on a condition: none is decided. Raises ValueError for a
    quotation without an end."""
    script, options = _Script(), " ".join(_SBATCH.findall(text))
    for pattern, names in _SLURM.items():
        for value in re.findall(pattern, options)[-1:]:
            script.values |= dict.fromkeys(names, value)
    for pasted, typed in _PASTED.items():
        text = re.sub(pasted, typed, text)
    script.read(re.sub(_IF_EMPTY, lambda x: f"{x[1] or x[2]}=${{{x[1] or x[2]}:-{x[3]}}}", text))
    rest = {x: y for x, y in script.values.items() if x not in script.used}
    words = [x for y in rest.values() if re.match(r"\s*--?[A-Za-z]", y) for x in y.split()]
    own = [x for x in map("=".join, script.values.items()) if re.fullmatch(_LAUNCHED, x)]
    of_srun = lambda words: options.split() if "srun" in words else []
    run = [[*own, *of_srun(words), *words] for words in script.run]
    return [*run, words + [f"{x}={y}" for x, y in rest.items() if x.islower()]]


class _Script:
    """A script as far as it was read: values of variables, those that were used, commands."""

    def __init__(self) -> None:
        self.values, self.used = dict[str, str](), set[str]()
        self.run, self.depth = list[list[str]](), 0

    def read(self, text: str) -> None:
        """Follow the commands of a text."""
        for joint, words in _commands(text):
            while words and words[0] in {*_DEPTH, *_SKIPPED}:
                self.depth += _DEPTH.get(words.pop(0), 0)
            if all(map(_ASSIGNED.fullmatch, words)):
                for word in words:
                    self.assign(word, self.depth > 0 or joint.startswith(("&&", "||")))
            else:
                self.run.append([x for word in words for x in self.fields(word)])
                for script in filter(_SCRIPT.search, self.run[-1] if words[1:] else []):
                    self.read(re.sub(r"^--?[\w-]+=", "", script))

    def assign(self, word: str, is_conditional: bool) -> None:
        """Set a variable; one that is set on a condition is left as $NAME, behind flags it has had."""
        name, more, text = re.findall(_ASSIGNED, word)[0]
        old, is_array = self.values.get(name, ""), text.startswith("(")
        inner = (
            sum((words for _, words in _commands(text[1:-1])), list[str]()) if is_array else [text]
        )
        value = (old + " " * is_array) * bool(more) + " ".join(
            y for x in inner for y in self.fields(x)
        )
        kept = f"{old} " if re.match(r"\s*-", old) and value.startswith(old) else ""
        self.values[name] = f"{kept}${name}" if is_conditional and value != old else value

    def fields(self, word: str) -> list[str]:
        """Return the words that one becomes, with variables put in: cut at blanks of what is not quoted."""
        whole = ""
        for part in _PARTS.findall(word):
            text = part[1:-1] if part[0] in "'\"" else part
            put = text if part[0] == "'" else re.sub(_VARIABLE, self.put, text)
            is_cut = part == text or re.fullmatch(r"\$\{\w+\[@\]\}", text)
            whole += put if is_cut else put.translate(_BLANKS)
        return [""] * (word in ("''", '""')) + [x.translate(_BLANKS) for x in whole.split()]

    def put(self, one: re.Match[str]) -> str:
        """Return what stands for a variable or an escaped character. A command's answer is unknown, but for
        a sum's."""
        if one["escaped"] or one["answer"]:
            return (one["escaped"] or self.result(one[0])).strip("\n")
        name = one["name"] or one["plain"]
        other = " ".join(self.fields(one["other"] or ""))
        self.used.add(name)
        value = {"#": "0", "@": "", "*": ""}.get(name, self.values.get(name))
        if one["sign"] == "=" and not value:
            self.values[name] = other
        if not value or re.fullmatch(r"\$\d", value):  # an argument of the script is none
            return (
                one[0] if value is None and not one["sign"] else other * (one["sign"] in ("-", "="))
            )
        return other if one["sign"] == "+" else value

    def result(self, answer: str) -> str:
        """Return what a sum of whole numbers comes to, $((8 * N)) or $(expr 8 / $N); another command's
        answer is its own text."""
        if sum_of := _SUM.fullmatch(answer):
            # a sum names variables without a $, too
            written = re.sub(r"(?<![\w${])(?=[A-Za-z_])", "$", sum_of[1] or sum_of[2])
            terms = re.sub(_VARIABLE, self.put, written)
            # ast knows no sums; what is evaluated has digits and + - * / % ( ) alone, and no powers
            if re.fullmatch(r"(?:[\d\s()+/%-]|\*(?!\s*\*))+", terms):
                with contextlib.suppress(
                    SyntaxError, ArithmeticError, TypeError, RecursionError, MemoryError
                ):
                    return str(eval(terms.replace("/", "//")))
        return re.sub(r"\s", "", answer)


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield what joins a command to the one before it, and its words as written. After variables alone that
    are set for sure, && is no condition."""
    joint, words = "", list[str]()
    for one in re.finditer(_PIECES, re.sub(_HERE_DOCUMENT, r"\2\n", text) + "\n"):
        if one.lastgroup == "rest":
            raise ValueError("a quotation mark is not closed")
        if one.lastgroup == "word":
            words.append(one[0])
        elif one.lastgroup == "end":
            yield joint, words
            is_sure = not joint.startswith(("&&", "||")) and all(
                x in _SKIPPED or _ASSIGNED.fullmatch(x) for x in words
            )
            joint, words = "" if is_sure and one[0].startswith("&&") else one[0], []
