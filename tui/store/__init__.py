"""Conversations that outlive the program: `tree.py` says what one is, `store.py` keeps them in a file of
SQLite, `exchange.py` writes and reads Markdown and JSON.
"""
