"""`hetrun launch`: an agent with a model of this machine. Which agents there are, the server, the start."""
