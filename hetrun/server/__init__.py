"""The local server: OpenAI's API over a `ChatClient`.

`app` lists the routes, `listen` binds an address and runs the app. `routes/` has one file per group of
endpoints, `responses/` those under /v1/responses, `middleware/` what every request passes first,
`openapi/` their description. The rest is what endpoints share: a request's fields in (`request`,
`messages`, `sampling`, `tools`), its answer out (`response_driver`, `sse`, `usage`).
"""
