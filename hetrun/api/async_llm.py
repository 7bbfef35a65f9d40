"""`AsyncLLM`: `LLM` for asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from os import PathLike
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar, Unpack, overload

from hetrun.api.conversation import Chat, ChatKeywords, ChatReader, Chats, ToolOptions, chat_messages
from hetrun.api.keywords import ModelOptions, SamplingKeywords
from hetrun.api.llm import (
    NOT_PICKLED,
    asked,
    described,
    loading_bar,
    model_settings,
    pictured,
    read_chats,
    render_options,
    sampling_params,
    with_options,
)
from hetrun.api.local_model import Collector, LocalModel, reason_of, vectors
from hetrun.api.pictures import PictureSource
from hetrun.api.ranking import Ranked, checked_documents, ranked
from hetrun.api.wording import in_python
from hetrun.backend import Floats
from hetrun.client.completion import (
    ChatChunk,
    Completion,
    Prompt,
    as_prompts,
    completion,
    prompt_request,
)
from hetrun.client.engine_client import LocalClient
from hetrun.client.events import Event, GenerateRequest, Message, ModelInfo
from hetrun.client.queries import Render
from hetrun.client.sampling_params import SamplingParams
from hetrun.engine.engine import CLOSED, opened_elsewhere
from hetrun.errors import EngineStopped
from hetrun.executor.stats import Stats
from hetrun.graph.pooling import Pooling
from hetrun.planner.plan import PlanSet

R = TypeVar("R")


class AsyncLLM:
    """A model in this process, for asyncio.

        async with AsyncLLM("model.gguf", ram="4GiB") as llm:
            print((await llm.chat("Name three colours.", temperature=0)).text)
            async for chunk in llm.chat("Name three more.", stream=True):
                print(chunk.text, end="")

    It has the methods of `LLM`, with the same arguments, as coroutines. `stream`, and `chat` with
    stream=True, are async generators. Properties of `LLM` are methods here. Cancelling a task cancels its
    requests.

    The model loads without blocking the event loop, with `async with` or when it is first used. Arguments are
    those of `LLM`; invalid ones raise at once.
    """

    @with_options
    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        progress: Callable[[float], None] | None = None,
        eager: bool = False,
        **options: Unpack[ModelOptions],
    ) -> None:
        """Read the options; nothing is loaded yet. `progress` is called on another thread."""
        with in_python():
            settings = model_settings(model, options)
        self._load: Callable[[], LocalModel] = lambda: LocalModel.of(
            settings, progress or loading_bar(), eager=eager
        )
        self._loading: Future[LocalModel] | None = None
        self._pid = os.getpid()
        self._client: LocalClient | None = None
        self._closed = False

    # --- answers

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        pictures: Sequence[PictureSource] = (),
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Completion]:
        """Continue one or several prompts, which run together; see `LLM.generate`."""
        model = await self._opened()
        with in_python():
            chosen = sampling_params(model, params, sampling)
            if pictures:
                requests = [pictured(prompts, chosen, pictures, model.info)]
            else:
                requests = [prompt_request(p, chosen) for p in as_prompts(prompts)]
            found = await _collected(model, requests)
        return [completion(events) for events in found]

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        pictures: Sequence[PictureSource] = (),
        **sampling: Unpack[SamplingKeywords],
    ) -> AsyncGenerator[Event, None]:
        """Continue one prompt and yield events as they arrive; see `LLM.stream`."""
        model = await self._opened()
        with in_python():
            chosen = sampling_params(model, params, sampling)
            request = (
                pictured(prompt, chosen, pictures, model.info) if pictures else prompt_request(prompt, chosen)
            )
            async with aclosing(self._events(model, request)) as events:
                async for event in events:
                    yield event

    @overload
    def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **keywords: Unpack[ChatKeywords],
    ) -> Coroutine[Any, Any, Completion]: ...

    @overload
    def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **keywords: Unpack[ChatKeywords],
    ) -> AsyncGenerator[ChatChunk, None]: ...

    @overload
    def chat(
        self,
        messages: Chats,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **keywords: Unpack[ChatKeywords],
    ) -> Coroutine[Any, Any, list[Completion]]: ...

    def chat(
        self,
        messages: Chat | Chats,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        template_options: Mapping[str, object] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Coroutine[Any, Any, Completion | list[Completion]] | AsyncGenerator[ChatChunk, None]:
        """Answer a conversation, or several together; see `LLM.chat`.

        `await` it for a completion, or a list of them for several conversations. With
        stream=True it is an async generator of chunks, for `async for`.
        """
        about_tools = ToolOptions(tools, tool_choice, parallel_tool_calls)
        answer = self._chunks if stream else self._chat
        return answer(messages, params, sampling, about_tools, template_options)

    async def _chat(
        self,
        messages: Chat | Chats,
        params: SamplingParams | None,
        sampling: SamplingKeywords,
        about_tools: ToolOptions,
        template_options: Mapping[str, object] | None,
    ) -> Completion | list[Completion]:
        model = await self._opened()
        with in_python():
            chosen = sampling_params(model, params, sampling)
            asks, several = asked(model, messages, chosen, about_tools, template_options, stream=False)
            answers = read_chats(await _collected(model, [request for request, _ in asks]), asks)
            return answers if several else answers[0]

    async def _chunks(
        self,
        messages: Chat | Chats,
        params: SamplingParams | None,
        sampling: SamplingKeywords,
        about_tools: ToolOptions,
        template_options: Mapping[str, object] | None,
    ) -> AsyncGenerator[ChatChunk, None]:
        model = await self._opened()
        with in_python():
            chosen = sampling_params(model, params, sampling)
            asks, _ = asked(model, messages, chosen, about_tools, template_options, stream=True)
            request, how = asks[0]
            reader = ChatReader(how)
            async with aclosing(self._events(model, request)) as events:
                async for event in events:
                    if chunk := reader.read(event):
                        yield chunk

    async def embed(
        self, texts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None, normalise: bool = True
    ) -> Floats:
        """Vectors for texts, float32 of the shape [number of texts, width]; see `LLM.embed`."""
        model = await self._opened()
        with in_python():
            return vectors(await _collected(model, model.embedding_requests(texts, pooling)), normalise)

    async def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[Ranked]:
        """Documents by how well they meet a query's requirements, the best first; see `LLM.rerank`."""
        with in_python():
            texts = checked_documents(query, documents, top_n)
            requests = await self._aside(lambda model: model.ranking_requests(query, texts))
            found = await _collected(await self._opened(), requests)
            return ranked([events[-1] for events in found], texts, top_n)

    # --- texts and tokens

    async def render(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, object] | None = None,
    ) -> str:
        """The text that the model would see for these messages; see `LLM.render`."""
        with in_python():
            question = Render(chat_messages(messages).messages, render_options(tools, template_options))
        return await self._aside(lambda model: model.ask(question))

    async def tokenize(self, text: str) -> list[int]:
        """The token ids of a text, as `generate` would see it."""
        return await self._aside(lambda model: model.tokenize(text))

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        return await self._aside(lambda model: model.detokenize(tokens))

    async def logits(self, tokens: Sequence[int]) -> Floats:
        """The logits after each token of a text; see `LLM.logits`."""
        return await self._aside(lambda model: model.logits(tokens))

    # --- the model

    async def info(self) -> ModelInfo:
        """Name, path, architecture, context, vocabulary and more of the model."""
        return (await self._opened()).info

    async def plan(self) -> PlanSet:
        """What runs where, and why."""
        return await self._aside(lambda model: model.plan)

    async def stats(self) -> Stats:
        """What was measured so far."""
        return await self._aside(lambda model: model.stats)

    async def memory(self) -> Mapping[str, int]:
        """The memory in use, in bytes by kind; also `limit` and `left`."""
        return await self._aside(lambda model: model.memory)

    async def set_ram(self, ram: int | str) -> PlanSet:
        """Change the memory limit; see `LLM.set_ram`."""
        return await self._aside(lambda model: model.set_ram(ram))

    async def save_prompts(self, path: str | PathLike[str]) -> int:
        """Write computed prompts to a file; see `LLM.save_prompts`."""
        return await self._aside(lambda model: model.save_prompts(path))

    async def load_prompts(self, path: str | PathLike[str]) -> int:
        """Read saved prompts; see `LLM.load_prompts`."""
        return await self._aside(lambda model: model.load_prompts(path))

    async def close(self) -> None:
        """Stop running requests and free the memory; waits for a model that still loads."""
        self._closed = True
        if self._loading is None or os.getpid() != self._pid:
            return
        with suppress(Exception):  # its error was raised where the model was opened
            model = await asyncio.wrap_future(self._loading)
            await asyncio.to_thread(model.close)

    async def __aenter__(self) -> AsyncLLM:
        await self._opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        done = self._loading is not None and self._loading.done() and not self._loading.exception()
        return described(type(self).__name__, self._loading.result() if done and self._loading else None)

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_PICKLED.format(type(self).__name__))

    async def _opened(self) -> LocalModel:
        """The model, when it is loaded."""
        if self._closed:
            raise EngineStopped(CLOSED.replace("LLM(", "AsyncLLM("))
        if self._loading is None:
            self._pid = os.getpid()
            pool = ThreadPoolExecutor(1, "hetrun-load")
            self._loading = pool.submit(self._load)
            pool.shutdown(wait=False)
        if os.getpid() != self._pid:  # in a fork, no thread continues loading
            raise opened_elsewhere(self._pid)
        with in_python():
            # Cancelling this task doesn't stop others from getting the model.
            model = await asyncio.shield(asyncio.wrap_future(self._loading))
            model.check_open()
        return model

    async def _aside(self, work: Callable[[LocalModel], R]) -> R:
        """Call a blocking method on another thread."""
        model = await self._opened()
        with in_python():
            return await asyncio.to_thread(work, model)

    async def _events(self, model: LocalModel, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        if self._client is None:
            self._client = LocalClient(model)
        async with aclosing(self._client.stream(request)) as events:
            async for event in events:
                if event.kind == "error":
                    raise reason_of(event)
                yield event


async def _collected(model: LocalModel, requests: Sequence[GenerateRequest]) -> list[list[Event]]:
    """The events of requests that run together; one wake-up for each request."""
    loop = asyncio.get_running_loop()
    over: asyncio.Queue[int] = asyncio.Queue()

    def when_over(number: int) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no task waits
            loop.call_soon_threadsafe(over.put_nowait, number)

    with Collector(model, requests, when_over) as collector:
        for _ in requests:
            collector.check(await over.get())
    return collector.events
