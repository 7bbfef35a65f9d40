"""`hetrun run`: one prompt, its answer on stdout as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Literal

from hetrun.api.local_model import LocalModel
from hetrun.cli import attachments, standard_input
from hetrun.cli.output import ANSWER, in_json, say
from hetrun.cli.progress import OPENING, loading
from hetrun.cli.sampling_options import ROWS, SAMPLING, params_of
from hetrun.client.completion import completion
from hetrun.client.events import DeviceSlots, Event, GenerateRequest, Streaming, TokenLogprob, accepted
from hetrun.client.pictures import check_reads
from hetrun.client.sampling_params import DEFAULT_TEMPERATURE, SamplingParams
from hetrun.config import Settings, runtime_dir
from hetrun.errors import HetrunError, OptionError, UserError, printable
from hetrun.sampling.sampler import random_seed
from hetrun.system.terminal_text import visible
from hetrun.system.units import counted, format_bytes

if TYPE_CHECKING:
    from hetrun.cli.run_remote import RemoteRunner

CONTEXT = "the end of the context"  # what cuts an answer that -n does not


def answer(
    settings: Settings,
    prompt: str | None,
    sampling: Mapping[str, object],
    attached: Sequence[str] = (),
    *,
    raw: bool,
    as_json: Literal["short", "full"] | None,
    verbose: bool,
) -> None:
    """Answer a prompt, perhaps about files; with `as_json` all at once, else as it comes."""
    params = make_params(settings, sampling)
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling and not as_json:
            raise OptionError(f"{ROWS[name].flag} is shown with --json only: add it")
    pictures = attachments.pictures(attached)
    said = read_prompt(prompt, is_alone=attachments.PIPE in attached)
    request = attachments.with_pictures(make_request(settings, said, params, raw), pictures)
    say_if_nothing_is_required(params)
    if as_json != "full" and answered_elsewhere(
        settings, request, as_json=as_json is not None, verbose=verbose
    ):
        return
    with open_llm(settings, chatting=not raw, first=request) as llm:
        check_reads(llm.info, pictures)
        if verbose:
            print(described(llm, request), file=sys.stderr)
        events = list(shown(llm.stream_request(request), show=as_json is None))
        closed = not as_json and (verbose or sys.stderr.isatty())
        say_if_cut(text_of(events), events[-1], params, closed=closed)
        if as_json:
            print(in_json(as_object(llm, events, params, full=as_json == "full")))
        elif closed:
            print(summary(events[-1], params), file=sys.stderr)
            if streaming := llm.stats.streaming:
                print(from_disk(streaming), file=sys.stderr)
            if slots := llm.stats.device_slots:
                print(in_slots(slots), file=sys.stderr)


def answered_elsewhere(settings: Settings, request: GenerateRequest, *, as_json: bool, verbose: bool) -> bool:
    """Whether the server of --url has answered, or one of this user that has the model; one that cannot is no
    reason to fail, if the model can be loaded here."""
    if settings.url is None and not any(runtime_dir().glob("*.sock")):
        return False  # what looks for servers takes a moment to import
    from hetrun.cli import run_remote

    told = verbose or sys.stderr.isatty()
    if settings.url is not None:
        with run_remote.of_url(settings, say if told else lambda text: None, request.pictures) as there:
            asked = run_remote.check_for_url(request)
            show_answer(there, asked, there.events(asked), as_json=as_json, told=told)
        return True
    if (found := run_remote.find(settings)) is None:
        return False
    is_loading = found[1].status == "loading"
    passing = (HetrunError,) if is_loading else run_remote.PASSING  # it may have other limits, as of --ram
    with run_remote.of_own(found) as there:
        if is_loading and told:
            say(f"your server on {there.where} is loading the model (--no-server: load it here)")
        try:
            events = run_remote.begun(there.events(request))
        except passing as error:
            if verbose:
                say(f"the server on {there.where} has the model but does not answer: {error}")
            return False
        if told:
            say(f"answered by your server on {there.where}, which has the model (--no-server: load it here)")
        show_answer(there, request, events, as_json=as_json, told=told)
    return True


def show_answer(
    there: RemoteRunner, request: GenerateRequest, events: Iterator[Event], *, as_json: bool, told: bool
) -> None:
    """The answer of a server as that of an engine here."""
    seen = list(shown(events, not as_json))
    say_if_cut(text_of(seen), seen[-1], request.params, closed=told and not as_json)
    if as_json:
        print(in_json(answer_as_object(seen, request.params) | there.as_object()))
    elif told:
        print(summary(seen[-1], request.params), file=sys.stderr)


@contextmanager
def open_llm(
    settings: Settings, chatting: bool = False, first: GenerateRequest | None = None
) -> Iterator[LocalModel]:
    """The model of the settings, with a progress bar while it loads."""
    with loading(OPENING) as progress:
        llm = LocalModel.of(settings, progress, chatting=chatting, first=first)
    with llm:
        yield llm


def read_prompt(prompt: str | None, is_alone: bool = False) -> str:
    """The prompt as given, after what else is on stdin; or stdin alone. `is_alone`: stdin has no text."""
    if is_alone:
        if prompt is None or not prompt.strip() or prompt == "-":
            raise UserError("-a - reads the picture from standard input: give the prompt as text")
        return prompt
    if prompt is None or prompt == "-":
        if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
            raise UserError('no prompt was given; try: hetrun run "Why is the sky blue?"')
        if not (text := standard_input.read_text()).strip():
            given = "no prompt was given, and " if prompt is None else ""
            raise UserError(f'{given}standard input is empty; try: hetrun run "Why is the sky blue?"')
        return text
    text = standard_input.text_beside_a_prompt()
    if not prompt.strip() and not text:
        raise UserError('the prompt is empty; try: hetrun run "Why is the sky blue?"')
    return f"{text.rstrip()}\n\n{prompt}" if text and prompt.strip() else text or prompt


def make_params(settings: Settings, sampling: Mapping[str, object]) -> SamplingParams:
    """How to sample; a seed is chosen here, so that it can be printed."""
    found = params_of(settings, sampling)
    return found if found.seed is not None else replace(found, seed=random_seed())


def make_request(settings: Settings, prompt: str, params: SamplingParams, raw: bool) -> GenerateRequest:
    """The prompt as a request."""
    if raw:
        return GenerateRequest(params, text=prompt)
    system = [{"role": "system", "content": settings.system}] if settings.system is not None else []
    return GenerateRequest(params, messages=(*system, {"role": "user", "content": prompt}))


def shown(events: Iterator[Event], show: bool) -> Iterator[Event]:
    """The events, each one's text written to stdout as it comes."""
    try:
        for event in events:
            if show:
                ANSWER.write(event.text)
            yield event
    finally:
        if show:
            ANSWER.end()


def text_of(events: list[Event]) -> str:
    """The text of an answer."""
    return "".join(event.text for event in events)


def say_if_cut(text: str, last: Event, params: SamplingParams, *, closed: bool) -> None:
    """A remark if an answer that must have a form was cut: what reads it may not be able to. Of another
    answer, unless -n asked for that, or the closing line says it (`closed`)."""
    if not (cut := cut_by(last, params)):
        return
    if params.structure is None:
        if cut == CONTEXT and not closed:
            held = counted(last.usage.prompt_tokens + last.usage.completion_tokens, "token")
            say(f"the answer was cut by {cut} ({held} with the prompt); -n sets a limit")
        return
    perhaps = ", perhaps" if params.structure.kind != "json_schema" else ""
    if not perhaps and _is_json(text):
        return  # a number that could have had more digits
    count = counted(last.usage.completion_tokens, "token")
    say(f"the answer was cut at {count} ({cut}){perhaps} before it was complete")


def say_if_nothing_is_required(params: SamplingParams) -> None:
    """A remark on a schema whose properties may all be left out, which few people mean."""
    if params.structure is None or params.structure.kind != "json_schema":
        return
    import json  # on use: few answers have a schema

    from hetrun.client.schema_words import remark_in_words

    if remark := remark_in_words(json.loads(params.structure.text)):
        say(remark)


def cut_by(last: Event, params: SamplingParams) -> str:
    """What cut an answer: -n, or the end of the context; nothing if it ended by itself."""
    if last.finish_reason != "length" or params.max_tokens == 0:
        return ""
    limited = params.max_tokens is not None and last.usage.completion_tokens >= params.max_tokens
    return f"-n {params.max_tokens}" if limited else CONTEXT


def _is_json(text: str) -> bool:
    import json  # on use: few answers have a schema

    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def as_object(
    llm: LocalModel, events: list[Event], params: SamplingParams, *, full: bool
) -> dict[str, object]:
    """What `run --json` prints; `full`: with what the model takes, and where it runs."""
    found: dict[str, object] = {"model": llm.info.name} | answer_as_object(events, params)
    if full:
        found |= {
            "memory": dict(llm.memory),
            "streaming": (streaming := llm.stats.streaming) and asdict(streaming),
            "device_slots": (slots := llm.stats.device_slots) and asdict(slots),
            "plan": llm.plan.to_json(),
        }
    return found


def answer_as_object(events: list[Event], params: SamplingParams) -> dict[str, object]:
    """An answer, wherever it came from."""
    done = completion(events)
    found: dict[str, object] = {
        "text": done.text,
        "tokens": done.tokens,
        "finish_reason": done.finish_reason,
        "usage": asdict(done.usage),
        "timings": asdict(done.timings),
    }
    if params.logprobs is not None:
        found["logprobs"] = [scored(entry) for entry in done.logprobs]
    if params.prompt_logprobs is not None:
        found["prompt_logprobs"] = [entry and scored(entry) for entry in done.prompt_logprobs]
    return found


def scored(entry: TokenLogprob) -> dict[str, object]:
    """A token's log-probability and those of the best, in the words of llama.cpp's server."""
    pieces = entry.top_pieces or (None,) * len(entry.top)
    top = [_scored(*pair, piece) for pair, piece in zip(entry.top, pieces, strict=True)]
    return _scored(entry.token, entry.logprob, entry.piece) | {"top_logprobs": top}


def _scored(token: int, logprob: float, piece: bytes | None) -> dict[str, object]:
    # Half a character cannot be shown as text; the bytes are exact.
    text, numbers = (None, None) if piece is None else (piece.decode(errors="replace"), list(piece))
    # Other servers do not tell the numbers of tokens.
    return {"id": None if token < 0 else token, "token": text, "bytes": numbers, "logprob": logprob}


def described(llm: LocalModel, request: GenerateRequest) -> str:
    """What was chosen for a request, and why: the plan, the template, how tokens are drawn."""
    template = "none (--raw)" if request.messages is None else printable(llm.info.template_origin)
    drawn = ", ".join(deviations(request.params, llm.info.temperature))
    return f"{visible(llm.plan.to_text())}\ntemplate: {template}\nsampling: {drawn}"


def deviations(params: SamplingParams, own: float | None) -> Iterator[str]:
    """The temperature (`own` is what the model recommends), what else is not at its default, and the seed."""
    chosen, whose = params.temperature, ""
    if chosen is None:
        chosen, whose = (DEFAULT_TEMPERATURE, "") if own is None else (own, " (the model's)")
    yield f"temperature {chosen:g}{whose}"
    default = SamplingParams()
    for row in SAMPLING:
        if (value := getattr(params, row.name)) != getattr(default, row.name):
            yield f"{row.name} " + (" ".join(map(repr, value)) if isinstance(value, tuple) else repr(value))
    yield f"seed {params.seed}" if chosen else "greedy"
    if params.structure:
        yield f"{params.structure.kind} of {counted(len(params.structure.text), 'character')}"


def summary(last: Event, params: SamplingParams) -> str:
    """One line on how it went."""
    u, t = last.usage, last.timings
    greedy = params.temperature == 0
    guessed = f"{accepted(t)}, " if t.drafted else ""
    loaded = f"loaded in {t.load_s:.1f} s, " if t.load_s else ""
    cut = f"cut by {by}, " if (by := cut_by(last, params)) else ""
    return (
        f"[{counted(u.prompt_tokens, 'prompt token')} at {t.prompt_tok_s:.0f}/s, "
        f"{counted(u.completion_tokens, 'token')} at {t.decode_tok_s:.0f}/s, {cut}{guessed}{loaded}"
        f"{'greedy' if greedy else f'seed {params.seed}'}]"
    )


def from_disk(s: Streaming) -> str:
    """One line on what passes were like that read weights from disk."""
    whole = s.locked_bytes + s.streamed_bytes
    kept = f"{format_bytes(s.locked_bytes)} of {format_bytes(whole)} of the weights in memory"
    if not s.passes or not s.streamed_bytes:
        return f"[{kept}]"
    if s.experts:
        kept = (
            f"{s.slots:,} of {s.experts:,} experts have a slot, where {s.found:.0%} of the chosen ones were"
        )
    return (
        f"[from disk: {format_bytes(s.bytes_per_token)} a token at {s.disk_bytes_s / 1e9:.2f} GB/s, "
        f"{100 * s.waiting:.0f} % of the time waiting; {kept}]"
    )


def in_slots(s: DeviceSlots) -> str:
    """One line on how often chosen experts were found in slots of a device."""
    kept = f"{s.slots:,} of {s.experts:,} experts have a slot on a device"
    if not s.chosen:
        return f"[{kept}]"
    return f"[{kept}, where {s.found / s.chosen:.0%} of the chosen ones were; {s.came:,} came there]"
