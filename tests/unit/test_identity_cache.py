"""What follows from objects, found again by identity."""

from hetrun.graph.identity_cache import IdentityCache


def test_equal_objects_are_two() -> None:
    cache, first, second = IdentityCache[list[int], int](), [1], [1]
    made = list[int]()

    def size(of: list[int]) -> int:
        made.append(id(of))
        return len(of)

    assert [cache.get(each, size) for each in (first, second, first)] == [1, 1, 1]
    assert made == [id(first), id(second)]


def test_what_was_not_asked_for_the_longest_is_forgotten() -> None:
    cache, keys = IdentityCache[list[int], int](capacity=2), [[0], [1], [2]]
    made = list[int]()

    def first(of: list[int]) -> int:
        made.append(of[0])
        return of[0]

    for at in (0, 1, 0, 2, 0, 1):
        assert cache.get(keys[at], first) == at
    assert made == [0, 1, 2, 1]
    assert len(cache) == 2
