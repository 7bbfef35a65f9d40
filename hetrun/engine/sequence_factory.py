"""A request that is prepared becomes one that can run: its tokens, its sampler, what its answer may take."""

from __future__ import annotations

import sys

import numpy as np

from hetrun.client.events import GenerateRequest
from hetrun.client.sampling_params import DEFAULT_TEMPERATURE, SamplingParams
from hetrun.engine.inbox import Request
from hetrun.engine.input_processor import PreparedRequest
from hetrun.engine.loaded_model import (
    LoadedModel,
    check_length,
    prompt_of,
    reranker_of,
    shift_of,
    tokenizer_of,
)
from hetrun.engine.sequence import RunningRequest
from hetrun.engine.slot_manager import shortened
from hetrun.errors import OptionError
from hetrun.graph.pooling import MeanPool
from hetrun.sampling.forced import ForcedSampler
from hetrun.sampling.interface import Constraint, Sampler
from hetrun.sampling.sampler import make_sampler
from hetrun.text.detokenizer import StreamDecoder

PROMPT_ROWS = 32 << 20  # bytes of logits that a step may give where every token of a prompt wants its own


def begun(loaded: LoadedModel, asked: Request, prepared: PreparedRequest) -> RunningRequest:
    """A request as it will run; an error says why it cannot."""
    model = loaded.model
    tokens, spans = prompt_of(loaded, asked.request, prepared)
    if asked.request.echo:
        tokenizer_of(loaded)  # or an error, while it can be one of this request
    params = asked.request.params
    params.check_vocabulary(model.n_vocab)
    _check_forced(asked.request.forced, model.n_vocab)
    pooling = asked.request.pooling
    if pooling and not model.width:
        raise OptionError("embeddings are not available for this model: it runs through libllama")
    shift, given = shift_of(loaded, asked.request), len(tokens)
    if shift:
        tokens = shortened(tokens, shift, model.context)
    if pooling == "rank":
        reranker_of(loaded)
    check_length(loaded.limits, asked.request, len(tokens))
    # A text that goes on for ever ends after as many tokens as the context has.
    room, most = model.context - (0 if shift else len(tokens)), asked.request.most_tokens
    return RunningRequest(
        id=asked.id,
        request=asked.request,
        on_event=asked.on_event,
        tokens=tokens,
        prompt=np.array(tokens, np.int32),
        limit=room if most is None else most if shift else min(most, room),
        most_of_step=most_tokens(params, model.n_vocab),
        sampler=_forced(_sampler(loaded, asked.request, tokens, prepared.constraint), asked.request.forced),
        decoder=StreamDecoder(tuple(params.stop)),
        arrived=asked.arrived,
        pooled=MeanPool(pooling, len(tokens), model.width) if pooling else None,
        opened=prepared.opened,
        checkpoint_every=model.checkpoint_every,
        reach=loaded.speculation.reach if loaded.speculation and not pooling else 0,
        shift=shift,
        cut=given - len(tokens),
        spans=spans,
        spatial=loaded.pictures is not None and loaded.pictures.vision.spatial,
    )


def _sampler(
    loaded: LoadedModel, request: GenerateRequest, prompt: list[int], constraint: Constraint | None
) -> Sampler:
    own, tokenizer = loaded.temperature, loaded.tokenizer
    return make_sampler(
        request.params,
        DEFAULT_TEMPERATURE if own is None else own,
        prompt=[token for token in prompt if token >= 0],  # rows of pictures are none
        context=loaded.model.context,
        pieces=tokenizer.pieces if tokenizer else None,
        encode=tokenizer.encode_plain if tokenizer else None,
        constraint=constraint,
        sampled_logprobs=request.sampled_logprobs,
    )


def _forced(real: Sampler, script: tuple[int, ...]) -> Sampler:
    return ForcedSampler(real, script) if script else real


def _check_forced(script: tuple[int, ...], n_vocab: int) -> None:
    for token in script:
        if not 0 <= token < n_vocab:
            raise OptionError(f"token {token} of the answer is not in the vocabulary of {n_vocab} tokens")


def most_tokens(params: SamplingParams, n_vocab: int) -> int:
    """How many tokens of one sequence a step may have."""
    if params.prompt_logprobs is None:
        return sys.maxsize
    return max(PROMPT_ROWS // (4 * n_vocab), 1)
