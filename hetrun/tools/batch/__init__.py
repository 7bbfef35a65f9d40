"""Files of requests: read line by line, answered together, every answer written once and whole.

`line_reader.py` reads, `request_lines.py` says what a line asks for, `prefix_order.py` puts neighbours
together, `local_worker.py` or `http_worker.py` answers, `result_lines.py` makes lines of answers,
`output_file.py` writes them; `runner.py` runs it all.
"""
