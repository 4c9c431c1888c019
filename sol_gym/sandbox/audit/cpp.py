"""Reading C++ and CUDA: a tokenizer that knows comments, strings, raw strings and directives, and rules over tokens.

No preprocessor: macros are not expanded, but names joined with ## in a #define are looked at joined.
"""

from __future__ import annotations

import posixpath
import re
from bisect import bisect_right
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import NamedTuple

from ...evaluation import Severity
from . import names, text
from .python import numbers_hold_binary
from .report import Report

_LONG_TABLE = 512
_TOKEN = re.compile(
    r"""
    (?P<directive>(?<![^\n])[ \t]*\#[ \t]*(?P<word>[a-z_]+))
  | \s+
  | (?P<name>(?!(?:u8|[uUL])?R?["'])
        (?:[A-Za-z_$\u0080-\U0010ffff]|\\u[0-9a-fA-F]{4})(?:[\w$\u0080-\U0010ffff]|\\u[0-9a-fA-F]{4})*)
  | (?P<number>\.?\d(?:[eEpP][+-]|'(?=[0-9a-fA-F])|[\w.])*)
  | (?P<comment>//[^\n]*|/\*.*?(?:\*/|\Z))
  | (?P<raw>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?(?:\)(?P=mark)"|\Z))
  | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*(?:"|(?=\n)|\Z))
  | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])+')
  | (?P<other>\#\#|::|->\*?|<<<|>>>|[^\s])
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_HEADER = {
    ".h",
    ".hpp",
    ".hh",
    ".hxx",
    ".cuh",
    ".inl",
    ".inc",
    ".cu",
    ".cpp",
    ".cc",
    ".c",
    ".ipp",
    ".tpp",
    "",
}
_NETWORK_HEADERS = {"sys/socket.h", "netinet/in.h", "arpa/inet.h", "netdb.h", "curl/curl.h"}


class Token(NamedTuple):
    """One token; comments and white space are dropped."""

    kind: str
    """`name`, `number`, `string` (with its value), `char`, `mark` or `directive`."""
    text: str
    line: int


def tokens_of(source: str) -> tuple[list[Token], list[tuple[str, int]]]:
    """Tokens, and comments with their lines.

    Lines that end in a backslash are joined first, as a compiler does, so that no name can hide
    in two halves; tokens keep the line they began on.
    """
    spliced, lines = _spliced(source)
    tokens: list[Token] = []
    comments: list[tuple[str, int]] = []
    for match in _TOKEN.finditer(spliced):
        kind = match.lastgroup
        if kind is None:
            continue
        line, value = lines(match.start()), match.group()
        if kind == "name":
            if "\\u" in value:
                value = re.sub(r"\\u([0-9a-fA-F]{4})", lambda m: chr(int(m[1], 16)), value)
            tokens.append(Token("name", value, line))
        elif kind == "other":
            tokens.append(Token("mark", value, line))
        elif kind == "comment":
            comments.append((value, line))
        elif kind in ("raw", "mark"):
            inner = value[value.index("(") + 1 :]
            tokens.append(Token("string", inner.rsplit(")", 1)[0], line))
        elif kind == "string":
            inner = value[value.index('"') + 1 :].removesuffix('"')
            tokens.append(Token("string", _unescaped(inner), line))
        elif kind in ("directive", "word"):
            tokens.append(Token("directive", match["word"], line))
        else:
            tokens.append(Token(kind, value, line))
    return tokens, comments


def _spliced(source: str) -> tuple[str, Callable[[int], int]]:
    """The text without line continuations, and a function from its offsets to original lines."""
    source = source.replace("\r\n", "\n")
    pieces = re.split(r"\\[ \t]*\n", source) if "\\" in source else [source]
    starts: list[int] = []
    numbers: list[int] = []
    offset, line = 0, 1
    for piece in pieces:
        starts.append(offset)
        numbers.append(line)
        at = piece.find("\n")
        while at != -1:
            line += 1
            starts.append(offset + at + 1)
            numbers.append(line)
            at = piece.find("\n", at + 1)
        offset += len(piece)
        line += 1
    return "".join(pieces), lambda position: numbers[bisect_right(starts, position) - 1]


def _unescaped(value: str) -> str:
    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "xu":
            return chr(int(code[1:], 16)) if len(code) > 1 else code
        if code[0] in "01234567":
            return chr(int(code, 8))
        return _SIMPLE.get(code, code)

    return _ESCAPE.sub(character, value) if "\\" in value else value


def read_cpp(source: str, report: Report) -> list[tuple[str, int]]:
    """Report what the rules find in a C++ or CUDA source; returns its comments with their lines."""
    tokens, comments = tokens_of(source)
    _directives(tokens, source, report)
    _names(tokens, report)
    _strings(tokens, report)
    _tables(tokens, report)
    _definitions(tokens, report)
    _whole(tokens, report)
    return comments


def _directives(tokens: list[Token], source: str, report: Report) -> None:
    for i, token in enumerate(tokens):
        if token.kind != "directive":
            continue
        if token.text in ("include", "include_next", "import", "embed"):
            _included(tokens, i, token, report)
        elif token.text == "pragma":
            words = [t.text for t in tokens[i + 1 : i + 4] if t.line == token.line]
            if "plugin" in words:
                report.add("build-escape", token.line, "a compiler plug-in")
        elif token.text == "define":
            for k in range(i + 1, min(i + 400, len(tokens) - 1)):
                if tokens[k].kind == "directive":
                    break
                if tokens[k].text == "##" and tokens[k - 1].kind == tokens[k + 1].kind == "name":
                    _identifier(tokens[k - 1].text + tokens[k + 1].text, token.line, report)


def _included(tokens: list[Token], i: int, token: Token, report: Report) -> None:
    rest = [t for t in tokens[i + 1 : i + 40] if t.line == token.line]
    if not rest:
        return
    if rest[0].kind == "string":
        path = rest[0].text
    elif rest[0].text == "<":
        path = "".join(t.text for t in rest[1:]).split(">")[0]
    else:
        return  # A macro; what it expands to is a literal somewhere else.
    pure = PurePosixPath(path)
    outside = pure.is_absolute() or posixpath.normpath(
        posixpath.join(posixpath.dirname(report.file), path)
    ).startswith("..")
    if outside or token.text == "embed" or pure.suffix not in _HEADER:
        report.add("build-escape", token.line, f"#{token.text} {path}")
    elif path in _NETWORK_HEADERS:
        report.add("network", token.line, f"#include <{path}>", severity=Severity.SUSPICIOUS)
    elif pure.name.startswith("cupti"):
        report.add("profiler-control", token.line, f"#include <{path}>")
    elif path in ("sys/ptrace.h",):
        report.add("process-memory", token.line, f"#include <{path}>")


def _names(tokens: list[Token], report: Report) -> None:
    for i, token in enumerate(tokens):
        if token.kind != "name":
            continue
        before = tokens[i - 1].text if i else ""
        if before in (".", "->"):
            if token.text == "detach" and _called(tokens, i) and i > 1:
                thread = any(t.text in ("thread", "jthread") for t in tokens)
                if thread and tokens[i - 2].text != ")":
                    report.add("unjoined-work", token.line, ".detach()")
            continue
        if token.text in names.CALLED_ONLY:
            own = (
                before == "::"
                and i > 1
                and tokens[i - 2].kind == "name"
                and tokens[i - 2].text != "std"
            )
            declared = (
                i > 0 and tokens[i - 1].kind == "name" and before not in ("return", "else", "do")
            )
            if own or declared or not _called(tokens, i):
                continue
        _identifier(token.text, token.line, report)


def _called(tokens: list[Token], i: int) -> bool:
    return i + 1 < len(tokens) and tokens[i + 1].text == "("


def _identifier(name: str, line: int, report: Report) -> None:
    rule = names.CPP_NAMES.get(name)
    if rule is None and name.startswith(("cupti", "nvmlDeviceSet")):
        rule = "profiler-control" if name.startswith("cupti") else "clock-control"
    if rule:
        report.add(rule, line, name)


def _strings(tokens: list[Token], report: Report) -> None:
    i = 0
    while i < len(tokens):
        if tokens[i].kind != "string":
            i += 1
            continue
        first, parts = tokens[i], []
        in_asm = any(t.text in ("asm", "__asm__", "__asm") for t in tokens[max(0, i - 4) : i])
        run = any(
            t.text in ("system", "popen", "execl", "execlp") for t in tokens[max(0, i - 3) : i]
        )
        while i < len(tokens) and tokens[i].kind == "string":  # Adjacent literals are one.
            parts.append(tokens[i].text)
            i += 1
        value = "".join(parts)
        if kind := text.embedded(value) or text.embedded(value.encode("latin1", "replace")):
            report.add("embedded-binary", first.line, kind)
        elif text.looks_encoded(value):
            report.add("encoded-literal", first.line, f"{len(value)} characters")
        if found := text.place(value):
            report.add(found[0], first.line, found[1], severity=found[2])
        if run and (unwanted := text.command(value)):
            report.add(unwanted[0], first.line, unwanted[1])
        if in_asm:
            _assembly(value, first.line, report)


def _assembly(value: str, line: int, report: Report) -> None:
    if ".incbin" in value or ".include" in value:
        report.add("build-escape", line, ".incbin in assembly")
    elif re.search(r"\bsyscall\b|\bsysenter\b|\bint\s+\$0x80\b|\bsvc\s", value):
        report.add("raw-syscall", line, "a system call in assembly")


def _tables(tokens: list[Token], report: Report) -> None:
    i = 0
    while i < len(tokens):
        if tokens[i].text != "{":
            i += 1
            continue
        numbers: list[int] = []
        k = i + 1
        while k < len(tokens) and (
            tokens[k].kind in ("number", "char") or tokens[k].text in (",", "-", "+")
        ):
            value = _number(tokens[k])
            if value is not None:
                numbers.append(value)
            k += 1
        if len(numbers) >= 4 and k > i + 8:
            if kind := numbers_hold_binary(numbers):
                report.add("embedded-binary", tokens[i].line, kind)
            elif len(numbers) >= _LONG_TABLE:
                report.add("long-table", tokens[i].line, f"{len(numbers)} values")
        i = max(k, i + 1)


def _number(token: Token) -> int | None:
    if token.kind == "char":
        inner = _unescaped(token.text.split("'", 1)[1][:-1])
        return ord(inner) if len(inner) == 1 else None
    if token.kind != "number":
        return None
    digits = token.text.replace("'", "").rstrip("uUlLzZ")
    try:
        return int(digits, 8) if re.fullmatch(r"0[0-7]+", digits) else int(digits, 0)
    except ValueError:
        return None


def _definitions(tokens: list[Token], report: Report) -> None:
    """Functions of the runtime that are defined again: name ( ... ) { at file level."""
    depth = 0
    namespaces: list[bool] = []
    for i, token in enumerate(tokens):
        if token.text == "{":
            head = tokens[max(0, i - 4) : i]
            transparent = bool(head) and (
                any(t.text == "namespace" for t in head) or (len(head) > 1 and head[-1].kind == "string" and head[-2].text == "extern")
            )  # fmt: skip
            namespaces.append(transparent)
            depth += not transparent
        elif token.text == "}" and namespaces:
            depth -= not namespaces.pop()
        elif (
            depth == 0
            and token.kind == "name"
            and token.text in names.INTERPOSED
            and _called(tokens, i)
            and i
            and (tokens[i - 1].kind == "name" or tokens[i - 1].text in ("*", ")"))
            and _has_body(tokens, i + 1)
        ):
            report.add("interpose-runtime", token.line, token.text)
    for i, token in enumerate(tokens):
        if token.text == "constructor" and i > 1 and tokens[i - 1].text == "(":
            report.add("constructor", token.line, "__attribute__((constructor))")
        elif token.text in ("init_priority", "ifunc") and i > 1 and tokens[i - 1].text == "(":
            report.add("constructor", token.line, token.text)
        elif token.text == "__device__" and _is_variable(tokens, i):
            report.add("device-state", token.line)


def _has_body(tokens: list[Token], i: int) -> bool:
    depth = 0
    for token in tokens[i : i + 200]:
        if token.text == "(":
            depth += 1
        elif token.text == ")":
            depth -= 1
        elif depth == 0:
            return token.text == "{" or token.text in ("noexcept", "try", "throw")
    return False


def _is_variable(tokens: list[Token], i: int) -> bool:
    for token in tokens[i + 1 : i + 16]:
        if token.text in ("(", "constexpr", "const", "__forceinline__", "inline", "template"):
            return False
        if token.text in (";", "=", "[", "{"):
            return True
    return False


def _whole(tokens: list[Token], report: Report) -> None:
    words = {t.text for t in tokens if t.kind == "name"}
    line = {t.text: t.line for t in reversed(tokens) if t.kind == "name"}
    writable = words & {"mprotect", "pkey_mprotect"}
    located = words & {
        "dlsym", "dl_iterate_phdr", "link_map", "dladdr", "RTLD_NEXT", "PROT_EXEC", "Elf64_Sym", "Elf64_Rela",
        "cudaEventElapsedTime", "cudaEventRecord", "__builtin___clear_cache",
    }  # fmt: skip
    if writable and located:
        name = next(iter(writable))
        report.add("code-patch", line[name], f"{name} with {', '.join(sorted(located))}")
    starts = words & {"thread", "jthread", "pthread_create", "async"}
    if "pthread_create" in words and not words & {"pthread_join"}:
        report.add("unjoined-work", line["pthread_create"], "pthread_create without pthread_join")
    elif "thread" in starts and not words & {"join", "jthread"} and "std" in words:
        report.add("unjoined-work", line["thread"], "std::thread without join")
    if words & {"cudaStreamCreate", "cudaStreamCreateWithFlags", "cudaStreamCreateWithPriority"} and not (
        words & {"cudaStreamWaitEvent", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"}
    ):  # fmt: skip
        name = next(iter(words & {"cudaStreamCreate", "cudaStreamCreateWithFlags", "cudaStreamCreateWithPriority"}))  # fmt: skip
        report.add("unjoined-work", line[name], "a stream that nothing waits for")
