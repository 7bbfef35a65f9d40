"""The conversation on the screen, drawn line by line: a widget for each paragraph, as Textual's own Markdown
has them, costs 50 to 80 ms of every frame after some 8,000 tokens (measured), and this 2 to 4.

`markdown.py` cuts a text into blocks and makes lines of them, `turn.py` knows the lines of one turn,
`widget.py` shows them.
"""
