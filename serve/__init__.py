"""vLLM as a child process, behind an OpenAI-compatible URL; never imported here."""
