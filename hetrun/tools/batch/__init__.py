"""Files of requests: read line by line, answered together, every answer written once and whole.

`lines.py` reads, `asks.py` says what a line asks for, `order.py` puts neighbours together, `here.py` or
`workers.py` answers, `results.py` makes lines of answers, `output.py` writes them; `batch.py` runs it all.
"""
