"""An HTTP server over the engine, with OpenAI's interface. Needs the extra ``[serve]``."""
