"""The usage of an answer: token counts and times."""

from __future__ import annotations

from hetrun.client.events import Event, Timings, Usage

Json = dict[str, object]


class UsageSum:
    """Adds up the usage of an answer's choices, `each` of them for one prompt after another.

    The tokens of a prompt count once, because the other choices reuse what the first one computed.
    """

    def __init__(self, each: int) -> None:
        self._each = each
        self._ends: dict[int, tuple[Usage, Timings]] = {}

    def record(self, index: int, event: Event) -> int:
        """Record a complete choice; returns how many are complete."""
        self._ends[index] = (event.usage, event.timings)
        return len(self._ends)

    def usage(self) -> Json:
        """OpenAI's object."""
        prompts = [usage for usage, _ in self._firsts()]
        prompt = sum(usage.prompt_tokens for usage in prompts)
        completion = sum(usage.completion_tokens for usage, _ in self._ends.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        }

    def timings(self) -> Json:
        """llama.cpp's object. Choices run in parallel, so the longest time counts."""
        firsts, ends = self._firsts(), list(self._ends.values())
        cached = sum(usage.cached_tokens for usage, _ in firsts)
        prompt = sum(usage.prompt_tokens for usage, _ in firsts) - cached
        predicted = sum(usage.completion_tokens for usage, _ in ends)
        found: Json = {"cache_n": cached}
        found |= rates("prompt", prompt, max((_prompt_ms(*first) for first in firsts), default=0.0))
        found |= rates("predicted", predicted, max((_predicted_ms(*end) for end in ends), default=0.0))
        if drafted := sum(timings.drafted for _, timings in ends):
            found |= {"draft_n": drafted, "draft_n_accepted": sum(timings.accepted for _, timings in ends)}
        return found

    def _firsts(self) -> list[tuple[Usage, Timings]]:
        return [end for index, end in sorted(self._ends.items()) if index % self._each == 0]


def timings_of(end: Event) -> Json:
    """llama.cpp's object for a single answer, by its last event."""
    counts = UsageSum(1)
    counts.record(0, end)
    return counts.timings()


def _prompt_ms(usage: Usage, timings: Timings) -> float:
    computed = usage.prompt_tokens - usage.cached_tokens
    return 1000 * computed / timings.prompt_tok_s if timings.prompt_tok_s > 0 else 0.0


def _predicted_ms(usage: Usage, timings: Timings) -> float:
    # From the first token on, so there is one token less to wait for.
    waited = max(usage.completion_tokens - 1, 0)
    return 1000 * waited / timings.decode_tok_s if timings.decode_tok_s > 0 else 0.0


def rates(what: str, n: int, ms: float) -> Json:
    """How many tokens took how long; names begin with `what`."""
    return {
        f"{what}_n": n,
        f"{what}_ms": ms,
        f"{what}_per_token_ms": ms / n if n else 0.0,
        f"{what}_per_second": 1000 * n / ms if ms > 0 else 0.0,
    }
