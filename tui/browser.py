"""The app in a browser (`msgrpo play --web`): textual-serve runs the same command for every tab."""

from __future__ import annotations

import errno
import re
import shlex
import sys
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgrpo.errors import UsageError
from msgrpo.extras import needs
from msgrpo.loopback import bracketed, is_loopback, is_own


def serve(arguments: list[str], host: str, port: int, *, force: bool) -> None:
    """Serve the same command to browsers through textual-serve: one process a tab, no password.

    textual-serve lets every page open its websocket, which types into the app; here only the app's own page may.
    """
    if not is_loopback(host) and not force:
        raise UsageError(
            f"{host} is not this machine alone: anybody who reaches port {port} could play, with your agents, "
            "your keys and your files; there is no password",
            fix=f"leave out --host, and reach it from another machine by: ssh -L {port}:127.0.0.1:{port} …   "
            "(or add --force)",
        )
    with needs("--web", "web"):
        from aiohttp import web as http
        from textual_serve.server import Server

    @http.middleware
    async def own_page_only(request: http.Request, handler: Any) -> Any:
        if not is_own(request.host, request.headers.get("Origin"), anywhere=force):
            raise http.HTTPForbidden(text="only the app's own page is answered")
        return await handler(request)

    class OwnPage(Server):  # type: ignore[misc]  # textual-serve is not checked
        async def handle_index(self, request: http.Request) -> Any:
            self.public_url = f"{request.scheme}://{request.host}"  # as the browser names it: a tunnel's port, [::1]
            return await super().handle_index(request)

        async def _make_app(self) -> http.Application:
            app: http.Application = await super()._make_app()
            app.middlewares.append(own_page_only)
            return app

    command = shlex.join([sys.executable, "-P", "-m", "msgrpo.cli", *without_web(arguments)])
    url = f"http://{bracketed(host)}:{port}"
    with TemporaryDirectory() as templates:
        page_without_links(Path(templates))
        page = OwnPage(command, host=host, port=port, title="msgrpo play", templates_path=templates, public_url=url)
        try:
            page.serve()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(f"port {port} is in use", fix=f"--port {port + 1}") from error
            raise UsageError(f"nothing can be served at {url}: {error.strerror}") from error


def page_without_links(folder: Path) -> None:
    """textual-serve's page without its font from another machine: what runs on loopback stays on loopback."""
    page = resources.files("textual_serve").joinpath("templates/app_index.html").read_text(encoding="utf-8")
    (folder / "app_index.html").write_text(re.sub(r"<link[^>]*https?://[^>]*>", "", page), encoding="utf-8")


def without_web(arguments: list[str]) -> list[str]:
    """The command line of the served app: the same without what is about serving."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("--host", "--port"):
            skip = True
        elif argument not in ("--web", "--force") and not argument.startswith(("--host=", "--port=")):
            kept.append(argument)
    return kept
