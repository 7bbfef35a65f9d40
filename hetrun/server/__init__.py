"""The local server: OpenAI's chat API over a `ChatClient`.

One file per group of endpoints; `app` lists the routes, `listen` binds an address and runs the app.
"""
