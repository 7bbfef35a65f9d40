"""Answers to what fronts ask besides answers of the model; `queries.py` says what may be asked.

Vocabularies are native code, so the engine's thread makes their calls (ADR 0005), between two steps or where
a long pass stands aside. A long text is cut into tokens part by part: answers wait for one of these at most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

from hetrun.client.events import PICTURE_MARK, Message
from hetrun.client.queries import (
    Detokenize,
    EngineState,
    FillPrompt,
    Layers,
    PlanForecast,
    PlanNow,
    PromptLength,
    Question,
    RankPrompts,
    Render,
    SetRam,
    Slot,
    SlotAction,
    SlotDone,
    StateQuery,
    StepSeconds,
    Tokenize,
    TokenizerFacts,
    TokenizerInfo,
    WhatIf,
)
from hetrun.engine.counters import EngineCounters
from hetrun.engine.input_processor import Renderer, seen_of
from hetrun.engine.loaded_model import MOST_LETTERS, LoadedModel, prompts_of, reranker_of, tokenizer_of
from hetrun.engine.pictures.marks import marked, new_mark, parts_of
from hetrun.engine.request import ActiveRequest
from hetrun.engine.step_time import shape_of_chunks
from hetrun.errors import FieldError, OptionError, Overloaded, UserError
from hetrun.memory.kv.prefix_cache import LEAST
from hetrun.memory.ledger import kernel_figures
from hetrun.planner.plan import PlanSet
from hetrun.system.core_sets import CoreSet
from hetrun.system.cpu_topology import this_machine
from hetrun.system.thread_affinity import chosen
from hetrun.text.chat.template import ChatTemplate
from hetrun.text.infill import fill_prompt
from hetrun.text.tokenizer import Tokenizer, whole

R = TypeVar("R")

PART = 1 << 14  # characters, or tokens, at a time: a few milliseconds
MOST_PART = 1 << 17  # characters where a text has no place to be cut
# Before such a space a token ends, where the vocabulary says so (`Vocabulary.cuts_at_spaces`).
_BETWEEN_WORDS = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")


class QueriedModel(Protocol):
    """The part of `LocalModel` that answers are made of."""

    @property
    def template(self) -> ChatTemplate: ...

    @property
    def render(self) -> Renderer | None: ...

    @property
    def plan(self) -> PlanSet: ...

    @property
    def held(self) -> EngineCounters: ...

    def set_ram(self, ram: int) -> PlanSet: ...

    def foresee(self, changes: Mapping[str, object]) -> PlanForecast: ...

    def call(self, work: Callable[[LoadedModel], R]) -> R:
        """Call a function on the engine's thread, between two steps."""
        ...

    def aside(self, work: Callable[[LoadedModel], R]) -> R:
        """Call a function on the engine's thread, that does nothing to the model."""
        ...


def answered(llm: QueriedModel, question: Question[Any]) -> object:
    """The answer, which has the type that the question says; waits for it."""
    match question:
        case Tokenize():
            return _tokens(llm, question)
        case FillPrompt():
            return _fill_prompt(llm, question)
        case RankPrompts(query, documents):
            return _rank_prompts(llm, query, documents)
        case Detokenize(tokens):
            return [piece for part in _parts_of(tokens) for piece in _pieces(llm, part)]
        case TokenizerInfo():
            return llm.aside(lambda loaded: _facts(tokenizer_of(loaded), llm.template))
        case Render(messages, options):
            return _rendered(llm, marked(messages, PICTURE_MARK), options)
        case PromptLength():
            return _prompt_length(llm, question)
        case WhatIf(changes):
            return llm.foresee(changes)
        case PlanNow():
            return plan_json(llm.plan)
        case StepSeconds(chunks):
            return llm.aside(lambda loaded: loaded.times.seconds(shape_of_chunks(chunks)))
        case SetRam(nbytes):
            return dict(llm.set_ram(nbytes).memory)
        case SlotAction():
            return llm.call(lambda loaded: _slot_action(loaded, question))
        case Layers():
            return llm.held.model.places
        case StateQuery():
            return state(llm.held)
    raise OptionError(f"the engine does not know what {type(question).__name__} is")


# --- texts


def _tokens(llm: QueriedModel, question: Tokenize) -> list[int]:
    text, tokens = whole(question.text), list[int]()
    cuts = llm.aside(lambda loaded: tokenizer_of(loaded).cuts_at_spaces)
    for i, part in enumerate(parts(text, cuts)):
        add = question.add_special and i == 0
        tokens += llm.aside(_encode(part, add, question.parse_special))
    return tokens


def _rendered(llm: QueriedModel, messages: tuple[Message, ...], options: Mapping[str, object]) -> str:
    if llm.render is None:
        raise OptionError("this model does not accept messages; give it a text or tokens")
    return llm.render(messages, options)


def _prompt_length(llm: QueriedModel, question: PromptLength) -> int:
    """Without encoding its pictures; how many tokens each takes follows from its size."""
    store = llm.aside(lambda loaded: loaded.pictures)
    seen = [seen_of(file, store, lambda work: llm.call(lambda loaded: work())) for file in question.pictures]
    mark, text = "", question.text or ""
    if question.messages is not None:
        mark = new_mark()
        text = _rendered(llm, marked(question.messages, mark), question.options)
    texts = parts_of(text, mark, len(seen))
    of_texts = [len(_tokens(llm, Tokenize(part, add_special=not i))) for i, part in enumerate(texts)]
    return sum(of_texts) + sum(picture.n_tokens for picture in seen)


def _encode(part: str, add_special: bool, parse_special: bool) -> Callable[[LoadedModel], list[int]]:
    return lambda loaded: tokenizer_of(loaded).encode_as(part, add_special, parse_special)


def parts(text: str, cuts_at_spaces: bool) -> Iterator[str]:
    """A text in parts whose tokens, one after the other, are those of the whole."""
    at = 0
    while True:
        space = _BETWEEN_WORDS.search(text, at + PART) if cuts_at_spaces else None
        end = space.start() if space else len(text)
        if end - at > MOST_PART:
            raise OptionError(
                f"{end - at} characters would have to be tokenised at once, while other requests "
                f"wait; the limit is {MOST_PART}: send less at a time"
            )
        yield text[at:end]
        if space is None:
            return
        at = end


def _fill_prompt(llm: QueriedModel, question: FillPrompt) -> list[int]:
    tokenizer = llm.aside(tokenizer_of)
    fim, begins, bos = llm.aside(lambda loaded: (tokenizer.fim, tokenizer.add_bos, tokenizer.bos))
    context = llm.held.model.context
    return fill_prompt(
        question,
        fim,
        bos if begins else None,
        context,
        plain=lambda text: _tokens(llm, Tokenize(text, add_special=False, parse_special=False)),
        special=lambda text: _tokens(llm, Tokenize(text, add_special=False)),
    )


def _rank_prompts(llm: QueriedModel, query: str, documents: tuple[str, ...]) -> list[list[int]]:
    """The prompt of each document; one that is far too long for the context is not tokenised, and its list
    is empty."""
    template = llm.aside(reranker_of).template
    most = MOST_LETTERS * llm.held.model.context

    def encode(text: str, special: bool) -> list[int]:
        return _tokens(llm, Tokenize(text, add_special=False, parse_special=special))

    found = []
    for i, document in enumerate(documents):
        try:
            long = len(query) + len(document) > most
            found.append([] if long else template.tokens(query, document, encode))
        except OptionError as error:
            raise OptionError(f"document {i}: {error}") from error
    return found


def _parts_of(tokens: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for at in range(0, len(tokens), PART):
        yield tokens[at : at + PART]


def _pieces(llm: QueriedModel, tokens: tuple[int, ...]) -> list[bytes]:
    return llm.aside(lambda loaded: [tokenizer_of(loaded).piece(token) for token in tokens])


def _facts(tokenizer: Tokenizer, template: ChatTemplate) -> TokenizerFacts:
    return TokenizerFacts(
        n_tokens=tokenizer.n_tokens,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        add_bos=tokenizer.add_bos,
        bos_text=tokenizer.bos_text,
        eos_text=tokenizer.eos_text,
        template=template.source,
        template_origin=template.origin,
    )


# --- slots


def _slot_action(loaded: LoadedModel, asked: SlotAction) -> SlotDone:
    """Save, restore or forget what was computed last in a slot; on the engine's thread."""
    slots, number, places = loaded.slots, asked.slot, loaded.model.max_sequences
    if number >= places:
        message = f"slot {number} does not exist: they are numbered from 0 to {places - 1}"
        raise FieldError(message, "id_slot", "invalid_value")
    if slots.is_taken(number):
        raise Overloaded(f"slot {number} is answering a request; ask again when it has ended", 1.0)
    held = slots.last(number)
    if asked.action == "erase":
        if loaded.prefixes:
            loaded.prefixes.forget(held)
        slots.put(number, held[:0])
        return SlotDone(len(held))
    path = Path(asked.path)
    if asked.action == "restore":
        held = prompts_of(loaded).load_one(path)
        slots.put(number, held)
        return SlotDone(len(held), path.lstat().st_size)
    if not (n := prompts_of(loaded).save_one(path, held)):
        raise UserError(
            f"nothing is kept of slot {number}: it has computed fewer than {LEAST} tokens, or they had to "
            "make room"
        )
    return SlotDone(n, path.lstat().st_size)


# --- the engine


def plan_json(plans: PlanSet) -> dict[str, Any]:
    """Plans in JSON, and the cores that they run on."""
    some = cores_of(plans)
    cores = {"cores": [some[n].to_json() for n in sorted(some)]} if some else {}
    return plans.to_json() | cores


def cores_of(plans: PlanSet) -> Mapping[int, CoreSet]:
    """Where this many threads run, unless the system puts them anywhere or there is one for each CPU."""
    used = {plan.threads: chosen().of(plan.threads) for plan in plans.plans.values()}
    return {n: cores for n, cores in used.items() if cores.cpus != this_machine().cpus}


def state(held: EngineCounters) -> EngineState:
    """What the engine has and did, without asking its thread."""
    now, model = perf_counter(), held.model
    slots = [
        *(_running(r, now, displaced=False) for r in held.running),
        *(_running(r, now, displaced=True) for r in held.displaced),
        *(Slot(w.id, "waiting", now - w.arrived, prompt_tokens=w.n_prompt) for w in held.waiting),
    ]
    return EngineState(
        held.counts,
        tuple(slots),
        places=model.max_sequences,
        context=model.context,
        budget=model.plans.memory.get("limit"),
        streaming=model.stats.streaming,
        memory=dict(model.plans.memory),
        in_use=dict(model.in_use),
        used=kernel_figures().total,
        reason=model.reason,
        threads=_threads(model.plans),
        devices={name: dict(bill) for name, bill in model.plans.devices.items()},
        crossed=dict(model.crossed),
        waited_s=model.stats.wait_seconds,
        at=now,
    )


def _threads(plans: PlanSet) -> dict[str, int]:
    """With how many threads answers are written, and prompts read."""
    by_bucket = list(plans.plans.values())
    return {"decode": by_bucket[0].threads, "prefill": by_bucket[-1].threads} if by_bucket else {}


def _running(r: ActiveRequest, now: float, *, displaced: bool) -> Slot:
    computed = min(r.computed, r.n_prompt)
    return Slot(
        r.id,
        "displaced" if displaced else "answer" if computed == r.n_prompt else "prompt",
        now - r.arrived,
        prompt_tokens=r.n_prompt,
        prompt_computed=computed,
        cached_tokens=r.cached,
        answer_tokens=r.generated,
        answer_limit=r.limit,
        place=r.slot,
    )
