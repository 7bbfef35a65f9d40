"""From a model's files and settings to what the engine runs: model, tokenizer, template, known prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from hetrun.backend import registry
from hetrun.backend.picture_encoder import NoVision, PictureSetup, Vision
from hetrun.client.events import GenerateRequest, Message, ModelInfo
from hetrun.config import Settings
from hetrun.engine.first_look import FirstLook
from hetrun.engine.input_processor import Renderer
from hetrun.engine.loaded_model import NOT_SAVED, LoadedModel
from hetrun.engine.pictures.store import PictureStore
from hetrun.engine.prefix_store import PrefixStore, check_place
from hetrun.engine.speculation.draft_model import DraftModel
from hetrun.engine.speculation.interface import Speculation
from hetrun.engine.speculation.methods import drafted, lookup, predicted
from hetrun.errors import BackendUnavailable, ModelFileError, OptionError, UserError
from hetrun.executor import planned_model as models
from hetrun.executor.interface import Model
from hetrun.executor.library.model import WholeModel
from hetrun.loader.open_model import open_model
from hetrun.loader.source import ModelSource
from hetrun.loader.tensor_list import parameters
from hetrun.memory.kv.prefix_cache import CACHED, Prefixes
from hetrun.pictures.picture import Picture
from hetrun.planner.options import Options, Wishes
from hetrun.system.progress import Progress
from hetrun.text.chat import ChatTemplate, checked_messages
from hetrun.text.chat.messages import RESERVED, checked_objects
from hetrun.text.chat.reasoning import mark_of, switched
from hetrun.text.chat.renderer import TemplateWorker
from hetrun.text.chat.tool_prompt import needs_telling, told
from hetrun.text.reranking import reranker_of
from hetrun.text.tokenizer import Tokenizer, open_vocabulary
from hetrun.text.tool_parsers.formats import family

log = logging.getLogger(__name__)

BLIND = NoVision("this model reads no pictures")


def load(
    source: ModelSource,
    templates: TemplateWorker,
    settings: Settings,
    options: Options,
    progress: Progress | None,
    most_waiting: int | None = None,
    first: GenerateRequest | None = None,
    vision: Vision | NoVision = BLIND,
    decode: Callable[[bytes], Picture] | None = None,
) -> LoadedModel:
    """Everything that runs; called on the engine thread. What is wrong with the `first` request is told
    before weights are read. `vision` reads pictures, of which `decode` gives the pixels."""
    start = perf_counter()
    if isinstance(vision, Vision):
        options = replace(options, spatial=vision.spatial, whole=vision.whole)
    if settings.prompt_cache:
        check_place(settings.prompt_cache)
    tokenizer = open_tokenizer(source)  # first: it is read in no time, and may be wrong
    with ExitStack() as undo:
        if tokenizer:
            undo.callback(tokenizer.close)
        speculation = speculation_of(settings, options, tokenizer)
        if speculation:
            undo.callback(speculation.close)
        render = renderer(templates, tokenizer, template_variables(settings))
        look = FirstLook(first, tokenizer, render, vision.reason if isinstance(vision, NoVision) else "")
        model = models.open_planned(source, options, progress, look)
        undo.callback(model.close)
        speculation = with_block(speculation, settings, model)
        undo.pop_all()
    remark_on_context(settings, source)
    temperature = settings.temperature if settings.temperature is not None else source.temperature
    most_tokens = model.most_cached if isinstance(model, models.PlannedModel) else None
    prefixes = Prefixes(model, most_kept(model), most_tokens)
    prompts = PrefixStore(model, prefixes, options) if isinstance(model, models.PlannedModel) else None
    pictures = pictures_of(vision, decode, model, tokenizer, prefixes)
    return LoadedModel(
        model,
        tokenizer,
        render,
        temperature,
        load_s=perf_counter() - start,
        pictures=pictures if isinstance(pictures, PictureStore) else None,
        no_pictures="" if isinstance(pictures, PictureStore) else pictures,
        diagnose=lambda: bad_weights(source),
        most_waiting=most_waiting,
        prefixes=prefixes,
        prompts=prompts,
        speculation=speculation,
        grammars=look.grammars,
        reranker=reranker_of(source, tokenizer) if model.width else None,
        ending=remembering(prompts, settings.prompt_cache),
        shift=settings.context_shift,
    )


def pictures_of(
    vision: Vision | NoVision,
    decode: Callable[[bytes], Picture] | None,
    model: Model,
    tokenizer: Tokenizer | None,
    prefixes: Prefixes,
) -> PictureStore | str:
    """What reads pictures, or why nothing does."""
    if isinstance(vision, NoVision):
        return vision.reason
    if tokenizer is None or not isinstance(model, models.PlannedModel) or decode is None:
        return "this model reads no pictures here: it runs through libllama, or has no tokenizer"
    if vision.width != model.width * (1 + vision.deepstack):
        return (
            f"the vision tower {vision.path} belongs to another model: its rows are "
            f"{vision.width // (1 + vision.deepstack)} wide, and this model is {model.width}"
        )
    if vision.deepstack and not model.keeps_hidden:
        return (
            "this model takes rows of pictures between its layers, which is not possible while its weights "
            "come from disk; allow more memory with --ram, or use a smaller type of weights"
        )
    try:
        encoding = registry.picture_encoder()
    except BackendUnavailable as error:
        return str(error)
    threads = model.plans.plan(model.plans.ubatch).threads
    tokenize = partial(tokenizer.encode_as, add_special=False, parse_special=True)
    # A picture leaves room for a question, and rows that see each other go through one pass.
    most = min(model.context // 2, model.plans.ubatch if vision.whole else model.context)
    setup = PictureSetup(vision, threads, tokenize, most)
    return PictureStore(vision, setup, encoding, decode, model, prefixes)


def remark_on_context(settings: Settings, source: ModelSource) -> None:
    """Most models write nonsense beyond the length that they were trained for."""
    trained = source.get_int("context_length", 0, 0, 1 << 31)
    if settings.ctx is not None and settings.ctx > trained > 0:
        log.warning(
            "--ctx %d is more than the %d tokens that the model was trained for: answers may get worse",
            settings.ctx,
            trained,
        )


def speculation_of(settings: Settings, options: Options, tokenizer: Tokenizer | None) -> Speculation | None:
    """How tokens are guessed, by what is no part of the model."""
    kind, _, path = settings.spec.partition(":")
    if kind == "off":
        return None
    exact = is_exact(settings)
    return drafted(draft_model(Path(path).expanduser(), options, tokenizer), exact) if path else lookup(exact)


def is_exact(settings: Settings) -> bool:
    """What was not asked for by name changes no text, and neither does anything with --deterministic."""
    return settings.spec == "auto" or settings.deterministic


def with_block(found: Speculation | None, settings: Settings, model: Model) -> Speculation | None:
    """The same, with the block inside the model's file that predicts, where that is there and asked for."""
    if settings.spec not in ("auto", "mtp"):
        return found
    if isinstance(model, models.PlannedModel) and model.predictor:
        return predicted(model.predictor, is_exact(settings), model.keeps_hidden)
    if settings.spec == "auto":
        return found
    raise OptionError(
        "--spec mtp: the file of this model has no block that predicts further tokens (MTP, nextn), or none "
        "of its backends runs it; lookup and draft:MODEL work with every model"
    )


def draft_model(path: Path, options: Options, tokenizer: Tokenizer | None) -> DraftModel:
    """A model that guesses for another one. It is opened first, so that the other's books count it."""
    if not path.exists():
        raise UserError(f"{path} does not exist; --spec draft:MODEL takes a .gguf file or a folder")
    source = open_model(path)
    own = open_tokenizer(source)
    if own is None or tokenizer is None:
        raise UserError(f"{path} cannot be the draft model: both models need a vocabulary, to be compared")
    try:
        if own.pieces() != tokenizer.pieces():
            raise UserError(f"{path} cannot be the draft model: its vocabulary is different")
        n_tokens = own.n_tokens
    finally:
        own.close()
    wishes = Wishes(options.wishes.threads)
    small = replace(
        options, wishes=wishes, ram=None, planner="static", streaming="off", eager=False, mtp="off"
    )
    small = replace(small, spatial=False, whole=False)  # it reads no pictures
    return DraftModel(models.open_planned(source, small), n_tokens)


def remembering(prompts: PrefixStore | None, path: Path | None) -> Callable[[], None]:
    """Read the file of prompts that was asked for; what is to be done with it at the end."""
    if path is None:
        return lambda: None
    if prompts is None:
        log.warning("%s is not used: %s", path, NOT_SAVED)
        return lambda: None
    prompts.begin(path)
    return partial(prompts.end, path)


def most_kept(model: Model) -> int:
    """How many prompts stay in the KV cache; a library has as many places as sequences that run."""
    return model.max_sequences if isinstance(model, WholeModel) else CACHED


def bad_weights(source: ModelSource) -> UserError:
    """What is wrong with the weights, whose results are no numbers."""
    from hetrun.loader.weight_check import first_bad_value  # on use: it reads the whole file

    too_large = (
        "every weight is finite, but the results are not numbers: some weights are so large that they "
        "overflow; download or convert the model again (and if another program can run it, please report it)"
    )
    try:
        return first_bad_value(source) or ModelFileError(source.path, too_large)
    except UserError as error:  # the file has changed meanwhile, which explains enough
        return error


def template_of(source: ModelSource, settings: Settings) -> ChatTemplate:
    """The chat template in use, which knows where it comes from."""
    if settings.chat_template:
        return ChatTemplate.named(settings.chat_template)
    return ChatTemplate.of_model(source)


def template_variables(settings: Settings) -> dict[str, object]:
    """Variables that the template gets if a request does not set them."""
    given = dict(settings.chat_template_kwargs or {})
    if forbidden := RESERVED & given.keys():
        flag = "chat_template_kwargs (--chat-template-kwargs)"
        raise OptionError(f"{flag} may not set {min(forbidden)}: hetrun itself gives that to templates")
    return given if settings.reasoning == "auto" else switched(settings.reasoning == "on") | given


def renderer(
    templates: TemplateWorker, tokenizer: Tokenizer | None, usual: Mapping[str, object] | None = None
) -> Renderer:
    """Messages to text by the template in use; `usual`: variables that a request may set to others."""

    # Asked for here, because these are native calls.
    bos, eos = (tokenizer.bos_text, tokenizer.eos_text) if tokenizer else ("", "")

    def render(messages: tuple[Message, ...], options: Mapping[str, object]) -> str:
        if "messages" in options:
            raise OptionError(
                "messages cannot be a template option: the template gets the messages of the request"
            )
        variables: dict[str, Any] = {"bos_token": bos, "eos_token": eos, **(usual or {}), **options}
        if needs_telling(templates.template, variables.get("tools")):
            tools = checked_objects("tools", variables.pop("tools", None))
            return templates.render(told(checked_messages(messages), tools), **variables)
        return templates.render(messages, **variables)

    return render


def open_tokenizer(source: ModelSource) -> Tokenizer | None:
    """The model's tokenizer; None where it has none, or where nothing is installed that could read it."""
    vocabulary = open_vocabulary(source)
    return Tokenizer(vocabulary) if vocabulary else None


def describe(source: ModelSource, template: ChatTemplate, loaded: LoadedModel) -> ModelInfo:
    """What fronts show of a model."""
    return ModelInfo(
        name=source.name,
        path=source.path,
        architecture=source.architecture,
        n_vocab=loaded.model.n_vocab,
        context=loaded.model.context,
        parameters=parameters(source),
        file_bytes=source.nbytes,
        template_origin=template.origin,
        load_s=loaded.load_s,
        temperature=loaded.temperature,
        width=loaded.model.width,
        pooling=source.pooling,
        reranks=loaded.reranker is not None,
        fills=loaded.tokenizer is not None and loaded.tokenizer.fim.complete,
        tool_format=family((template.for_tools or template).source),
        thought_mark=mark_of(template.source),
        pictures=loaded.pictures is not None,
    )
