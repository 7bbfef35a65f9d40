"""How a byte-level BPE cuts text into words, by the names that llama.cpp knows.

GGUF holds such a name, not the rules. It is found by behaviour: the tokenizer's own rules and those behind
each name cut a text on which they all differ, so that other spellings of the same rules are recognised too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

# Every row of the table below cuts it in its own way; tests hold it to that.
SAMPLE = (
    "Hello wORLD's Don'T I'VE we'll x'sy\t tabs  two   three\r\n\r\n  \n\n \n trailing \n"
    "3 33 333 4444 55555 1234567 3.14 1,000,000 a1b22c333 ½Ⅷ "
    "!!! ...??? a.b-c_d/e\\f //x/\n/ ++i; (x) [y]={z} $5 <|t|> `code` ^~ = \"q\" '''\n"
    "naïve café e\u0301a\u0308 СЛОВО Слово ΑΒΓ αβγ iPhone McDonald ǅ ª "
    "你好世界，再见。かな カナ 한국어 ไทย हिन्दी "  # noqa: RUF001 - the wide comma is meant
    "🚀😶\u200d🌫️ ✅ é\u00a0nbsp\u3000wide …—– «x» ¿que? #tag @me\n\n\n   end "  # noqa: RUF001
)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{0}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{0}"
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True, slots=True)
class PretokenizerRow:
    """A name of llama.cpp's, and the expressions that cut, one after the other."""

    name: str
    cuts: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say
    bytes_cut: bool = False  # the byte-level step cuts too, by GPT-2's expression


ROWS = (
    PretokenizerRow("gpt-2", (), bytes_cut=True),
    PretokenizerRow("smollm", (r"\p{N}",), bytes_cut=True),
    PretokenizerRow("qwen2", (_CONTRACTIONS + _WORDS + r"\p{N}" + _REST,)),
    PretokenizerRow("llama-bpe", (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,), ignore_merges=True),
    PretokenizerRow("smaug-bpe", (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,)),
    PretokenizerRow("tekken", (_CASED.format("") + r"|\p{N}" + _CASED_REST,), ignore_merges=True),
    PretokenizerRow("gpt-4o", (_CASED.format(_CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _CASED_REST,)),
    PretokenizerRow(
        "qwen35",
        (
            _CONTRACTIONS
            + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
            + r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    PretokenizerRow(
        "deepseek-v3",
        (
            r"\p{N}{1,3}",
            "[一-龥\u3040-ヿ]+",
            _ASCII_PUNCTUATION
            + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
            + r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    PretokenizerRow("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    PretokenizerRow(
        "seed-coder",
        (_CONTRACTIONS + _WORDS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    ),
)


@dataclass(frozen=True, slots=True)
class PretokenizerMatch:
    """The name, and whether it stands for exactly these rules."""

    name: str
    exact: bool


def recognise(cutter: PreTokenizer | None, ignore_merges: bool) -> PretokenizerMatch:
    """The name for these rules, or the nearest one."""
    theirs = cuts(cutter)
    best, share = ROWS[0], -1.0
    for row in sorted(ROWS, key=lambda row: row.ignore_merges != ignore_merges):
        ours = cuts(built(row))
        same = len(theirs & ours) / len(theirs | ours)
        if same > share:
            best, share = row, same
    return PretokenizerMatch(best.name, share == 1.0 and best.ignore_merges == ignore_merges)


def cuts(cutter: PreTokenizer | None) -> frozenset[tuple[int, int]]:
    """Where each word of the sample begins and ends."""
    if cutter is None:
        return frozenset({(0, len(SAMPLE))})
    return frozenset(span for _, span in cutter.pre_tokenize_str(SAMPLE))


def built(row: PretokenizerRow) -> PreTokenizer:
    """The rules of a row, for the library `tokenizers`."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in row.cuts]
    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=row.bytes_cut)]
    )
