"""The Textual chat: it talks to a `ChatClient` and to nothing behind it."""
