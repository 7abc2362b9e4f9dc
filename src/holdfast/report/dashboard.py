"""The dashboard: a read-only web server that lists, compares and follows the runs below a directory."""

import asyncio
import hmac
import ipaddress
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from holdfast.core.defaults import DASHBOARD_PORT
from holdfast.core.errors import HoldfastError
from holdfast.report.live import LiveRuns, Version
from holdfast.report.loading import StoredRun
from holdfast.report.page import SCRIPTS, STYLES, asset, page_model, template
from holdfast.runs import list_runs

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LIVE_FIGURES = (
    "accuracy",
    "classes",
    "forgetting",
)  # figures updated in every round; the others are updated every few seconds
MAX_COMPARED_RUNS = 100
LIST_SECONDS = 2.0  # lifetime of the cached list of runs
POLL_SECONDS = 0.5
ASSETS = {
    **dict.fromkeys(STYLES, "text/css"),
    **dict.fromkeys((*SCRIPTS, "dashboard.js"), "text/javascript"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
COOKIE = "holdfast-token"


def serve(
    root: Path,
    host: str = "127.0.0.1",
    port: int = DASHBOARD_PORT,
    token: str | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the dashboard of the runs below ``root`` until interrupted.

    Args:
        root: the directory that holds the runs.
        host: an address of this machine; other than loopback addresses need a token.
        port: 0 for any free port.
        token: a secret that every visitor must present, once as ``?token=…`` or as a bearer token.
        ready: called with the page's address once it can be opened.
    """
    import uvicorn

    app = create_app(root, host, token)
    if not 0 <= port <= 65535:
        raise HoldfastError(f"port is {port}; it must be from 1 to 65535, or 0 for any free port")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise HoldfastError(
            f"cannot listen on {host} port {port}: {error.strerror}; try another port"
        ) from error
    with listener:
        if ready:
            address = f"[{host}]" if ":" in host else host
            query = f"?{urlencode({'token': token})}" if token else ""
            ready(f"http://{address}:{listener.getsockname()[1]}/{query}")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
        app.state.pages.stopping = lambda: server.should_exit  # open event streams would delay the exit
        server.run(sockets=[listener])


def create_app(root: Path, host: str = "127.0.0.1", token: str | None = None) -> "Starlette":
    """The dashboard as an ASGI application."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.routing import Route

    root = Path(root)
    if not root.is_dir():
        raise HoldfastError(f"{root} is not a directory; give a directory that contains runs")
    if token is None and not _is_loopback(host):
        raise HoldfastError(f"{host} is reachable from other machines; set a token, or use 127.0.0.1")
    if token is not None and not token:
        raise HoldfastError("the token is empty and gives no protection; set a longer one")
    pages = Pages(root)
    middleware = [Middleware(Guard, token=token)]
    if token is None:
        # Prevents DNS rebinding: foreign host names that resolve to this machine are rejected.
        middleware.append(
            Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1", "::1", "[::1]", host])
        )
    routes = [
        Route("/", pages.index),
        Route("/assets/{name}", pages.asset),
        Route("/api/runs", pages.runs),
        Route("/api/figures", pages.figures),
        Route("/api/events", pages.events),
    ]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HoldfastError: _bad_request})
    app.state.pages = pages
    return app


class Pages:
    """The dashboard's endpoints; files are read and figures built in threads, which keeps the server responsive."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._live = LiveRuns(root)
        self._listed: tuple[float, list[dict[str, Any]]] = (-LIST_SECONDS, [])
        self._lock = Lock()
        self.stopping: Callable[[], bool] = lambda: False

    async def index(self, request: "Request") -> "Response":
        from starlette.responses import HTMLResponse

        return HTMLResponse(
            template("dashboard.html").render(root=str(self._root), scripts=SCRIPTS, styles=STYLES)
        )

    async def asset(self, request: "Request") -> "Response":
        from starlette.responses import PlainTextResponse, Response

        name = request.path_params["name"]
        if name not in ASSETS:
            return PlainTextResponse("not found", 404)
        return Response(asset(name), media_type=ASSETS[name])

    async def runs(self, request: "Request") -> "Response":
        """The list of all runs."""
        return _json(await asyncio.to_thread(self._list))

    async def figures(self, request: "Request") -> "Response":
        """The report's data of the runs named by ``run``."""
        names = _names(request)
        return _json((await asyncio.to_thread(self._model, names))[1])

    async def events(self, request: "Request") -> "Response":
        """Server-sent events: ``runs`` when the list changes, ``figures`` when a run named by ``run`` changes."""
        from starlette.responses import StreamingResponse

        names = _names(request)
        return StreamingResponse(self._stream(names), media_type="text/event-stream")

    async def _stream(self, names: Sequence[str]) -> AsyncIterator[str]:
        listed: list[dict[str, Any]] = []
        versions: list[Version] = []
        while not self.stopping():
            started = time.monotonic()
            now = await asyncio.to_thread(self._list)
            if now != listed:
                listed = now
                yield _event("runs", listed)
            if names:
                current = await asyncio.to_thread(self._versions, names)
                if current != versions:
                    versions, model = await asyncio.to_thread(self._model, names, LIVE_FIGURES)
                    yield _event("figures", model)
            yield ": keep-alive\n\n"  # fails when the visitor has left
            # Figures of long runs take long to build: at most a fifth of the time is spent on them.
            await asyncio.sleep(max(POLL_SECONDS, 4 * (time.monotonic() - started)))

    def _list(self) -> list[dict[str, Any]]:
        with self._lock:
            listed_at, runs = self._listed
            if time.monotonic() - listed_at >= LIST_SECONDS:
                runs = [
                    {
                        "name": run.name,
                        "state": run.state,
                        "rounds": run.rounds,
                        "accuracy": run.accuracy,
                        "metric": run.measure.name,
                        "percent": run.measure.is_share,
                        "method": run.method,
                        "data": run.dataset,
                        "modified": run.modified,
                        "problem": run.problem,
                    }
                    for run in list_runs(self._root)
                ]
                self._listed = (time.monotonic(), runs)
            return runs

    def _versions(self, names: Sequence[str]) -> list[Version]:
        return [self._read(name)[0] for name in names]

    def _read(self, name: str) -> tuple[Version, StoredRun | None, str]:
        """A run's version, the run or None, and the reason why it cannot be shown or an empty text."""
        try:
            version, run = self._live.read(name)
        except HoldfastError as error:
            return (), None, str(error)
        except OSError as error:
            return (), None, f"cannot be read: {error.strerror}"
        return version, run if run.records else None, "" if run.records else "has no finished round yet"

    def _model(
        self, names: Sequence[str], only: Sequence[str] | None = None
    ) -> tuple[list[Version], dict[str, Any]]:
        found = [(name, *self._read(name)) for name in names]
        versions = [version for _, version, _, _ in found]
        problems = [[name, problem] for name, _, _, problem in found if problem]
        runs = [run for _, _, run, _ in found if run is not None]
        if not runs:
            return versions, {"problems": problems, "figures": None}
        model = page_model(runs) if only is None else page_model(runs, only=only)
        return versions, {**model, "problems": problems}


class Guard:
    """Checks the token, if there is one, and sets headers that isolate the page from other sites."""

    def __init__(self, app: "ASGIApp", token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse, RedirectResponse

        async def guarded(message: "Message") -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(key.encode(), value.encode()) for key, value in HEADERS.items()]
            await send(message)

        if scope["type"] != "http" or self._token is None:
            return await self._app(scope, receive, guarded)
        request = Request(scope)
        given = request.query_params.get("token")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._matches(given):
            # Redirect at once, so that the token is not in the address bar or the history.
            answer = RedirectResponse(request.url.path, 303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return await answer(scope, receive, guarded)
        if self._matches(request.cookies.get(COOKIE)) or self._matches(bearer):
            return await self._app(scope, receive, guarded)
        return await PlainTextResponse("this dashboard needs its token: open /?token=…", 401)(
            scope, receive, guarded
        )

    def _matches(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), (self._token or "").encode())


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names(request: "Request") -> list[str]:
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if len(names) > MAX_COMPARED_RUNS:
        raise HoldfastError(f"at most {MAX_COMPARED_RUNS} runs can be compared at once, not {len(names)}")
    return names


def _json(content: object) -> "Response":
    from starlette.responses import Response

    return Response(
        json.dumps(content, separators=(",", ":"), allow_nan=False), media_type="application/json"
    )


def _event(name: str, content: object) -> str:
    return f"event: {name}\ndata: {json.dumps(content, separators=(',', ':'), allow_nan=False)}\n\n"


async def _bad_request(request: "Request", error: Exception) -> "Response":
    from starlette.responses import JSONResponse

    return JSONResponse({"error": str(error)}, 400)
