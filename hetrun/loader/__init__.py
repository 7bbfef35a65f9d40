"""Model files: names resolved, headers checked, settings and weights in GGUF's terms, bytes read.

`open_model` gives a `source.ModelSource` for any path: a GGUF file (`gguf_source`), a folder of Hugging
Face (`hf_source`, in the terms of `hf_mapping`), or what a plugin reads; `architectures` builds its
graph, and `weight_reader` reads its bytes. `formats/` reads headers, `hub/` finds models by name.
"""
