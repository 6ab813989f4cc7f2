"""A scripted end of a connection, whatever protocol its script speaks."""

import asyncio

__all__ = ["ScriptedEnd"]


class ScriptedEnd:
    """The server's end of one connection, given to its script."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Write bytes, in one piece where they fit into one, and wait until they left."""
        self.writer.write(data)
        await self.writer.drain()
