"""Which sequences begin alike: their tokens as a tree, in which what several share stands once.

A node is a run of tokens and knows who holds them. Finding takes one comparison of arrays for each node on
the way, however many sequences share it; there are never more nodes than twice the sequences.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


@dataclass(slots=True)
class _Node:
    """Tokens behind those of the parent, and the sequences that hold all of them."""

    run: Tokens
    holders: set[int]
    children: dict[int, _Node] = field(default_factory=dict)  # by their first token


class TokenTree:
    """Sequences by their tokens."""

    def __init__(self) -> None:
        self._root = _Node(np.zeros(0, np.int32), set())
        self._tokens: dict[int, Tokens] = {}

    def __contains__(self, holder: int) -> bool:
        return holder in self._tokens

    def tokens(self, holder: int) -> Tokens:
        """The tokens of a sequence."""
        return self._tokens[holder]

    @property
    def n_distinct(self) -> int:
        """Tokens in the tree, those that several hold counted once."""
        nodes, n = [self._root], 0
        while nodes:
            node = nodes.pop()
            n += len(node.run)
            nodes += node.children.values()
        return n

    def add(self, holder: int, tokens: Tokens) -> None:
        """A new sequence; the array is kept, not copied."""
        if holder in self._tokens:
            raise ValueError(f"sequence {holder} stands in the tree already")
        self._tokens[holder] = tokens
        try:
            self._insert(holder, tokens)
        except BaseException:  # without memory for an array; what was split is right as it is
            del self._tokens[holder]
            _discard(self._root, holder)
            raise

    def _insert(self, holder: int, tokens: Tokens) -> None:
        node, at = self._root, 0
        while at < len(tokens):
            first = int(tokens[at])
            child = node.children.get(first)
            if child is None:
                node.children[first] = _Node(tokens[at:], {holder})
                return
            n = common(child.run, tokens[at:])
            if n < len(child.run):
                child = node.children[first] = _split(child, n)
            child.holders.add(holder)
            node, at = child, at + n

    def remove(self, holder: int) -> None:
        """Forget a sequence."""
        del self._tokens[holder]
        for node in reversed(_discard(self._root, holder)):
            _join(node)

    def shared(self, tokens: Tokens) -> dict[int, int]:
        """How many tokens at the beginning each sequence shares with these; not those that share none."""
        found: dict[int, int] = {}
        node, at = self._root, 0
        while at < len(tokens) and (child := node.children.get(int(tokens[at]))):
            n = common(child.run, tokens[at:])
            at += n
            found.update(dict.fromkeys(child.holders, at))
            if n < len(child.run):
                break
            node = child
        return found


def common(a: Tokens, b: Tokens) -> int:
    """How many tokens at the beginning are the same."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


def _split(node: _Node, n: int) -> _Node:
    """A node of the first n tokens, in front of one of the others."""
    upper = _Node(node.run[:n], set(node.holders), {int(node.run[n]): node})
    node.run = node.run[n:]
    return upper


def _discard(root: _Node, holder: int) -> list[_Node]:
    """Take a sequence out, without any new array: memory may be short. The nodes that it leaves to others."""
    node, left = root, list[_Node]()
    while found := next((pair for pair in node.children.items() if holder in pair[1].holders), None):
        first, child = found
        child.holders.remove(holder)
        if not child.holders:  # then the nodes below it have none either
            del node.children[first]
            break
        left.append(child)
        node = child
    return left


def _join(node: _Node) -> None:
    """One node instead of two that the same sequences hold; else old borders would add up."""
    if len(node.children) == 1:
        (child,) = node.children.values()
        if len(child.holders) == len(node.holders):
            with suppress(MemoryError):  # two nodes say the same
                node.run, node.children = np.concatenate((node.run, child.run)), child.children
