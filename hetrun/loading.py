"""From a model's files and settings to what the engine runs: model, tokenizer, template, known prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hetrun import model as models
from hetrun.anatomy import parameters
from hetrun.chat import ChatTemplate
from hetrun.chat.renderer import TemplateWorker
from hetrun.config import Settings
from hetrun.errors import ModelFileError, OptionError, UserError
from hetrun.events import Message, ModelInfo
from hetrun.loaded import Loaded
from hetrun.planner import Options
from hetrun.prefixes import CACHED, Prefixes
from hetrun.prepare import Renderer
from hetrun.prompts import Prompts, check_place
from hetrun.source import ModelSource, open_vocabulary
from hetrun.tokenizer import Tokenizer
from hetrun.weights import Progress
from hetrun.whole import WholeModel

NOT_SAVED = "a library runs this model as a whole, and its keys and values cannot be read"

log = logging.getLogger(__name__)


def load(
    source: ModelSource,
    templates: TemplateWorker,
    settings: Settings,
    options: Options,
    progress: Progress | None,
    most_waiting: int | None = None,
) -> Loaded:
    """Everything that runs; called on the engine thread."""
    if settings.prompt_cache:
        check_place(settings.prompt_cache)
    tokenizer = open_tokenizer(source)  # first: it is read in no time, and may be wrong
    try:
        model = models.open_planned(source, options, progress)
    except BaseException:
        if tokenizer:
            tokenizer.close()
        raise
    temperature = settings.temperature if settings.temperature is not None else source.temperature
    render = renderer(templates, tokenizer)
    prefixes = Prefixes(model, most_kept(model))
    prompts = Prompts(model, prefixes, options) if isinstance(model, models.PlannedModel) else None
    return Loaded(
        model,
        tokenizer,
        render,
        temperature,
        diagnose=lambda: bad_weights(source),
        most_waiting=most_waiting,
        prefixes=prefixes,
        prompts=prompts,
        ending=remembering(prompts, settings.prompt_cache),
    )


def remembering(prompts: Prompts | None, path: Path | None) -> Callable[[], None]:
    """Read the file of prompts that was asked for; what is to be done with it at the end."""
    if path is None:
        return lambda: None
    if prompts is None:
        log.warning("%s is not used: %s", path, NOT_SAVED)
        return lambda: None
    prompts.begin(path)
    return partial(prompts.end, path)


def prompts_of(loaded: Loaded) -> Prompts:
    """What is kept of prompts, for files."""
    if loaded.prompts is None:
        raise OptionError(f"prompts cannot be saved: {NOT_SAVED}")
    return loaded.prompts


def most_kept(model: models.Model) -> int:
    """How many prompts stay in the KV cache; a library has as many places as sequences that run."""
    return model.max_sequences if isinstance(model, WholeModel) else CACHED


def bad_weights(source: ModelSource) -> UserError:
    """What is wrong with the weights, whose results are no numbers."""
    from hetrun.weightcheck import first_bad_value  # on use: it reads the whole file

    too_large = (
        "every weight is finite, but the results are no numbers: weights so large that they overflow; "
        "get or convert it again (and if another program can run it, please report that)"
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


def renderer(templates: TemplateWorker, tokenizer: Tokenizer | None) -> Renderer:
    """Messages to text by the template in use."""

    # Asked for here, because these are native calls.
    bos, eos = (tokenizer.bos_text, tokenizer.eos_text) if tokenizer else ("", "")

    def render(messages: tuple[Message, ...], options: Mapping[str, object]) -> str:
        if "messages" in options:
            raise OptionError("messages is no variable that can be given to a template beside the messages")
        variables: dict[str, Any] = {"bos_token": bos, "eos_token": eos, **options}
        return templates.render(messages, **variables)

    return render


def open_tokenizer(source: ModelSource) -> Tokenizer | None:
    """The model's tokenizer; None where it has none, or where nothing is installed that could read it."""
    vocabulary = open_vocabulary(source)
    return Tokenizer(vocabulary) if vocabulary else None


def describe(source: ModelSource, template: ChatTemplate, loaded: Loaded) -> ModelInfo:
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
    )
