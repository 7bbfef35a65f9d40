"""The prefix cache against the simplest model of it: lists of tokens, all compared with all."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetrun.errors import BudgetError
from hetrun.memory.kv.prefix_cache import LEAST, LITTLE, WORTH, Prefixes
from hetrun.memory.kv.radix_tree import TokenTree, common
from tests.support.examples import examples


@dataclass
class Lists:
    """Sequences as lists of tokens; with a window only its last tokens are there, and some slack."""

    places: int = 1 << 20
    window: int = 0
    grain: int = 1  # tokens that are shared together
    texts: dict[int, list[int]] = field(default_factory=dict)
    forks: list[int] = field(default_factory=list)  # what they were forks of
    ids: count[int] = field(default_factory=count)

    def alloc(self) -> int:
        if len(self.texts) == self.places:
            raise BudgetError("full")
        seq = next(self.ids)
        self.texts[seq] = []
        return seq

    def fork(self, seq: int, n: int | None = None) -> int:
        assert n is not None
        assert n == self.shareable(seq, n)
        new = self.alloc()
        self.texts[new] = self.texts[seq][:n]
        self.forks.append(seq)
        return new

    def shareable(self, seq: int, n: int) -> int:
        length = len(self.texts[seq])
        assert 0 <= n <= length
        if self.window and length > 2 * self.window and n < length - self.window:
            return 0
        return n // self.grain * self.grain

    def truncate(self, seq: int, n: int) -> None:
        assert n == self.shareable(seq, n)
        del self.texts[seq][n:]

    def free(self, seq: int) -> None:
        del self.texts[seq]

    def length(self, seq: int) -> int:
        return len(self.texts[seq])


def alike(a: list[int], b: list[int]) -> int:
    """How many tokens at the beginning are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


NOT_YET = -1  # a token whose row is not computed
PARTS = [[i] * n for i, n in enumerate((1, 7, LEAST, LEAST + 5, 40, WORTH, 90))] + [list(range(50))]
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map(lambda parts: list(chain(*parts)))


# --- the tree


@given(st.lists(TEXTS, max_size=8), TEXTS, st.data())
def test_the_tree_finds_what_comparing_all_with_all_finds(
    texts: list[list[int]], wanted: list[int], data: st.DataObject
) -> None:
    tree = TokenTree()
    for i, text in enumerate(texts):
        tree.add(i, np.array(text, np.int32))
    gone = data.draw(st.sets(st.integers(0, len(texts) - 1)) if texts else st.just(set()))
    for i in gone:
        tree.remove(i)
    left = {i: text for i, text in enumerate(texts) if i not in gone}
    found = tree.shared(np.array(wanted, np.int32))
    assert found == {i: n for i, text in left.items() if (n := alike(text, wanted))}
    distinct = {tuple(text[: i + 1]) for text in left.values() for i in range(len(text))}
    assert tree.n_distinct == len(distinct)


def test_old_borders_do_not_add_up() -> None:
    tree, text = TokenTree(), np.arange(500, dtype=np.int32)
    tree.add(0, text)
    for i in range(1, 500):
        tree.add(i, np.append(text[:i], np.int32(-1)))
        tree.remove(i)
    assert len(tree._root.children[0].run) == 500


def test_a_sequence_stands_in_the_tree_once() -> None:
    tree = TokenTree()
    tree.add(0, np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="sequence 0 stands in the tree already"):
        tree.add(0, np.zeros(3, np.int32))


@given(TEXTS, TEXTS)
def test_what_two_texts_have_in_common(a: list[int], b: list[int]) -> None:
    assert common(np.array(a, np.int32), np.array(b, np.int32)) == alike(a, b)
    assert common(np.zeros(0, np.int32), np.array(b, np.int32)) == 0


# --- whatever is done


class Kept(RuleBasedStateMachine):
    """Forks hold the right tokens, entries go in the right order, and no sequence is lost."""

    window: ClassVar[int] = 0
    grain: ClassVar[int] = 1
    places: ClassVar[int] = 1 << 20
    most: ClassVar[int] = 4

    def __init__(self) -> None:
        super().__init__()
        self.model = Lists(self.places, self.window, self.grain)
        self.prefixes = Prefixes(self.model, self.most)
        self.running: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.standing: dict[int, int] = {}  # in the middle of a pass: how much was computed before
        self.order: list[int] = []  # entries, the last used last

    def best(self, tokens: list[int]) -> int:
        """The longest beginning that anybody has."""
        most = len(tokens) - 1
        reaches = [
            self.model.shareable(seq, min(alike(text, tokens), most)) for seq, text in self.known().items()
        ]
        return max((n for n in reaches if n >= LEAST), default=0)

    def known(self) -> dict[int, list[int]]:
        """Everything that was computed, of what runs in its prompts."""
        ends = {seq: min(len(self.prompts[seq]), self.standing.get(seq, 1 << 20)) for seq in self.running}
        return {seq: text[: ends.get(seq)] for seq, text in self.model.texts.items()}

    def idle(self) -> list[int]:
        """What runs and is not in the middle of a pass."""
        return sorted(set(self.running) - set(self.standing))

    @rule(tokens=TEXTS, reuse=st.sampled_from((True, True, True, False)))
    def begin(self, tokens: list[int], reuse: bool) -> None:
        best, before, kept = self.best(tokens) if reuse else 0, len(self.model.forks), len(self.order)
        full = len(self.model.texts) == self.places
        try:
            seq, n = self.prefixes.begin(tokens, reuse)
        except BudgetError:
            assert len(self.running) == self.places
            return
        assert n < len(tokens)
        assert self.model.texts[seq] == tokens[:n]
        source = self.model.forks[before] if len(self.model.forks) > before else None
        if source in self.order:
            self.order.remove(source)
            self.order.append(source)
        if full:
            self.order = [e.seq for e in reversed(self.prefixes.entries())]
            assert len(self.order) == kept - 1
        else:
            assert n == best
            assert (source is None) == (n == 0)
        self.running[seq], self.prompts[seq] = list(tokens), tokens

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), n=st.integers(1, 200), answer=st.integers(0, 9))
    def compute(self, data: st.DataObject, n: int, answer: int) -> None:
        """A pass begins: there is room for its rows, but nothing stands there yet."""
        seq = data.draw(st.sampled_from(self.idle()))
        tokens, text = self.running[seq], self.model.texts[seq]
        if len(text) == len(tokens):
            tokens += [answer] * n
        self.standing[seq] = len(text)
        text += [NOT_YET] * min(n, len(tokens) - len(text))

    @precondition(lambda self: self.standing)
    @rule(data=st.data(), fails=st.booleans())
    def computed(self, data: st.DataObject, fails: bool) -> None:
        """A pass ends."""
        seq = data.draw(st.sampled_from(sorted(self.standing)))
        before, text = self.standing.pop(seq), self.model.texts[seq]
        text[before:] = [] if fails else self.running[seq][before : len(text)]
        self.prefixes.progress(seq, len(text))

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.idle()))
        tokens, held = self.running.pop(seq), self.model.texts[seq].copy()
        n, texts = len(held), {e: self.model.texts[e].copy() for e in self.order}
        serves = {e: self.model.shareable(e, n) > n - LEAST for e in self.order if texts[e][:n] == held}
        stands = {
            e: self.model.shareable(seq, len(texts[e])) > len(texts[e]) - LEAST
            for e in self.order
            if held[: len(texts[e])] == texts[e]
        }
        self.prefixes.keep(seq, tokens)
        if n < LEAST or not self.most:
            assert seq not in self.model.texts
        elif any(serves.values()):
            (used,) = {e.seq for e in self.prefixes.entries()[:1]}
            assert serves[used]
            self.order.remove(used)
            self.order.append(used)
        else:
            order = [*(e for e in self.order if not stands.get(e)), seq]
            self.order = order[max(0, len(order) - self.most) :]

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.idle()))
        del self.running[seq]
        self.prefixes.free(seq)

    @rule()
    def drop(self) -> None:
        assert self.prefixes.drop_one() == bool(self.order)
        del self.order[:1]

    @rule()
    def clear(self) -> None:
        self.prefixes.clear()
        self.order = []

    @rule(tokens=TEXTS, data=st.data())
    def soon(self, tokens: list[int], data: st.DataObject) -> None:
        some = data.draw(st.sets(st.sampled_from(sorted(self.running)))) if self.running else set()
        most = len(tokens) - 1
        now = max((min(alike(t, tokens), most) for t in self.known().values()), default=0)
        later = max((min(alike(self.prompts[seq], tokens), most) for seq in some), default=0)
        assert self.prefixes.soon(tokens, some) == (later - now >= WORTH)

    @invariant()
    def nothing_is_lost(self) -> None:
        entries = self.prefixes.entries()
        assert [e.seq for e in reversed(entries)] == self.order
        assert len(entries) == self.prefixes.n_entries <= self.most
        assert set(self.model.texts) == {*self.order, *self.running}
        assert self.prefixes.n_running == len(self.running)
        assert all(e.tokens.tolist() == self.model.texts[e.seq] for e in entries)
        assert self.prefixes.n_tokens == sum(len(e.tokens) for e in entries)


class KeptWindows(Kept):
    """Of sequences that outgrew their window, the beginning is gone."""

    window = 60


class KeptPages(Kept):
    """Beginnings can be shared to borders of pages only."""

    grain = 11


class FewPlaces(Kept):
    """There is no memory for more sequences than these."""

    places = 3


class NothingKept(Kept):
    """Only what runs is shared."""

    most = 0


TestKept = Kept.TestCase
TestKeptWindows = KeptWindows.TestCase
TestKeptPages = KeptPages.TestCase
TestFewPlaces = FewPlaces.TestCase
TestNothingKept = NothingKept.TestCase
for _case in (TestKept, TestKeptWindows, TestKeptPages, TestFewPlaces, TestNothingKept):
    _case.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


# --- single cases


def compute(prefixes: Prefixes, model: Lists, seq: int, tokens: list[int]) -> None:
    """A step of one sequence."""
    model.texts[seq] += tokens
    prefixes.progress(seq, len(model.texts[seq]))


def ran(prefixes: Prefixes, model: Lists, tokens: list[int]) -> int:
    """A request from its beginning to its end; how many tokens it did not have to compute."""
    seq, n = prefixes.begin(tokens)
    compute(prefixes, model, seq, tokens[n:])
    prefixes.keep(seq, tokens)
    return n


def test_a_conversation_is_one_entry() -> None:
    model = Lists()
    prefixes, talk = Prefixes(model), list(range(100))
    for turn in range(5):
        assert ran(prefixes, model, talk) == (len(talk) - 50 if turn else 0)
        talk = talk + [turn] * 50
    assert prefixes.n_entries == len(model.texts) == 1


def test_the_same_prompt_again_lacks_its_last_token_only() -> None:
    model = Lists()
    prefixes = Prefixes(model)
    assert [ran(prefixes, model, list(range(50))) for _ in range(3)] == [0, 49, 49]
    assert prefixes.n_entries == 1


def test_what_was_asked_for_least_recently_goes_first() -> None:
    model = Lists()
    prefixes = Prefixes(model, most=2)
    for first in (1, 2, 1, 3):  # the third forks from the first, so the second goes
        ran(prefixes, model, [first] * 40)
    assert sorted(e.tokens[0] for e in prefixes.entries()) == [1, 3]


def test_the_last_entry_is_taken_where_there_is_no_place_for_a_fork() -> None:
    model = Lists(places=1)
    prefixes = Prefixes(model)
    assert [ran(prefixes, model, [7] * n) for n in (40, 90, 30)] == [0, 40, 29]


@pytest.mark.parametrize("lost", [0, LITTLE, LITTLE + 1])
def test_who_goes_on_almost_where_an_entry_ended_gets_the_entry(lost: int) -> None:
    model = Lists()
    prefixes = Prefixes(model)
    ran(prefixes, model, [7] * 100 + [8] * lost)
    seq, n = prefixes.begin([7] * 100 + [9] * 50)
    assert n == 100
    assert model.forks == ([] if lost <= LITTLE else [0])
    assert (seq == 0) == (lost <= LITTLE)
    assert prefixes.n_entries == (lost > LITTLE)
    again, n = prefixes.begin([7] * 100 + [6] * 50)  # beside it, from what it holds
    assert (again != seq, n) == (True, 100)
    compute(prefixes, model, seq, [9] * 50)
    prefixes.keep(seq, [7] * 100 + [9] * 50)
    assert max(len(e.tokens) for e in prefixes.entries()) == 150


def test_entries_make_place_for_what_is_no_request() -> None:
    model = Lists(places=2)
    prefixes = Prefixes(model)
    ran(prefixes, model, [1] * 40)
    ran(prefixes, model, [2] * 40)
    assert model.length(prefixes.alloc()) == 0
    assert [e.tokens[0] for e in prefixes.entries()] == [2]
    prefixes.alloc()
    with pytest.raises(BudgetError):
        prefixes.alloc()


def test_without_memory_for_a_fork_of_what_runs_it_begins_empty() -> None:
    model = Lists()
    prefixes = Prefixes(model)
    seq, _ = prefixes.begin([1] * 50)
    compute(prefixes, model, seq, [1] * 50)

    def fork(seq: int, n: int | None = None) -> int:
        raise BudgetError("full")

    model.fork = fork  # type: ignore[method-assign]
    assert prefixes.begin([1] * 60)[1] == 0


def test_one_computes_what_all_need_and_the_others_wait() -> None:
    model, system = Lists(), [5] * 200
    prefixes = Prefixes(model)
    assert not prefixes.soon([*system, 1], ())
    first, _ = prefixes.begin([*system, 1])
    assert prefixes.soon([*system, 2], {first})
    assert not prefixes.soon([*system, 2], ())  # no sequence computes it
    assert not prefixes.soon([9, *system], {first})
    compute(prefixes, model, first, system[:100])
    assert prefixes.soon([*system, 2], {first})  # half of it would be a waste
    compute(prefixes, model, first, system[: 101 - WORTH])
    assert not prefixes.soon([*system, 2], {first})
    assert prefixes.begin([*system, 2])[1] == 201 - WORTH


def test_no_request_waits_for_one_that_has_ended() -> None:
    model = Lists()
    prefixes = Prefixes(model)
    seq, _ = prefixes.begin([5] * 200)
    prefixes.free(seq)
    assert not prefixes.soon([5] * 200, {seq})


def test_a_sequence_must_be_known_as_far_as_it_goes() -> None:
    model = Lists()
    prefixes = Prefixes(model)
    seq, _ = prefixes.begin([1] * 20)
    model.texts[seq] += [1] * 20
    with pytest.raises(ValueError, match="holds 20 tokens, but only 19 are known"):
        prefixes.keep(seq, [1] * 19)


def test_entries_beside_the_last_hold_a_limited_number_of_tokens() -> None:
    """Where memory is wanted for something else."""
    model = Lists()
    prefixes = Prefixes(model, most_tokens=100)
    for first in (1, 2, 3):
        ran(prefixes, model, [first] * 50)
    assert [entry.tokens[0] for entry in prefixes.entries()] == [3, 2]
    ran(prefixes, model, [4] * 200)
    assert [len(entry.tokens) for entry in prefixes.entries()] == [200]


@pytest.mark.parametrize(("grain", "expected"), [(1, [30, 60, 65]), (8, [24, 56, 72])])
def test_a_new_sequence_never_begins_with_a_part_of_a_span(grain: int, expected: list[int]) -> None:
    """Tokens of a picture are of use together: one that has a part of them ends before it."""
    model = Lists(grain=grain)
    prefixes = Prefixes(model)
    text, spans = list(range(100)), [(30, 50), (60, 64)]
    seq, _ = prefixes.begin(text)
    compute(prefixes, model, seq, text)
    prefixes.keep(seq, text)
    for end, n in zip((40, 62, 64 + grain), expected, strict=True):
        found = prefixes.begin(text[:end] + [1000] * 20, spans=spans)
        assert found[1] == n
        assert prefixes.begin(text[:end] + [1000] * 20)[1] == min(end, end // grain * grain)


def test_without_memory_a_prompt_does_not_begin_and_the_next_one_does() -> None:
    """At whichever array of its tokens' place in the tree."""
    text = list(range(60))
    for nth in range(1, 3):
        model = Lists()
        prefixes = Prefixes(model)
        seq, _ = prefixes.begin(text)
        model.texts[seq] = text.copy()
        prefixes.keep(seq, text)
        calls = count(1)

        def fails(a: object, b: object, calls: count[int] = calls, nth: int = nth) -> int:
            if next(calls) == nth:
                raise MemoryError
            return common(a, b)  # type: ignore[arg-type]

        with mock.patch("hetrun.memory.kv.radix_tree.common", fails), suppress(MemoryError):
            prefixes.free(prefixes.begin([*text[:30], *range(70, 90)])[0])
        assert next(calls) > nth
        assert len(model.texts) == prefixes.n_entries == 1
        found, n = prefixes.begin([*text, 99])
        assert n == len(text)
        assert model.texts[found] == text


def test_without_memory_an_answer_is_not_kept_and_its_place_is_free() -> None:
    model = Lists()
    prefixes = Prefixes(model)
    text = list(range(60))
    seq, _ = prefixes.begin(text)
    model.texts[seq] = text.copy()
    with mock.patch.object(TokenTree, "add", side_effect=MemoryError), pytest.raises(MemoryError):
        prefixes.keep(seq, text)
    assert not model.texts
    assert prefixes.n_running == prefixes.n_entries == 0
