"""Numbers and faults in words that people read."""

from __future__ import annotations

import pytest

from hetrun.system.strict_json import fault_in_json, parsed
from hetrun.system.units import counted


@pytest.mark.parametrize(
    ("n", "form", "said"),
    [
        (0, "", "0 tokens"),
        (1, "", "1 token"),
        (2, "", "2 tokens"),
        (1024, ",", "1,024 tokens"),
        (1.2, ".0f", "1 token"),
        (1.2, ".1f", "1.2 tokens"),
        (0.4, ".0f", "0 tokens"),
    ],
)
def test_one_is_singular_and_all_else_plural(n: float, form: str, said: str) -> None:
    assert counted(n, "token", form) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a" 1}', "expecting ':' delimiter at character 6"),
        (b'{"a": 1}\n{', "extra data at line 2, character 1"),
        (b'{"a": NaN}', "NaN is not JSON"),
    ],
)
def test_what_is_wrong_with_json_has_one_place(text: bytes, said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parsed(text)
    assert fault_in_json(caught.value) == said
