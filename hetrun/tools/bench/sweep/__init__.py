"""`hetrun bench` in several budgets of memory, each in processes of its own."""
