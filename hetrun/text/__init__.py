"""Text to tokens and back; messages to text; answers to text, reasoning and tool calls.

`tokenizer.Tokenizer` and `detokenizer.StreamDecoder`; `chat/` renders templates in a process of their own
and parses answers, `tool_parsers/` knows how each family of models writes tool calls.
"""
