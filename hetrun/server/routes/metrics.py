"""GET /metrics, in Prometheus' text format.

Written without a client library, which would keep its own counters in this process: the numbers come from
another process as a whole. The engine's totals restart with each of its processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from hetrun.client.events import ModelInfo
from hetrun.client.model_pool import ModelPool
from hetrun.client.queries import EngineState, StateQuery
from hetrun.server.middleware.request_counter import RequestTraffic
from hetrun.server.query import LOOK_S, asked, few
from hetrun.server.routes.models import engines
from hetrun.server.service import Service

FORMAT = "text/plain; version=0.0.4"
STATES = ("prompt", "answer", "displaced", "waiting")

Values = Mapping[str, float]  # by labels as they are written: 'state="prompt"', or nothing


@dataclass(frozen=True)
class Metric:
    """One name and its values."""

    name: str
    kind: Literal["counter", "gauge", "summary"]
    help: str
    values: Values = field(default_factory=dict)

    def of(self, model: str) -> Metric:
        """The same for one of several models."""
        own, values = label("model", model), self.values.items()
        if self.kind == "summary":
            return replace(self, values={f"{end}{{{own}}}": value for end, value in values})
        return replace(self, values={f"{own},{other}" if other else own: value for other, value in values})

    def lines(self) -> Iterator[str]:
        yield f"# HELP hetrun_{self.name} {self.help}"
        yield f"# TYPE hetrun_{self.name} {self.kind}"
        for label, value in self.values.items():
            # Labels of a summary are suffixes of its name.
            where = f"_{label}" if self.kind == "summary" else f"{{{label}}}" if label else ""
            yield f"hetrun_{self.name}{where} {value}"


def routes(service: Service) -> list[Route]:
    async def metrics(request: Request) -> Response:
        health = service.client.health.status
        found = [Metric("up", "gauge", "Whether requests are answered now.", {"": int(health == "ok")})]
        found += of_server(service.traffic)
        several = isinstance(service.client, ModelPool) and service.client.only is None
        for client in engines(service.client):
            if client.health.status in ("ok", "stuck"):  # else there is no engine to ask
                here = replace(service, client=client)
                info = await here.info()
                engine = of_engine(await asked(here, StateQuery(), LOOK_S), info)
                found += [m.of(info.id) for m in engine] if several else engine
        return PlainTextResponse(text(found), headers={"Content-Type": FORMAT})

    return [Route("/metrics", metrics, middleware=few())]


def text(metrics: list[Metric]) -> str:
    """All metrics as text, grouped by name."""
    merged: dict[str, Metric] = {}
    for metric in metrics:
        known = merged.get(metric.name, metric)
        merged[metric.name] = replace(metric, values={**known.values, **metric.values})
    return "".join(f"{line}\n" for metric in merged.values() for line in metric.lines())


def of_server(traffic: RequestTraffic) -> list[Metric]:
    """The metrics of this process."""
    statuses = {label("status", str(status)): n for status, n in sorted(traffic.statuses.items())}
    return [
        Metric("http_requests_total", "counter", "Requests by the status of their answers.", statuses),
        Metric("http_requests_open", "gauge", "Requests that are being answered.", {"": traffic.open}),
        _summary("http_request_seconds", "To the end of an answer.", traffic.seconds, traffic.answered),
    ]


def of_engine(state: EngineState, info: ModelInfo) -> list[Metric]:
    """The metrics of the engine's process."""
    counts, slots = state.counts, state.slots
    model = ",".join((label("name", info.id), label("architecture", info.architecture)))
    ends = {label("end", end): n for end, n in sorted(counts.requests.items())}
    states = {label("state", name): sum(s.state == name for s in slots) for name in STATES}
    held = sum(s.prompt_computed + s.answer_tokens for s in slots if s.state in ("prompt", "answer"))
    found = [
        Metric("model_info", "gauge", "The model that runs.", {model: 1}),
        Metric("requests_total", "counter", "Requests to the engine, by how they ended.", ends),
        Metric("requests", "gauge", "Requests that the engine has.", states),
        _gauge("places", "Sequences that run together.", state.places),
        _gauge("context_tokens", "Tokens that a sequence may have.", state.context),
        _gauge("kv_tokens", "Tokens of running requests with keys and values in memory.", held),
        _counter("prompt_tokens", "Tokens of prompts, of requests that have ended.", counts.prompt_tokens),
        _counter("cached_tokens", "Prompt tokens found in the prefix cache.", counts.cached_tokens),
        _counter("answer_tokens", "Tokens of answers.", counts.answer_tokens),
        _counter("drafted_tokens", "Tokens that were guessed and tried.", counts.drafted),
        _counter("accepted_tokens", "Predicted tokens that were accepted.", counts.accepted),
        _counter("pictures_encoded", "Pictures that were encoded, or parts of some.", counts.pictures),
        _counter("pictures_cached", "Pictures that were known already.", counts.pictures_cached),
        _counter("picture_seconds", "Of encoding pictures.", counts.picture_s),
        _summary("first_token_seconds", "From arrival.", counts.first_token_s, counts.begun),
        _summary("step_seconds", "Of the engine's steps.", counts.step_s, counts.steps),
    ]
    if state.budget is not None:
        found.append(_gauge("budget_bytes", "Memory that everything may take.", state.budget))
    return found + _of_disk(state)


def _of_disk(state: EngineState) -> list[Metric]:
    """Metrics of weights that come from disk."""
    if (s := state.streaming) is None:
        return []
    return [
        _counter("streaming_passes", "Passes that read weights from disk.", s.passes),
        _counter("streaming_bytes", "Bytes that they read.", s.bytes_read),
        _gauge("streaming_bytes_per_second", "Recent rate of reads from disk.", s.disk_bytes_s),
        _gauge("streaming_waiting_share", "Of a pass's time, for the disk.", s.waiting),
        _gauge("streaming_locked_bytes", "Weights that stay in memory.", s.locked_bytes),
        _gauge("streaming_streamed_bytes", "Weights that every pass reads.", s.streamed_bytes),
        _gauge("streaming_least_budget_bytes", "The smallest budget that would do.", s.least),
        *(
            [
                _gauge(
                    "streaming_experts_found_share",
                    "Recent share of chosen experts that were in memory.",
                    s.found,
                )
            ]
            * bool(s.experts)
        ),
    ]


def label(name: str, value: str) -> str:
    """A label, escaped."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{name}="{escaped}"'


def _counter(name: str, help: str, value: float) -> Metric:
    return Metric(f"{name}_total", "counter", help, {"": value})


def _gauge(name: str, help: str, value: float) -> Metric:
    return Metric(name, "gauge", help, {"": value})


def _summary(name: str, help: str, total: float, count: int) -> Metric:
    return Metric(name, "summary", help, {"sum": total, "count": count})
