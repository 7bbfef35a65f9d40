"""Whether one more request may come in: a bounded queue, and a prediction of what would become of it.

The engine's thread asks here before it does anything for a request. Nothing is simulated. The engine never
rests while there is work, so what stands before a request is a sum: the prompts before it, and the steps
until a place is free, each as long as it is expected to take (`step_time.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapreplace

from hetrun.client.events import GenerateRequest
from hetrun.engine.step_time import StepTimes
from hetrun.errors import Overloaded
from hetrun.system.units import counted

RECENT_REQUESTS = 32  # that count in a mean over requests
FIRST_ANSWER = 256.0  # tokens, before any answer has ended
FIRST_PROMPT = 256.0
FIRST_TOKENS_A_LETTER = 1 / 4
LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0  # a request that comes back after a minute is predicted again


@dataclass(frozen=True, slots=True)
class RequestWork:
    """What is left to do for a request."""

    prompt: int  # tokens that are to be read before the next one can be given
    answer: float  # tokens still to come, as far as one can tell
    running: bool = False  # it has a place
    priority: int = 0
    client: str = ""
    pictures_s: float = 0.0  # that encoding its pictures takes, which nothing else runs beside


@dataclass(frozen=True, slots=True)
class RequestForecast:
    """Seconds from now."""

    place_s: float  # until it may begin
    first_s: float  # until its first token
    end_s: float  # if no other request comes


class Mean:
    """Of the last requests; what it is before the first one is a guess."""

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._seen = 0

    def observe(self, value: float) -> None:
        """One more."""
        self._seen = min(self._seen + 1, RECENT_REQUESTS)
        self.value += (value - self.value) / self._seen


class Admission:
    """Counts, predicts and refuses; on the engine's thread only.

    `places`: sequences that run together. `times`: what steps take. `most_waiting`: requests beyond those
    that run; None: as many as come. `aside`: the share of the time that running answers keep while prompts
    are read beside them.
    """

    def __init__(
        self, places: int, times: StepTimes, *, most_waiting: int | None = None, aside: float = 0.0
    ) -> None:
        self.places = places
        self.most_waiting = most_waiting
        self._times = times
        self._aside = aside
        self._answer = Mean(FIRST_ANSWER)
        self._prompt = Mean(FIRST_PROMPT)
        self._tokens_a_letter = Mean(FIRST_TOKENS_A_LETTER)
        self._sent_away = 0  # requests refused for a full queue, less those that have ended since

    # --- what the loop tells

    def finished(self, prompt_tokens: int, answer_tokens: int | None) -> None:
        """An answer has come to its end (not: its client has left). None: no tokens were wanted."""
        self._prompt.observe(prompt_tokens)
        if answer_tokens is not None:
            self._answer.observe(answer_tokens)
        self._sent_away = max(self._sent_away - 1, 0)

    def saw_prompt(self, letters: int, tokens: int) -> None:
        """A prompt of `letters` characters has `tokens` tokens that must be read; the others were cached."""
        if letters:
            self._tokens_a_letter.observe(tokens / letters)

    # --- what the loop asks

    def expected_prompt(self, letters: int) -> int:
        """About how many tokens of a text must be read, before anybody has tokenised it."""
        return 1 + int(letters * self._tokens_a_letter.value)

    def expected_answer(self, generated: int, limit: int, certain: bool = False) -> float:
        """Tokens that an answer still gets, at most up to `limit`; `certain`: it does not end before that.

        An answer that is as long as most are is not over for that: of lengths that are spread evenly from
        nothing to twice the mean, what is left on average falls half as fast as the answer grows.
        """
        left = max(limit - generated, 0)
        if certain:
            return left
        mean = self._answer.value
        return min(left, max(mean - generated / 2, mean / 4))

    def refuse_arrival(self, held: int, running: Iterable[RequestWork]) -> Overloaded | None:
        """Why a request may not even wait, where `held` run or wait already; before any work is done for it.

        `running`: the work of those that run. Each refused request is given a later time, so that they
        do not all come back at once.
        """
        if held <= self.places:
            self._sent_away = 0
        if self.most_waiting is None or held < self.places + self.most_waiting:
            return None
        retry_s = LEAST_RETRY_S
        room, turn = self.forecast(RequestWork(0, 0), running), self._turn_s()
        if room and turn:
            retry_s = min(max(room.place_s + self._sent_away * turn, LEAST_RETRY_S), MOST_RETRY_S)
        self._sent_away += 1
        many = held - self.places
        waits = f"{counted(many, 'request')} {'waits' if many == 1 else 'wait'}"
        return Overloaded(
            f"the queue is full: {waits} already (--queue); try again in {in_words(retry_s)}", retry_s
        )

    def refuse(
        self,
        own: RequestWork,
        others: Iterable[RequestWork],
        deadline_left_s: float | None,
        *,
        whole: bool = False,
    ) -> Overloaded | None:
        """Why a request need not wait: it would miss its deadline.

        `others`: all that run and wait, in the order in which they are served. `whole`: the answer must be
        complete by then, not only have begun. A request without others before it is never refused: what it
        takes is measured then, so that a wrong prediction does not refuse endlessly.
        """
        if deadline_left_s is None or not (others := list(others)):
            return None
        forecast = self.forecast(own, others)
        if forecast is None:
            return None
        seconds, what = (forecast.end_s, "end") if whole else (forecast.first_s, "first token")
        late_s = seconds - deadline_left_s
        if late_s <= 0:
            return None
        retry_s = min(max(late_s, LEAST_RETRY_S), MOST_RETRY_S)
        return Overloaded(
            f"the answer's {what} is expected in {in_words(seconds)}, but wanted within "
            f"{in_words(max(deadline_left_s, 0))} (deadline_s); try again in {in_words(retry_s)}, "
            "or allow more time",
            retry_s,
        )

    def forecast(self, own: RequestWork, others: Iterable[RequestWork]) -> RequestForecast | None:
        """When a new request gets its place, its first token and its end. None: nothing is known yet."""
        before = in_front(own, others)
        step = self._times.a_token(min(len(before) + 1, self.places))
        # Together: short prompts share a pass, so n of them cost less than n times one.
        tokens = sum(work.prompt for work in before)
        theirs, prompts = self._read_s(tokens), self._read_s(tokens + own.prompt)
        if step is None or theirs is None or prompts is None:
            return None
        # Nothing runs beside these.
        before_s = sum(work.pictures_s for work in before)
        pictures = before_s + own.pictures_s
        free = [0.0] * self.places  # steps until each place is free: a heap
        for work in before:  # each takes the first free place
            heapreplace(free, free[0] + work.answer)
        wait = free[0] * step
        answers = max((work.answer for work in before if work.running), default=0.0) * step
        first = max(
            wait + prompts,  # every place is taken: all of that comes before
            self._beside(prompts, answers),  # places are free, but answers go on
        )
        first += pictures
        return RequestForecast(wait + theirs + before_s if wait else 0.0, first, first + own.answer * step)

    # --- how

    def _read_s(self, tokens: int) -> float | None:
        return self._times.reading(tokens) if tokens else 0.0

    def _beside(self, prompts_s: float, answers_s: float) -> float:
        """Reading prompts takes longer while answers go on beside it, until these are over."""
        return min(prompts_s / (1 - self._aside), prompts_s + answers_s)

    def _turn_s(self) -> float | None:
        """Seconds from one end of an answer to the next while every place is taken."""
        step, prompt = self._times.a_token(self.places), self._times.reading(self._prompt.value)
        if step is None or prompt is None:
            return None
        return prompt + self._answer.value * step / self.places


def in_front(own: RequestWork, others: Iterable[RequestWork]) -> list[RequestWork]:
    """Those of the others that are served before: the running ones, then waiting ones that go first.

    Clients take turns: a client's third waiting request comes after three of each other's, not after all.
    """
    others = list(others)
    alike = [w for w in others if not w.running and (w.client, w.priority) == (own.client, own.priority)]
    turn = len(alike) + 1  # its own among its client's
    seen: Counter[str] = Counter()
    waiting: list[RequestWork] = []
    for w in others:
        if w.running or w.priority > own.priority:
            continue
        if w.priority == own.priority:
            seen[w.client] += 1
        if w.priority < own.priority or seen[w.client] <= turn:
            waiting.append(w)
    return [w for w in others if w.running] + waiting


def letters(request: GenerateRequest) -> int:
    """Characters of a prompt that is text."""
    messages = request.messages or ({"content": request.text},)
    texts = (message.get("content") for message in messages)
    return sum(len(text) for text in texts if isinstance(text, str))


def in_words(seconds: float) -> str:
    """Two digits are more than a prediction is worth."""
    return f"{seconds:.2g} s" if seconds < 99.5 else f"{seconds:.0f} s"
