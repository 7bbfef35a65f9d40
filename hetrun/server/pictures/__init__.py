"""Pictures in requests: content parts of all APIs, and addresses that the server may read for them."""
