"""A TCP proxy on loopback that can interrupt connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Proxy:
    """Forwards bytes between its own port and another; while cut, it forwards nothing, as if packets were lost."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.whole = threading.Event()
        self.whole.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self.whole.clear()

    def mend(self) -> None:
        self.whole.set()

    def close(self) -> None:
        self.listener.close()
        self.mend()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self.whole.wait()
        # A SuperNode whose TLS handshake is cut off never tries again: while there is no server, let it wait.
        while self.listener.fileno() >= 0:
            with contextlib.suppress(OSError):
                far = socket.create_connection(("127.0.0.1", self.target))
                break
            time.sleep(0.5)
        else:
            near.close()
            return
        for a, b in ((near, far), (far, near)):
            threading.Thread(target=self._pass, args=(a, b), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.whole.wait()
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
