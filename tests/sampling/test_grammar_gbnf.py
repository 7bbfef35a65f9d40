"""GBNF against llama.cpp's own grammar sampler: the same tokens may come next, wherever a text has come to.

Where we mean to differ:

- Control tokens are no text here. For llama.cpp `<s>` is three characters.
- Answers are UTF-8 here. llama.cpp lets bytes through that begin no character (F5, or C0).
- Half a character is allowed here wherever a whole one may come of it. llama.cpp refuses it in a [^...] when
  one that is excluded may come of it as well.
- Left recursion works here. What can match nothing is an error: [], [z-a], a rule that is not there.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from hetrun.client.sampling_params import Structure
from hetrun.errors import OptionError
from hetrun.sampling.grammar.token_mask import Grammars
from hetrun.sampling.interface import Constraint
from tests.support.limits import Within
from tests.support.peer import llama_cpp
from tests.support.tiers import exhaustive, first
from tests.support.vocabularies import BYTE, BYTES, CONTROL, NORMAL, UNKNOWN, written

# Tokens that span what grammars have apart.
PARTS = r"""a b ab aa aaa bb abc true fal se nul null {" ": ", "} ], [[ ]] 12 00 0. .5 e+1 -1 -- ++ == \" \n
\u 00e9 é ée 你 你好 ぁ ァ一 🙂 if( for( int while( return x= ); */ /* // 1. O-O Nf3 exd5 =Q""".split()
SPACED = ["\n", "\n\n", " ", "  ", "\n ", ' "', ': "', ', "', "a b", "- ", "- a\n", "\t", "1\n", "é\n"]


class Vocabulary:
    """llama.cpp's view of a file."""

    def __init__(self, path: Path) -> None:
        self.lib: Any = llama_cpp()
        params = self.lib.llama_model_default_params()
        params.vocab_only = True
        self._model = self.lib.llama_model_load_from_file(str(path).encode(), params)
        self.vocab = self.lib.llama_model_get_vocab(self._model)
        tokens = range(self.lib.llama_vocab_n_tokens(self.vocab))
        self.pieces = [self._piece(t) for t in tokens]
        self.control = {t for t in tokens if self.lib.llama_vocab_is_control(self.vocab, t)}
        self.ends = {t for t in tokens if self.lib.llama_vocab_is_eog(self.vocab, t)}

    def takes(self, text: str) -> bool:
        """Whether llama.cpp takes this grammar."""
        sampler = self.lib.llama_sampler_init_grammar(self.vocab, text.encode(), b"root")
        if sampler:
            self.lib.llama_sampler_free(sampler)
        return bool(sampler)

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        n: int = self.lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:n]

    def close(self) -> None:
        self.lib.llama_model_free(self._model)


class Both:
    """One grammar, twice."""

    def __init__(self, vocabulary: Vocabulary, ours: Constraint, text: str) -> None:
        self.ours = ours
        self._lib = vocabulary.lib
        self._sampler = self._lib.llama_sampler_init_grammar(vocabulary.vocab, text.encode(), b"root")
        assert self._sampler, "llama.cpp does not take this grammar"
        self._data = (self._lib.llama_token_data * len(vocabulary.pieces))()

    def theirs(self) -> set[int]:
        for token, data in enumerate(self._data):
            data.id, data.logit, data.p = token, 0.0, 0.0
        row = self._lib.llama_token_data_array(self._data, len(self._data), -1, False)
        self._lib.llama_sampler_apply(self._sampler, ctypes.byref(row))
        return {data.id for data in self._data if data.logit == 0.0}

    def accept(self, token: int) -> None:
        self._lib.llama_sampler_accept(self._sampler, token)
        self.ours.accept(token)

    def close(self) -> None:
        self._lib.llama_sampler_free(self._sampler)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *dict.fromkeys([*PARTS, *SPACED])]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": [0.0] * len(tokens)}
    path: Path = written(tmp_path_factory.mktemp("vocabulary") / "tiny.gguf", keys)
    vocabulary = Vocabulary(path)
    yield vocabulary
    vocabulary.close()


def meant(vocabulary: Vocabulary, said: bytes, token: int, allowed: bool) -> bool:
    """Whether it is right that only we allow a token, or only llama.cpp does."""
    text = said + vocabulary.pieces[token]
    if allowed:  # half a character that may become one of a [^...] as well as one that is not
        return text.decode(errors="replace").endswith("\ufffd")
    return token in vocabulary.control or not begins_text(text)  # control tokens are text to it


# The beginning of a character, in no more bytes than it needs: no surrogate, and none beyond the last.
HALF = re.compile(
    rb"(?:[\xc2-\xdf]|\xe0[\xa0-\xbf]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|\xed[\x80-\x9f]?"
    rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3][\x80-\xbf]{0,2}|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?)\Z"
)


def begins_text(raw: bytes) -> bool:
    try:
        HALF.sub(b"", raw).decode()
    except UnicodeDecodeError:
        return False
    return True


def walk(vocabulary: Vocabulary, constraint: Constraint, text: str, seed: int, most: int = 40) -> None:
    both, random, said = Both(vocabulary, constraint, text), Random(seed), b""
    try:
        for _ in range(most):
            ours = set(map(int, np.flatnonzero(both.ours.allowed())))
            theirs = both.theirs()
            for token in ours ^ theirs:
                who, piece = "we" if token in ours else "they", vocabulary.pieces[token]
                assert meant(vocabulary, said, token, token in ours), (
                    f"behind {said!r} only {who} allow {piece!r}"
                )
            going_on = sorted(ours - vocabulary.ends)
            if not going_on:
                break
            token = random.choice(going_on)
            said += vocabulary.pieces[token]
            both.accept(token)
    finally:
        both.close()


def constraint_of(vocabulary: Vocabulary, text: str) -> Constraint:
    grammars = Grammars(vocabulary.pieces, vocabulary.control, vocabulary.ends)
    return grammars.constraint(Structure("grammar", text))


def check(vocabulary: Vocabulary, text: str, walks: int) -> None:
    grammars = Grammars(vocabulary.pieces, vocabulary.control, vocabulary.ends)
    for seed in range(walks):
        walk(vocabulary, grammars.constraint(Structure("grammar", text)), text, seed)


def random_grammar(random: Random) -> str:
    """Rules of few letters, so that everything may be read in many ways."""
    names = ["root", "x", "y", "z"][: random.randint(1, 4)]

    def item(depth: int) -> str:
        kind = random.randrange(7 if depth < 2 else 5)
        if kind < 2:
            return '"' + "".join(random.choice("ab") for _ in range(random.randint(1, 3))) + '"'
        if kind == 2:
            return random.choice(["[ab]", "[^b]", "[a-c]", "[a]", "."])
        if kind == 3 and len(names) > 1:
            return random.choice(names[1:])
        if kind < 5:
            return random.choice(['"a"', '"b"', '"c"'])
        return f"({options(depth + 1)})"

    def sequence(depth: int) -> str:
        signs = ["", "", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"]
        return " ".join(item(depth) + random.choice(signs) for _ in range(random.randint(1, 3)))

    def options(depth: int) -> str:
        return " | ".join(sequence(depth) for _ in range(random.randint(1, 2)))

    return "\n".join(f"{name} ::= {options(0)}" for name in names)


JSON = r"""root  ::= value
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws  # a text
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
LANGUAGE = r"""root ::= (kind name "(" (kind name)? ")" "{" statement* "}")*
kind ::= ("int" | "char") ws
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
statement ::= kind name ws "=" ws sum ";" | "return" ws sum ";" | "if(" sum "){" statement* "}" | comment
sum ::= factor (("+" | "-") factor)*
factor ::= name | [0-9]+ | "-" factor | name "(" sum? ")" | "(" ws sum ws ")"
comment ::= "/*" ([^*] | "*" [^/])* "*/"
ws ::= [ \t\n]+
"""
MOVES = r"""root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])? | [NBKQR] [a-h]? "x"? [a-h] [1-8] | "O-O" "-O"?) [+#]?
"""

GRAMMARS = {
    "one text": 'root ::= "abc"',
    "nothing or something": 'root ::= "" | "a"',
    "a comment at the end": 'root ::= "a" # and nothing else',
    "lines in a group": 'root ::= (\n  "a"  # first\n  | "b"\n)+ "c"\n\n\n',
    "windows lines": 'root ::= x "b"\r\nx ::= "a"*\r\n',
    "repetitions": 'root ::= "a"{2} "b"{1,3} "c"{2,} "a"{0} ("b" "c"?){0,2} "1"*',
    "a text repeated as a whole": 'root ::= "ab"{2,3} "abc"*',
    "escapes": r'root ::= "\"\\\n\t\r\x41" [\]\[\-\\"] "\u00e9\U0001F642" [\u4f60-\u597d]',
    "negation": r'root ::= [^a-c\n"] [^ab]+ [a^b-]',
    "any character": 'root ::= . "b" .{1,2} "a"',
    "wide ranges": r"root ::= [あ-ん]+ | [\U0001F600-\U0001F64F]{2,3} | [^\x01-\u5000]",
    "a dash at the end of a class": "root ::= [a-] [b-] [+*-/]",
    "greedy repetition": 'root ::= [a-z]* "z" "1"',
    "two ways to begin": 'root ::= "abc" "1" | [a-c]+ "2" | x\nx ::= "ab" x | "a"',
    "right recursion": 'root ::= "a" root "b" | "c"',
    "recursion in the middle": 'root ::= "[" (root ("," root)*)? "]" | [0-9]+',
    "mutual recursion": 'root ::= "a" x | "b"\nx ::= "b" y | "a"\ny ::= "(" root ")" x?',
    "arithmetic": ARITHMETIC,
    "a language": LANGUAGE,
    "moves": MOVES,
    "a list": r"root ::= item+" + "\n" + r'item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"',
    "json": JSON,
    "names of rules": 'root ::= Fo-o-1 | x2y\nFo-o-1 ::= "a"\nx2y ::= "b"\nunused ::= other\nother ::= "c"',
    "the last of two rules": 'root ::= x\nx ::= "a"\nx ::= "b"',
}


@pytest.mark.parametrize("walks", first([3, 6]))
@pytest.mark.parametrize("name", GRAMMARS)
def test_the_same_tokens_may_come_next(vocabulary: Vocabulary, name: str, walks: int) -> None:
    check(vocabulary, GRAMMARS[name], walks)


# llama.cpp follows very many readings of some grammars, which takes minutes.
ENDLESS_THERE = (109, 232)


@pytest.mark.parametrize(
    "seeds",
    [range(20), pytest.param(range(20, 250), marks=(pytest.mark.slow, exhaustive))],
    ids=["some", "more"],
)
def test_random_grammars_allow_the_same(vocabulary: Vocabulary, seeds: range) -> None:
    texts = [random_grammar(Random(seed)) for seed in seeds if seed not in ENDLESS_THERE]
    taken = [text for text in texts if vocabulary.takes(text)]  # not those with left recursion
    assert len(taken) > len(texts) // 2
    for text in taken:
        check(vocabulary, text, 2)


def test_a_whole_text_is_taken_character_by_character(vocabulary: Vocabulary) -> None:
    """Greedy lexemes would lose this reading: the last z is not one of the letters."""
    constraint = constraint_of(vocabulary, GRAMMARS["greedy repetition"])
    for byte in b"azzz1":
        token = vocabulary.pieces.index(bytes([byte]))
        assert constraint.allowed()[token]
        constraint.accept(token)
    assert constraint.finished


def test_left_recursion(vocabulary: Vocabulary) -> None:
    text = 'root ::= root "+" n | n\nn ::= [0-9]'
    assert not vocabulary.takes(text)
    constraint = constraint_of(vocabulary, text)
    for byte in b"1+2+3":
        token = vocabulary.pieces.index(bytes([byte]))
        assert constraint.allowed()[token]
        constraint.accept(token)
    assert constraint.allowed()[sorted(vocabulary.ends)].all()


def test_tokens_may_be_named(vocabulary: Vocabulary) -> None:
    n = len(vocabulary.pieces)
    one = vocabulary.pieces.index(b"1")
    for text, expected in {
        "root ::= <s>": {1},
        f"root ::= <[{one}]>": {one},
        "root ::= <[1]> | <[2]>": {1, 2},
        "root ::= !<[1]>": set(range(n)) - {1},
    }.items():
        assert set(map(int, np.flatnonzero(constraint_of(vocabulary, text).allowed()))) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('x ::= "a"', "there is no rule root"),
        ("root ::= x", "line 1, column 10: there is no rule x"),
        ('root ::= "a', "line 1, column 10: this text is not closed"),
        ("root ::= [a", "line 1, column 10: this class is not closed"),
        ('root ::= ("a"', "line 1, column 10: this group is not closed"),
        ('root ::= "a")', "line 1, column 13: the rule should end here"),
        ("root ::= []", "line 1, column 10: this class contains no characters"),
        ("root ::= [z-a]", "the range before this goes from a character to an earlier one"),
        (r'root ::= "\q"', r"line 1, column 11: there is no escape \q"),
        (r'root ::= "\x4"', "2 hexadecimal digits should follow"),
        (r'root ::= "\U00110000"', "00110000 is not a character"),
        (r'root ::= "\ud800"', "is not a character"),
        ('root ::= "a"\n  | "b"', "line 2, column 3: expected the name of a rule here"),
        ("root ::= *", "line 1, column 10: there is nothing before it to repeat"),
        ('root ::= "a"{3,2}', "line 1, column 13: the end of a repetition must not be less than its start"),
        ('root ::= "a"{1000000}', "more than 100000"),
        ('root ::= "a"{x}', "line 1, column 14: expected a number here"),
        ("root ::= <absent>", "line 1, column 10: the model has no token <absent>"),
        ("root = x\nroot ::= y", "line 1, column 6: expected ::= here"),
        ("root ::= " + "(" * 1000, "groups are nested deeper than 50 levels"),
        ("root ::= root", "no text can satisfy it"),
        ('root ::= "\ud800"', "character 11 is half of a surrogate pair"),
    ],
)
def test_a_mistake_has_a_place(vocabulary: Vocabulary, text: str, sentence: str) -> None:
    with pytest.raises(OptionError, match=r"^grammar") as caught:
        constraint_of(vocabulary, text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


# Each would be of astronomical size if it were written out.
ENDLESS = {
    "doubling": "root ::= r0\n"
    + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60))
    + '\nr60 ::= "a"',
    "chain": "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} "b"?' for i in range(8000)) + '\nr8000 ::= "a"',
    "options": "root ::= " + " | ".join(f'"{i}" root' for i in range(15000)),
    "repetitions": 'root ::= ((("a"{1,999}){1,999}){1,999} root)?',
    "a long rule in many places": f"root ::= {'x ' * 50_000} root\nx ::= {'[a-z] ' * 900}",
    "too long": "root ::= " + '"a" ' * 100_000,
}


# The options take two seconds, which is no more than others are given.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=exhaustive) if name == "options" else name for name in ENDLESS]
)
def test_large_grammars_end_in_time(vocabulary: Vocabulary, name: str, within: Within) -> None:
    with within(30):
        try:
            assert constraint_of(vocabulary, ENDLESS[name]).allowed().any()
        except OptionError as error:
            assert len(str(error)) < 400  # noqa: PT017 - it may as well succeed
