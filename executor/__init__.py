"""From a request to token ids: the engine and the process around it."""
