"""What a request needs to run, from its prepared input: its tokens, its sampler, its limits."""

from __future__ import annotations

import sys

import numpy as np

from hetrun.client.events import GenerateRequest
from hetrun.client.sampling_params import DEFAULT_TEMPERATURE, SamplingParams
from hetrun.engine.loaded_model import (
    LoadedModel,
    check_length,
    prompt_of,
    reranker_of,
    shift_of,
    tokenizer_of,
)
from hetrun.engine.request import ActiveRequest
from hetrun.engine.slot_manager import shortened
from hetrun.errors import OptionError
from hetrun.graph.pooling import MeanPool
from hetrun.sampling.forced import ForcedSampler
from hetrun.sampling.interface import Constraint, Sampler
from hetrun.sampling.sampler import make_sampler
from hetrun.text.detokenizer import StreamDecoder

PROMPT_ROWS = 32 << 20  # bytes of logits that a step may give where every token of a prompt wants its own


def set_up(loaded: LoadedModel, r: ActiveRequest) -> None:
    """Give a prepared request what it needs to run; an error says why it cannot."""
    assert r.prepared
    model, request = loaded.model, r.request
    tokens, spans = prompt_of(loaded, request, r.prepared)
    if request.echo:
        tokenizer_of(loaded)  # or an error, while it can be one of this request
    params, pooling = request.params, request.pooling
    params.check_vocabulary(model.n_vocab)
    _check_forced(request.forced, model.n_vocab)
    if pooling and not model.width:
        raise OptionError("embeddings are not available for this model: it runs through libllama")
    shift, given = shift_of(loaded, request), len(tokens)
    if shift:
        tokens = shortened(tokens, shift, model.context)
    if pooling == "rank":
        reranker_of(loaded)
    check_length(loaded.limits, request, len(tokens))
    # A text that goes on for ever ends after as many tokens as the context has.
    room, most = model.context - (0 if shift else len(tokens)), request.most_tokens
    r.limit = room if most is None else most if shift else min(most, room)
    r.most_of_step = most_tokens(params, model.n_vocab)
    r.sampler = _forced(_sampler(loaded, request, tokens, r.prepared.constraint), request.forced)
    r.decoder = StreamDecoder(tuple(params.stop))
    r.pooled = MeanPool(pooling, len(tokens), model.width) if pooling else None
    r.opened = r.prepared.opened
    r.checkpoint_every = model.checkpoint_every
    r.reach = loaded.speculation.reach if loaded.speculation and not pooling else 0
    r.shift, r.cut = shift, given - len(tokens)
    r.spatial = loaded.pictures is not None and loaded.pictures.vision.spatial
    r.tokens, r.prompt, r.spans = tokens, np.array(tokens, np.int32), spans


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
