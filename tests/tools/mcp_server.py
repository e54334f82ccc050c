"""An MCP server for tests: over stdio, or over HTTP at the port that is its argument."""

import base64
import io
import os
import sys
import threading
import time

from mcp.server.mcpserver import MCPServer
from mcp.types import ContentBlock, ImageContent, TextContent, ToolAnnotations

server = MCPServer("tests", log_level="CRITICAL")
count = 0


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def counted() -> str:
    """Count the calls of this process, and say what it knows of its environment."""
    global count
    count += 1
    return f"{count} {os.environ.get('TOKEN_OF_TEST')}"


@server.tool()
def fail() -> str:
    """Raise."""
    raise ValueError("broken inside")


@server.tool()
def die() -> str:
    """End the process in the middle of the call."""
    os._exit(1)


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def die_once(mark: str) -> str:
    """End the process in the middle of the first call."""
    try:
        open(mark, "x").close()
    except FileExistsError:
        return "alive"
    os._exit(1)


@server.tool()
def die_soon() -> str:
    """End the process after the call."""
    threading.Timer(0.2, os._exit, (1,)).start()
    return "soon"


@server.tool()
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def flood(characters: int) -> str:
    """Answer at length."""
    return "x" * characters


@server.tool()
def look(kind: str = "good") -> list[ContentBlock]:
    """Show a picture."""
    from PIL import Image

    def coded(image: Image.Image) -> str:
        file = io.BytesIO()
        image.save(file, format="PNG")
        return base64.b64encode(file.getvalue()).decode()

    good = coded(Image.new("RGB", (24, 16), (220, 20, 20)))
    data = {"broken": "%%%", "huge": coded(Image.new("1", (8000, 8001)))}.get(kind, good)
    media_type = "image/svg+xml" if kind == "other" else "image/png"
    return [TextContent(type="text", text="see"), ImageContent(type="image", data=data, mime_type=media_type)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
