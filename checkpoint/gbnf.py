"""Reads grammars in GBNF, the notation of llama.cpp and of vLLM's `guided_grammar`, as llguidance's Lark.

llguidance's converter does most of it. Some texts it would change in meaning, or convert to Lark that llguidance cannot
read: these are spelt differently first.
"""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

# Lark's rules have a single colon.
_RULE = re.compile(r"^[ \t]*([\w-]+)\s*::=", re.MULTILINE)
# An unclosed text or class goes on to the end: otherwise each of many would be looked for there in turn.
_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*+(?:"|\\?\Z)|\[(?:\\.|[^]\\])*+(?:]|\\?\Z)|#[^\n]*|[\w-]+|\.|[*+?}]\s*\)', re.DOTALL
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([][])|.)|[\x00-\x1f\x7f]", re.DOTALL)
_CHAR = re.compile(r"\\x[0-9a-fA-F]{2}|\\.|.", re.DOTALL)
_MEMBER = re.compile(rf"(?P<first>{_CHAR.pattern})(?:-(?P<last>{_CHAR.pattern}))?", re.DOTALL)
# Characters of a class that would be operators between classes if they came twice.
_OPERATORS = {"&": r"\x26", "-": r"\x2d", "~": r"\x7e"}
_ANY_CHAR = "[\\x00-\U0010ffff]"
# A name that the converter keeps, or changes the letters' case of.
_PLAIN_NAME = re.compile(r"[-_]?[a-z][\w-]*", re.ASCII | re.IGNORECASE)
# A rule that is nothing but a run of characters of a class, such as `ws ::= [ \t\n]*`.
_RUN = re.compile(
    r"^(?P<name>[ \t]*[\w-]+)[ \t]*::=[ \t]*(?P<class>\[(?:\\[^\n]|[^]\\\n])*+])(?P<times>[*+])[ \t]*(?=#|$)",
    re.MULTILINE,
)
_BLANKS = {" ": " ", r"\t": "\t", r"\n": "\n", r"\r": "\r", r"\x20": " ", r"\x09": "\t", r"\x0a": "\n", r"\x0d": "\r"}


def lark_of(source: str) -> str:
    """Convert GBNF to Lark; return Lark unchanged. Raises ValueError."""
    if not _RULE.search(source):
        return source
    names = _converted_names(_RULE.findall(source))
    try:
        spelt = _TOKEN.sub(lambda token: _for_converter(token[0], names), source)
        return gbnf_to_lark(_with_patient_blanks(spelt))
    except Exception as error:  # the converter raises bare Exception for missing rules
        raise ValueError(f"read as GBNF, because its rules have `::=`: {error}") from error


def _converted_names(names: list[str]) -> dict[str, str]:
    """New names for rules that Lark does not accept, or that the converter would merge: it does not tell `aB`, `a-b`
    and `a_b` apart, ignores case, and renames `root` to `start`.
    """
    others: dict[str, str] = {}
    taken = {"start"}
    for name in dict.fromkeys(names):
        key = re.sub("[-_]", "", name).lower()
        if name != "root" and (key in taken or not _PLAIN_NAME.fullmatch(name)):
            others[name] = f"gbnf_{len(others)}_of_{re.sub('[^a-z0-9]', '', key)}"
        taken.add(key)
    return others


def _with_patient_blanks(source: str) -> str:
    """The converter makes terminals of rules, and a terminal takes as much text as it can: a line break behind
    `ws ::= [ \\t\\n]*` would never be a `"\\n"` of the rule that follows. So where a text begins with such a blank, the
    rule recurs, which makes it no terminal, and its end is where the grammar fits.
    """
    texts = (token[0] for token in _TOKEN.finditer(source) if token[0].startswith('"'))
    firsts = {_BLANKS.get(_CHAR.findall(text[1:])[0].lower(), "") for text in texts if len(text) > 1} - {""}

    def recurring(rule: re.Match[str]) -> str:
        if not firsts & _blanks_of(rule["class"]):
            return rule[0]
        name = rule["name"].strip()
        again = f"({rule['class']} {name})?" if rule["times"] == "*" else f"{rule['class']} {name}?"
        return f"{rule['name']} ::= {again}"

    return _RUN.sub(recurring, source)


def _blanks_of(char_class: str) -> set[str]:
    """The blanks that are members by name; those of ranges and of negated classes are not looked for."""
    members = _CHAR.findall(char_class[1:-1])
    return set() if members[:1] == ["^"] else {_BLANKS[one.lower()] for one in members if one.lower() in _BLANKS}


def _for_converter(token: str, names: dict[str, str]) -> str:
    if token[0] == '"':
        return _ESCAPE.sub(_escape_for_converter, token)
    if token[0] == "[":
        return _class_for_converter(_ESCAPE.sub(_escape_for_converter, token))
    if token == ".":  # in Lark all but a line break
        return _ANY_CHAR
    if token[-1] == ")":  # the converter drops brackets around nothing but a repetition, and Lark repeats none of those
        return f'{token[0]} "")'
    return names.get(token, token)


def _escape_for_converter(escape: re.Match[str]) -> str:
    """The character itself for \\u and \\U, because the converter drops their leading zeros. \\x for ASCII, for
    brackets, which the converter leaves escaped in texts, and for control characters, which Lark does not read.
    """
    digits, bracket = escape[1] or escape[2], escape[3]
    if digits:
        char = chr(int(digits, 16))
    elif bracket or len(escape[0]) == 1:
        char = bracket or escape[0]
    else:
        return escape[0]
    if "\ud800" <= char <= "\udfff":
        raise ValueError(f"{escape[0]} is half of a character")
    return rf"\x{ord(char):02x}" if char.isascii() else char


def _class_for_converter(char_class: str) -> str:
    """The class with escapes for its members `&`, `-` and `~`: `&&`, `--` and `~~` are operators in Lark's classes."""
    if not char_class.endswith("]"):  # the converter refuses it
        return char_class
    start = 2 if char_class.startswith("[^") else 1
    return char_class[:start] + _MEMBER.sub(_member_for_converter, char_class[start:-1]) + "]"


def _member_for_converter(member: re.Match[str]) -> str:
    first, last = (_OPERATORS.get(char or "", char) for char in (member["first"], member["last"]))
    return f"{first}-{last}" if last else f"{first}"
