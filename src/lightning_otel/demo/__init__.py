"""The offline demo: a toy model behind a loopback server that speaks the OpenAI API."""
