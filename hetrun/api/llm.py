"""`LLM`: a model in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar, Unpack, overload

from hetrun.api.conversation import (
    Chat,
    ChatKeywords,
    ChatReader,
    Chats,
    ToolOptions,
    chat_messages,
    chat_request,
    conversations,
    read_chat,
)
from hetrun.api.keywords import ModelOptions, SamplingKeywords
from hetrun.api.local_model import LocalModel
from hetrun.api.notebook import notebook_progress
from hetrun.api.pictures import PictureSource, marked_prompt
from hetrun.api.ranking import Ranked
from hetrun.api.wording import in_python
from hetrun.backend import Floats
from hetrun.client.completion import ChatChunk, Completion, Prompt, completion, prompt_request
from hetrun.client.events import Event, GenerateRequest, Message, ModelInfo
from hetrun.client.queries import Render
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import OPTIONS, Settings
from hetrun.errors import OptionError
from hetrun.executor.stats import Stats
from hetrun.graph.pooling import Pooling
from hetrun.planner.plan import PlanSet
from hetrun.text.answers.reading import AnswerFormat

NOT_PICKLED = (
    "a model cannot be pickled: open it in each process with {}(path), or let one process answer all of them "
    "(hetrun serve)"
)


F = TypeVar("F", bound=Callable[..., None])


def with_options(function: F) -> F:
    """Add the options of a model to a docstring, so that `help` lists them."""
    rows = [
        f"{name}: {option.help}{f' (default: {option.shows})' if option.shows else ''}"
        for name, option in OPTIONS.items()
        if name in ModelOptions.__optional_keys__
    ]
    if function.__doc__:  # python -OO has none
        function.__doc__ += "\n\n" + "\n".join(f"        {row}" for row in rows) + "\n"
    return function


class LLM:
    """A model in this process.

        with LLM("model.gguf", ram="4GiB") as llm:
            print(llm.chat("Name three colours.", temperature=0).text)

    Any thread may call its methods; requests that run at the same time are computed together. After
    `os.fork()`, only the process that opened the model can use it.

    model: a .gguf file, a folder with safetensors, `hf:user/repo`, or a name that `hetrun list` shows; the
        demonstration model by default.
    progress: called with the loaded share, from 0 to 1; a notebook shows a bar without it.
    eager: load everything now, instead of some of it with the first long prompt.
    options: those of the command line, with `_` for `-`: ctx, ram, threads, backends, kv_type, ...;
        `help(LLM.__init__)` lists all of them. Options that are not given come from the environment
        (HETRUN_CTX) and the configuration file.
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
        """Load a model. Raises UserError, which says what to change, if that is impossible."""
        with in_python():
            settings = model_settings(model, options)
            self._model = LocalModel.of(settings, progress or loading_bar(), eager=eager)

    # --- answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        pictures: Sequence[PictureSource] = (),
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Completion]:
        """Continue one or several prompts, which run together; returns a list with one completion for each.

        prompts: a text, a list of token ids, or a list of these. No chat template is applied.
        params: the sampling parameters.
        pictures: paths, bytes or images of Pillow, for a prompt that is one text. Each is where the text has
            `<__media__>`; all are before it if it has none.
        sampling: single fields of `SamplingParams`, such as temperature=0; they override `params`.
        """
        with in_python():
            chosen = sampling_params(self._model, params, sampling)
            if pictures:
                request = pictured(prompts, chosen, pictures, self._model.info)
                return [completion(events) for events in self._model.collect([request])]
            return self._model.generate(prompts, chosen)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        pictures: Sequence[PictureSource] = (),
        **sampling: Unpack[SamplingKeywords],
    ) -> Generator[Event, None, None]:
        """Continue one prompt and yield events as they arrive: `event.text` is more of the answer.

        The last event has the kind "done", with finish_reason, usage and timings. Leaving the loop stops the
        model. Arguments are those of `generate`.
        """
        with in_python():
            chosen = sampling_params(self._model, params, sampling)
            self._model.check_open()
            request = (
                pictured(prompt, chosen, pictures, self._model.info)
                if pictures
                else prompt_request(prompt, chosen)
            )
        return self._events(request)

    def _events(self, request: GenerateRequest) -> Generator[Event, None, None]:
        with in_python():
            yield from self._model.stream_request(request)

    @overload
    def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **keywords: Unpack[ChatKeywords],
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **keywords: Unpack[ChatKeywords],
    ) -> Generator[ChatChunk, None, None]: ...

    @overload
    def chat(
        self,
        messages: Chats,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **keywords: Unpack[ChatKeywords],
    ) -> list[Completion]: ...

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
    ) -> Completion | list[Completion] | Generator[ChatChunk, None, None]:
        """Answer a conversation, or several together, through the model's chat template.

        messages: a list of `{"role": ..., "content": ...}` with the roles system, user, assistant and tool; a
            string is one message from the user. The `message` of a completion can be appended to them. A list
            of strings, or of such lists, is several conversations: a list of their completions is returned.
            A content may be a list of parts, with pictures for models that read them:
            `{"type": "text", "text": ...}`, `{"type": "image", "image": ...}` with a path, bytes or an image
            of Pillow, or OpenAI's `image_url` with a path or a data URL.
        params: the sampling parameters.
        stream: yield chunks as they arrive instead of returning a completion; leaving the loop stops the
            model. For one conversation only.
        tools: functions that the model may call, as OpenAI has them:
            `{"type": "function", "function": {"name": ..., "description": ..., "parameters": SCHEMA}}`.
        tool_choice: "auto" (the model decides), "none", "required", or
            `{"type": "function", "function": {"name": ...}}` for one function.
        parallel_tool_calls: whether an answer may contain several calls.
        template_options: variables of the chat template, such as `{"enable_thinking": False}`.
        sampling: single fields of `SamplingParams`, such as temperature=0; they override `params`.
        """
        with in_python():
            about_tools = ToolOptions(tools, tool_choice, parallel_tool_calls)
            chosen = sampling_params(self._model, params, sampling)
            asks, several = asked(self._model, messages, chosen, about_tools, template_options, stream=stream)
            self._model.check_open()
            if stream:
                return self._chunks(*asks[0])
            answers = read_chats(self._model.collect([request for request, _ in asks]), asks)
            return answers if several else answers[0]

    def _chunks(self, request: GenerateRequest, how: AnswerFormat) -> Generator[ChatChunk, None, None]:
        reader = ChatReader(how)
        with in_python():
            for event in self._model.stream_request(request):
                if chunk := reader.read(event):
                    yield chunk

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None, normalise: bool = True
    ) -> Floats:
        """Vectors for texts: float32 of the shape [number of texts, width], so (1, width) for one text.

        texts: a text, a list of token ids, or a list of these.
        pooling: the "mean" of the hidden states, or that of the "last" or the first token ("cls"); None: as
            the model's file says.
        normalise: scale vectors to length 1.
        """
        with in_python():
            return self._model.embed(texts, pooling=pooling, normalise=normalise)

    def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[Ranked]:
        """Documents by how well they meet a query's requirements, the best first; needs a reranker, such as
        Qwen3-Reranker.

        query: what is looked for.
        documents: texts, each judged by itself.
        top_n: return only this many of the best.
        """
        with in_python():
            return self._model.rerank(query, documents, top_n=top_n)

    # --- texts and tokens

    def render(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, object] | None = None,
    ) -> str:
        """The text that the model sees for these messages, rendered by its chat template.

        messages, tools, template_options: as for `chat`; the option `{"add_generation_prompt": False}` leaves
            out the beginning of the answer.
        """
        with in_python():
            return self._model.ask(
                Render(chat_messages(messages).messages, render_options(tools, template_options))
            )

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a text, as `generate` would see it."""
        with in_python():
            return self._model.tokenize(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        with in_python():
            return self._model.detokenize(tokens)

    def logits(self, tokens: Sequence[int]) -> Floats:
        """The logits after each token of a text, float32 of the shape [number of tokens, vocabulary]."""
        with in_python():
            return self._model.logits(tokens)

    # --- the model

    @property
    def info(self) -> ModelInfo:
        """Name, path, architecture, context, vocabulary and more of the model."""
        return self._model.info

    @property
    def plan(self) -> PlanSet:
        """What runs where, and why."""
        with in_python():
            return self._model.plan

    @property
    def stats(self) -> Stats:
        """What was measured so far."""
        with in_python():
            return self._model.stats

    @property
    def memory(self) -> Mapping[str, int]:
        """The memory in use, in bytes by kind; also `limit` and `left`."""
        with in_python():
            return self._model.memory

    def set_ram(self, ram: int | str) -> PlanSet:
        """Change the memory limit and return the new plan.

        ram: bytes, or a text such as "1.5GiB".

        The change happens between two steps; running answers continue. Raises BudgetError with the smallest
        possible limit if it is too low; nothing has changed then.
        """
        with in_python():
            return self._model.set_ram(ram)

    def save_prompts(self, path: str | PathLike[str]) -> int:
        """Write computed prompts to a file and return their number.

        path: the file, for `load_prompts` or the option prompt_cache of another process.
        """
        with in_python():
            return self._model.save_prompts(path)

    def load_prompts(self, path: str | PathLike[str]) -> int:
        """Read saved prompts and return their number.

        path: the file. Raises UserError if it is damaged, or belongs to another model or other options.
        """
        with in_python():
            return self._model.load_prompts(path)

    def close(self) -> None:
        """Stop running requests and free the memory. In a fork this does nothing."""
        self._model.close()

    def __enter__(self) -> LLM:
        self._model.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return described(type(self).__name__, self._model)

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_PICKLED.format(type(self).__name__))


# --- shared with `AsyncLLM`


def model_settings(model: str | PathLike[str] | None, options: ModelOptions) -> Settings:
    """The options of a model, with the environment and the configuration file."""
    for name in options:
        if name in OPTIONS and name not in ModelOptions.__optional_keys__:
            flag = OPTIONS[name].flags[-1]
            raise OptionError(f"{name} is an option of commands only (their {flag.lstrip('-')})")
    return Settings.resolve(environ=None, model=None if model is None else str(model), **options)


def loading_bar() -> Callable[[float], None] | None:
    """A progress bar in a notebook."""
    return notebook_progress("loading the model")


def sampling_params(
    model: LocalModel, params: SamplingParams | None, keywords: SamplingKeywords
) -> SamplingParams:
    """The given parameters, else the model's defaults, changed by keywords."""
    base = params or model.defaults
    return base.changed(keywords) if keywords else base


def pictured(
    prompt: object, params: SamplingParams, pictures: Sequence[object], info: ModelInfo
) -> GenerateRequest:
    """A text with pictures as a request."""
    text, files = marked_prompt(prompt, pictures, info)
    return GenerateRequest(params, text=text, pictures=files)


Ask = tuple[GenerateRequest, AnswerFormat]  # a chat as a request to a model, and the parser of its answer


def asked(
    model: LocalModel,
    messages: Chat | Chats,
    params: SamplingParams,
    about_tools: ToolOptions,
    template_options: Mapping[str, object] | None,
    *,
    stream: bool,
) -> tuple[list[Ask], bool]:
    """The conversations as requests, and whether several were given."""
    found, several = conversations(messages)
    if several and stream:
        raise OptionError(
            "stream=True is for one conversation: call chat for each of them, or leave stream out to get a "
            "list of answers"
        )
    asks: list[Ask] = []
    for i, one in enumerate(found):
        try:
            checked = chat_messages(one)
        except OptionError as error:
            raise OptionError(f"conversation {i}: {error}") if several else error from None
        asks.append(
            chat_request(
                checked,
                params,
                about_tools=about_tools,
                template_options=template_options,
                info=model.info,
                settings=model.settings,
            )
        )
    return asks, several


def read_chats(answers: Sequence[Sequence[Event]], asks: Sequence[Ask]) -> list[Completion]:
    """The events of finished answers as objects."""
    return [read_chat(events, how) for events, (_, how) in zip(answers, asks, strict=True)]


def render_options(
    tools: Sequence[Mapping[str, Any]] | None, template_options: Mapping[str, object] | None
) -> dict[str, object]:
    """The variables of a template."""
    options = dict(template_options or {})
    return {**options, "tools": list(tools)} if tools else options


def described(kind: str, model: LocalModel | None) -> str:
    """The repr of an object with a model."""
    if model is None:
        return f"<{kind}, not loaded>"
    state = ", closed" if model.is_closed else ""
    return f"<{kind} {model.info.id}, context {model.info.context}{state}>"
