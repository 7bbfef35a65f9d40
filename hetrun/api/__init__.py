"""The Python interface: `LLM` and `AsyncLLM`, over the model that runs in this process (`local_model`)."""
