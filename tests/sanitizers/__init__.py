"""Our C libraries under the compiler's sanitizers: `python -m tests.sanitizers`.

Each is compiled with AddressSanitizer and UndefinedBehaviorSanitizer into a copy of the checkout, where
hetrun finds it in the place of the ordinary one. There the tests that use the libraries run, and a fuzzer of
layouts and sizes. Threads run in a program of C, which ThreadSanitizer watches.
"""
