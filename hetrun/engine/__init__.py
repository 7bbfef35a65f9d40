"""Serves requests: one thread, a queue, a scheduler, admission, speculation.

`engine.Engine` is the thread as others see it, `loop.Loop` what it does: a `request` comes through
`inbox`, waits (`active_requests`), gets its tokens (`request_setup`) and a slot (`slot_manager`), is put into
steps (`scheduler`, `batching`), and `output_processor` turns logits into events. `factory` opens all of it.
"""
