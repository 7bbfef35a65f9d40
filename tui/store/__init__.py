"""Conversations that outlive the program: `tree.py` says what one is, `store.py` keeps them in a file of
SQLite, `export.py` writes and reads Markdown and JSON.
"""
