"""Decodes many requests on the rows of one batch: a scheduler, and an engine for asyncio."""
