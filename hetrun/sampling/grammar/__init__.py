"""What an answer must look like, as a mask over tokens: JSON schemas, regular expressions and grammars.

llguidance does the work (ADR 0016). `token_mask` is what the engine uses; the other modules stay clear of
numpy, because a child process that tries out what strangers send begins with them.
"""
