"""Access to the view: programs of this machine that know the token, and pages that it served itself."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Refuses requests from elsewhere, before anything else sees them.

    - The Host header must be this server's address: a name that an attacker's DNS points here is refused.
    - A request that another origin's page sent is refused (``Origin``, ``Sec-Fetch-Site``).
    - The token must come in the cookie that the address with ``?token=`` sets, or as ``Authorization: Bearer``.

    Args:
        app: the application.
        token: what a client must know.
        port: of the server, part of the cookie's name because cookies do not know ports.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self.app = app
        self.token = token
        self.cookie = f"verl_view_{port}"
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it over."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket, which nothing here speaks
            return
        refusal = self._refusal(Request(scope))
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_ENCODED]
            await send(message)

        await self.app(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        headers = request.headers
        if headers.get("host", "") not in self.hosts:
            return _refused(421, "This server answers to 127.0.0.1 and localhost only.")
        if not self._is_own_page(headers):
            return _refused(403, "Pages of other origins are not answered.")
        if request.method not in ("GET", "HEAD"):
            return _refused(405, "Nothing can be changed here.")
        token = request.query_params.get("token")
        if token is not None and self._is_token(token) and request.url.path == "/":
            answer = RedirectResponse("/", status_code=303, headers=HEADERS)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(self.cookie, "")) or self._is_token(bearer):
            return None
        return _refused(401, "Open the whole address that `verl view` printed: it ends in ?token=…")

    def _is_own_page(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc not in self.hosts:
            return False
        # A link from elsewhere ("cross-site" navigation) may open the page, which then needs the cookie.
        site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "navigate")
        return site in ("none", "same-origin") or mode == "navigate"

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())


_ENCODED = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


def _refused(status: int, why: str) -> Response:
    return PlainTextResponse(why + "\n", status_code=status, headers=HEADERS)
