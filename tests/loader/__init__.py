"""Files of models: GGUF, safetensors, folders and vocabularies, read, converted and packed anew."""
