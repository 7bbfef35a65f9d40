"""Options as typer wants them, made from `hetrun.config.OPTIONS`: each is described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hetrun.config import OPTIONS


def _option(name: str) -> Any:  # noqa: ANN401 - typer's own type is private
    known = OPTIONS[name]
    return typer.Option(*known.flags, help=known.help, show_default=known.shows or True)


def _flag(name: str) -> Any:  # noqa: ANN401
    return typer.Option(*OPTIONS[name].flags, help=OPTIONS[name].help, show_default=False)


# Values arrive as text and are parsed by `Settings`, so that the command line, the environment and the file
# accept the same spellings and refuse with the same sentences.
Model = Annotated[str | None, _option("model")]
Ctx = Annotated[str | None, _option("ctx")]
Ram = Annotated[str | None, _option("ram")]
Threads = Annotated[str | None, _option("threads")]
Backends = Annotated[list[str] | None, _option("backends")]
Ubatch = Annotated[str | None, _option("ubatch")]
KvType = Annotated[str | None, _option("kv_type")]
Deterministic = Annotated[bool, _flag("deterministic")]
PlanFile = Annotated[str | None, _option("plan")]
MaxTokens = Annotated[str | None, _option("max_tokens")]
Temperature = Annotated[str | None, _option("temperature")]
Seed = Annotated[str | None, _option("seed")]
System = Annotated[str | None, _option("system")]
Template = Annotated[str | None, _option("chat_template")]
Host = Annotated[str | None, _option("host")]
Port = Annotated[str | None, _option("port")]
Uds = Annotated[str | None, _option("uds")]
ApiKey = Annotated[str | None, _option("api_key")]
Strict = Annotated[bool, _flag("strict")]
TopK = Annotated[int, typer.Option(help="draw from the k likeliest tokens; 0: all")]
TopP = Annotated[float, typer.Option(help="draw from the likeliest tokens that have this probability")]
MinP = Annotated[float, typer.Option(help="only tokens at least this likely, the likeliest counting as 1")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="say more on stderr")]
ModelFile = Annotated[Path, typer.Argument(help="a .gguf file", show_default=False)]
