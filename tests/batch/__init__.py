"""Files of requests: their parts by themselves, and the whole with places that answer as a test says."""
