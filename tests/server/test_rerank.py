"""POST /v1/rerank: both forms of its answer, and how everything wrong is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import httpx
import pytest

from hetrun.client.ranking import best_first, probability
from hetrun.server.routes.rerank import MOST_DOCUMENTS, PATHS
from tests.server.test_embeddings import error_of
from tests.support.fakes import INFO, FakeEngine

PATH = "/v1/rerank"


@pytest.fixture
def engine(engine: FakeEngine) -> FakeEngine:
    engine.info = replace(INFO, reranks=True)
    return engine


def score(document: str, query: str = "what") -> float:
    """What the scripted engine makes of a document."""
    return 1 / (1 + math.exp(-len(f"say {query} {document}") / 10))


async def test_the_best_come_first(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    documents = ["aa", "aaaa", "", "aaa"]
    for path in PATHS:
        asked = {"query": "what", "documents": documents, "model": "any"}
        answer = (await http.post(path, json=asked)).json()
        results = answer.pop("results")
        assert answer == {
            "object": "list",
            "model": "fake",
            "usage": {"prompt_tokens": 28, "total_tokens": 28},
        }
        assert [one["index"] for one in results] == [1, 3, 0, 2]
        for one in results:
            expected = {"index": one["index"], "relevance_score": score(documents[one["index"]])}
            assert one == pytest.approx(expected, abs=1e-6)
    request = engine.requests[0]
    assert (request.pooling, request.whole, request.tokens) == ("rank", True, tuple(b"say what aa"))


async def test_documents_as_objects_few_of_them_and_returned(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"query": "what", "documents": [{"text": "a"}, "bbb", {"text": "cc", "id": 7}]}
    asked |= {"top_n": 2, "return_documents": True}
    results = (await http.post(PATH, json=asked)).json()["results"]
    assert [(one["index"], one["document"]) for one in results] == [(1, {"text": "bbb"}), (2, {"text": "cc"})]
    for top_n in (3, 4, 2**31 - 1):
        assert len((await http.post(PATH, json=asked | {"top_n": top_n})).json()["results"]) == 3


async def test_the_form_of_text_embeddings_inference(http: httpx.AsyncClient) -> None:
    asked: dict[str, object] = {"query": "what", "texts": ["a", "bbb"], "truncate": False}
    found = (await http.post("/rerank", json=asked)).json()
    assert [set(one) for one in found] == [{"index", "score"}] * 2
    assert [one["score"] for one in found] == pytest.approx([score("bbb"), score("a")], abs=1e-6)
    found = (await http.post("/rerank", json=asked | {"return_text": True, "raw_scores": True})).json()
    assert [(one["index"], one["text"]) for one in found] == [(1, "bbb"), (0, "a")]
    assert [one["score"] for one in found] == pytest.approx([1.2, 1.0], abs=1e-6)


async def test_many_documents(http: httpx.AsyncClient) -> None:
    documents = ["a" * (i % 50) for i in range(MOST_DOCUMENTS // 8)]
    results = (await http.post(PATH, json={"query": "what", "documents": documents})).json()["results"]
    assert sorted(one["index"] for one in results) == list(range(len(documents)))
    scores = [one["relevance_score"] for one in results]
    assert scores == sorted(scores, reverse=True)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"documents": None}, "documents", "missing_required_parameter"),
    ({"query": None}, "query", "missing_required_parameter"),
    ({"query": ["a"]}, "query", "invalid_type"),
    ({"documents": "a"}, "documents", "invalid_type"),
    ({"documents": []}, "documents", "empty_array"),
    ({"documents": ["a"] * (MOST_DOCUMENTS + 1)}, "documents", "array_above_max_length"),
    ({"documents": ["a", 7]}, "documents[1]", "invalid_type"),
    ({"documents": ["a", {"title": "b"}]}, "documents[1]", "invalid_type"),
    ({"documents": None, "texts": ["a", None]}, "texts[1]", "invalid_type"),
    ({"documents": ["a", "b", "c" * 2100]}, "documents[2]", "context_length_exceeded"),
    ({"documents": None, "texts": ["c" * 2100]}, "texts[0]", "context_length_exceeded"),
    ({"query": "refuse"}, "documents", "invalid_value"),
    ({"top_n": 0}, "top_n", "invalid_value"),
    ({"top_n": 2**31}, "top_n", "invalid_value"),
    ({"top_n": True}, "top_n", "invalid_value"),
    ({"return_documents": 1}, "return_documents", "invalid_type"),
    ({"truncate": True}, "truncate", "unsupported_parameter"),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"deadline_s": 0}, "deadline_s", "invalid_value"),
]


@pytest.mark.parametrize(("wrong", "param", "code"), WRONG)
async def test_wrong_requests(
    wrong: dict[str, Any], param: str, code: str, http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await http.post(PATH, json={"query": "what", "documents": ["a", "b"], **wrong})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)
    assert engine.requests == []  # nothing was computed for it


async def test_strict_servers_refuse_unknown_fields(strict: httpx.AsyncClient) -> None:
    asked = {"query": "what", "documents": ["a"], "model": "fake"}
    assert (await strict.post(PATH, json=asked)).status_code == 200
    response = await strict.post(PATH, json=asked | {"top_k": 2})
    assert error_of(response)["code"] == "unknown_parameter"


async def test_other_models_are_no_rerankers(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.info = INFO
    response = await http.post(PATH, json={"query": "what", "documents": ["a"]})
    error = error_of(response)
    assert (response.status_code, error["code"], response.headers["x-should-retry"]) == (
        501,
        "not_supported",
        "false",
    )
    assert "fake is not a reranker" in error["message"]
    assert "bge-reranker do not run here" in error["message"]
    model = (await http.get("/v1/models")).json()["data"][0]
    assert (model["meta"]["rerank"], model["meta"]["infill"]) == (False, False)


def test_probabilities_of_any_odds() -> None:
    assert [probability(x) for x in (-2000, 0, 2000)] == [0, 0.5, 1]
    assert probability(math.log(3)) == pytest.approx(0.75)
    assert best_first([1.0, 3.0, 1.0, 2.0]) == [1, 3, 0, 2]
    assert best_first([1.0, 3.0, 1.0, 2.0], 2) == [1, 3]
