"""The local server: OpenAI's API over a `ChatClient`.

`app` lists the routes, `listen` binds an address and runs the app. `routes/` has one file per group of
endpoints, `responses/` has those under /v1/responses, `middleware/` runs before every endpoint, and
`openapi/` describes them. The rest is shared by endpoints: reading a request's fields (`request`, `chat`,
`sampling`, `fields`) and writing its answer (`response_driver`, `sse`, `usage`).
"""
