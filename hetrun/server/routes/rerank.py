"""POST /v1/rerank: how well each of some documents meets the requirements of a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.client.events import Event, GenerateRequest, ModelInfo
from hetrun.client.queries import RankPrompts
from hetrun.errors import ContextFull, OptionError
from hetrun.server import fields, request as orders
from hetrun.server.body import json_object
from hetrun.server.client_id import asker
from hetrun.server.disconnect import unless_gone
from hetrun.server.errors import FINAL, ApiError, api_error, wrong_type
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.query import asked
from hetrun.server.routes.embeddings import EmbeddingOrder as Texts, in_time, pooled
from hetrun.server.routes.models import meant
from hetrun.server.service import Service
from hetrun.system.units import counted
from hetrun.text.ranking import best_first, log_odds, probability

PATHS = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking", "/v2/rerank")
DOCUMENTS, TEXTS = "documents", "texts"  # Jina's and Cohere's name, and that of text-embeddings-inference
MOST_DOCUMENTS = 2048
MOST_N = 2**31 - 1
READ = (
    *("model", "query", DOCUMENTS, TEXTS, "top_n"),
    *("return_documents", "return_text", "raw_scores"),
    *("user", "safety_identifier", "priority", "deadline_s"),
)
# text-embeddings-inference's `truncate: false`, and what says how vectors would be encoded, change nothing.
KNOWN = (*READ, "truncate", "truncation_direction", *fields.HINTS, *fields.NEVER)

Json = dict[str, object]


@dataclass(frozen=True)
class RerankOrder:
    """A request for scores."""

    info: ModelInfo
    query: str
    documents: Sequence[str]
    field: str  # that the documents came in
    top_n: int | None
    return_documents: bool
    raw: bool


def routes(service: Service) -> list[Route]:
    async def rerank(request: Request) -> Response:
        body = await json_object(request)
        here = await meant(body, service)
        info = await here.info()
        orders.check(body, info, here, KNOWN)
        order = _order(body, info)
        prompts = await _prompts(here, order)
        asks = _requests(body, prompts, asker(request, body))
        texts = Texts(info, asks, base64=False, dimensions=0, field=order.field)
        ends = await unless_gone(request.receive, in_time(here.client, texts))
        return JSONResponse(_answer(order, ends))

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    return [Route(path, rerank, methods=["POST"], middleware=[crowd]) for path in PATHS]


def _order(body: fields.Body, info: ModelInfo) -> RerankOrder:
    query = body.get("query")
    if query is None:
        raise ApiError("query is missing", "query", "missing_required_parameter")
    if not isinstance(query, str):
        raise wrong_type("query", "a text", query)
    field = TEXTS if body.get(DOCUMENTS) is None and body.get(TEXTS) is not None else DOCUMENTS
    order = RerankOrder(
        info,
        query,
        _documents(body, field),
        field,
        fields.count(body, "top_n", 1, MOST_N),
        fields.flag(body, "return_text" if field == TEXTS else "return_documents"),
        fields.flag(body, "raw_scores"),
    )
    if fields.flag(body, "truncate"):
        message = "truncate is not supported: send documents that fit into the context"
        raise ApiError(message, "truncate", "unsupported_parameter")
    if not info.reranks:
        raise ApiError(
            f"{info.id} is not a reranker: serve a model that judges documents with yes or no, such as "
            "Qwen3-Reranker (a folder, or a GGUF file of it); encoders such as bge-reranker do not run here",
            "model",
            "not_supported",
            status=501,
            headers=FINAL,
        )
    return order


def _documents(body: fields.Body, field: str) -> list[str]:
    given = body.get(field)
    if given is None:
        raise ApiError(f"{field} is missing", field, "missing_required_parameter")
    if not isinstance(given, list):
        raise wrong_type(field, "a list of texts", given)
    if not given:
        raise ApiError(f"{field} is empty: there is nothing to rank", field, "empty_array")
    if len(given) > MOST_DOCUMENTS:
        message = f"{field} may hold {MOST_DOCUMENTS} documents, not {len(given)}: ask in several requests"
        raise ApiError(message, field, "array_above_max_length")
    return [_document(one, f"{field}[{i}]") for i, one in enumerate(given)]


def _document(given: object, where: str) -> str:
    """A text, or an object with one; it may be empty."""
    text = given.get("text") if isinstance(given, Mapping) else given
    if not isinstance(text, str):
        raise wrong_type(where, "a text, or an object with text", text)
    return text


async def _prompts(service: Service, order: RerankOrder) -> list[list[int]]:
    """The prompt of each document; one that does not fit is refused before any is computed."""
    try:
        prompts = await asked(service, RankPrompts(order.query, tuple(order.documents)))
    except OptionError as error:  # a text that takes too long to tokenise
        raise ApiError(str(error), order.field, "invalid_value") from error
    context = order.info.context
    for i, prompt in enumerate(prompts):
        if not prompt or len(prompt) > context:
            size = counted(len(prompt), "token") if prompt else "far too many tokens"
            long = ContextFull(
                f"{order.field}[{i}] has {size} with the query and the instructions; shorten it"
            )
            raise api_error(long, context, f"{order.field}[{i}]")
    return prompts


def _requests(body: fields.Body, prompts: Sequence[Sequence[int]], client: str) -> list[GenerateRequest]:
    one = pooled(body, client, "rank")
    return [replace(one, text=None, tokens=tuple(prompt)) for prompt in prompts]


def _answer(order: RerankOrder, ends: Sequence[Event]) -> Json | list[Json]:
    """Results, the best first, in the form of Jina and Cohere or of text-embeddings-inference."""
    odds = [log_odds(end) for end in ends]
    scores = odds if order.raw else [probability(one) for one in odds]
    best = best_first(odds, order.top_n)
    if order.field == TEXTS:
        return [
            {"index": i, "score": scores[i]}
            | ({"text": order.documents[i]} if order.return_documents else {})
            for i in best
        ]
    tokens = sum(end.usage.prompt_tokens for end in ends)
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": order.documents[i]}} if order.return_documents else {})
        for i in best
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": order.info.id, "results": results, "usage": usage}
