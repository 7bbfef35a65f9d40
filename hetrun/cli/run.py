"""`hetrun run`: one prompt, its answer on stdout as it comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from hetrun.cli.progress import loading
from hetrun.config import Settings
from hetrun.errors import UserError
from hetrun.events import Event, GenerateRequest
from hetrun.llm import LLM, completion
from hetrun.params import SamplingParams
from hetrun.sampling import random_seed
from hetrun.visible import visible

MOST_PROMPT = 64 << 20  # characters read from stdin: far more than any context holds


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options that only `run` has."""

    top_k: int
    top_p: float
    min_p: float


def answer(
    settings: Settings, prompt: str | None, sampling: Sampling, *, raw: bool, as_json: bool, verbose: bool
) -> None:
    """Answer a prompt; with `as_json` all at once, else as it comes."""
    request = make_request(settings, read_prompt(prompt), sampling, raw)
    with open_llm(settings) as llm:
        if verbose:
            print(llm.plan.to_text(), file=sys.stderr)
        events = list(shown(llm.stream_request(request), not as_json))
        if as_json:
            print(json.dumps(as_object(llm, events), ensure_ascii=False))
        elif verbose or sys.stderr.isatty():
            print(summary(events[-1], request.params), file=sys.stderr)


@contextmanager
def open_llm(settings: Settings) -> Iterator[LLM]:
    """The model of the settings, with a progress bar while it loads."""
    with loading("loading") as progress:
        llm = LLM.of(settings, progress)
    with llm:
        yield llm


def read_prompt(prompt: str | None) -> str:
    """The prompt as given, or from stdin."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise UserError('no prompt was given; try: hetrun run "Why is the sky blue?"')
    text = sys.stdin.buffer.read(MOST_PROMPT + 1)
    if len(text) > MOST_PROMPT:
        raise UserError(f"the prompt on stdin is longer than {MOST_PROMPT >> 20} MiB")
    if not text.strip():
        raise UserError("the prompt on stdin is empty")
    try:
        # The shell's own line end at the end of a pipe is no part of what somebody asked.
        return text.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as e:
        raise UserError(
            f"the prompt on stdin is not UTF-8 text: byte {e.start} is {text[e.start]:#x}"
        ) from None


def make_request(settings: Settings, prompt: str, sampling: Sampling, raw: bool) -> GenerateRequest:
    """The prompt as a request; a seed is chosen here, so that it can be printed."""
    params = SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=settings.seed,
    )
    if params.seed is None:
        params = replace(params, seed=random_seed())
    if raw:
        return GenerateRequest(params, text=prompt)
    system = [{"role": "system", "content": settings.system}] if settings.system is not None else []
    return GenerateRequest(params, messages=(*system, {"role": "user", "content": prompt}))


def shown(events: Iterator[Event], show: bool) -> Iterator[Event]:
    """The events, each one's text written to stdout as it comes."""
    safe = visible if sys.stdout.isatty() else str
    written = ""
    try:
        for event in events:
            if show and event.text:
                written = event.text
                sys.stdout.write(safe(event.text))
                sys.stdout.flush()
            yield event
    finally:
        if show and written and not written.endswith("\n"):
            sys.stdout.write("\n")


def as_object(llm: LLM, events: list[Event]) -> dict[str, object]:
    """What `run --json` prints."""
    done = completion(events)
    return {
        "text": done.text,
        "tokens": done.tokens,
        "finish_reason": done.finish_reason,
        "usage": asdict(done.usage),
        "timings": asdict(done.timings),
        "plan": llm.plan.to_json(),
    }


def summary(last: Event, params: SamplingParams) -> str:
    """One line on how it went."""
    u, t = last.usage, last.timings
    greedy = params.temperature == 0
    return (
        f"[{u.prompt_tokens} prompt tokens at {t.prompt_tok_s:.0f}/s, "
        f"{u.completion_tokens} tokens at {t.decode_tok_s:.0f}/s, loaded in {t.load_s:.1f} s, "
        f"{'greedy' if greedy else f'seed {params.seed}'}]"
    )
