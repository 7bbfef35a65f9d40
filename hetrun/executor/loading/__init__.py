"""What is decided while a model is opened: backends, context, budget, the first plan."""
