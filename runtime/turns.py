"""Whoever waits drives the sockets of its process; of several threads that wait, one drives for all.

What is sent without waiting goes out with the next wait, in one datagram with whatever else there is for that
actor; or, if its sender computes, within about a millisecond by a thread that does nothing else.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

from .peer import Pending

__all__ = ["LATE_S", "POLL_S", "Sockets", "Turns"]

POLL_S = 1.0  # how long a wait sleeps at most before it looks at its deadline
LATE_S = 0.001  # what waits longer is sent by a thread of its own


class Sockets(Protocol):
    """What is driven."""

    @property
    def unsent(self) -> bool:
        """Whether something waits for `flush`."""
        ...

    @property
    def stuck(self) -> bool:
        """Whether the kernel had no room for something that was sent."""
        ...

    def flush(self) -> None:
        """Send all that waits to be sent."""
        ...

    def turn(self, timeout_s: float) -> None:
        """Let in what there is; wait for the first of it. Also called when somebody writes to `wake`."""
        ...


class Turns:
    """Who drives now.

    lock: also guards what several threads add to and the driving one takes from.
    wake: an eventfd among the sockets. late: set while the sending thread has been told of something to send.
    """

    def __init__(self, sockets: Sockets, wake: int) -> None:
        self._sockets, self._wake = sockets, wake
        self.lock = threading.Lock()
        self.late = threading.Event()
        self._turn = threading.Condition(self.lock)
        self._driving = self._closed = False
        self._sleepers = 0  # threads that wait for the one that drives
        self._sender: threading.Thread | None = None
        self._helping = False  # whether the sending thread drives because something is stuck

    def drive(self, timeout_s: float, pending: Pending | None = None, *, send_only: bool = False) -> None:
        """Move messages for up to `timeout_s`, or until another thread that drives has settled `pending`."""
        with self.lock:
            if self._driving:
                if self._sockets.unsent:
                    os.eventfd_write(self._wake, 1)  # the driver sleeps in its poll: let it send them
                if timeout_s and not (pending and pending.done):
                    self._sleepers += 1
                    self._turn.wait(timeout_s)
                    self._sleepers -= 1
                return
            if (pending and pending.done) or self._closed:
                return
            self._driving = True
        try:
            self._sockets.flush()
            if not send_only:
                # What cannot be sent ends its ask at once.
                self._sockets.turn(0.0 if pending is not None and pending.done else timeout_s)
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        """Stop driving, but not before what others have posted meanwhile is sent."""
        try:
            while self._driving:
                self._sockets.flush()
                with self.lock:
                    self._driving = self._sockets.unsent
                    if self._sleepers and not self._driving:
                        self._turn.notify_all()
        except BaseException:
            with self.lock:
                self._driving = False  # another thread may fare better
                self._turn.notify_all()
            raise

    def send_soon(self) -> None:
        """Let the sending thread send what nobody's wait has sent by then."""
        if not self.late.is_set():
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_late, daemon=True)
                self._sender.start()
            self.late.set()
            if self._helping:
                os.eventfd_write(self._wake, 1)  # it drives for what is stuck: others need not wait

    def _send_late(self) -> None:
        while True:
            self.late.wait()
            time.sleep(LATE_S)
            self.late.clear()
            if self._sockets.unsent:
                self.drive(0.0, send_only=True)
            while self._sockets.stuck and not self._closed:
                self._helping = True
                self.drive(POLL_S)
                self._helping = False
                self.late.clear()

    def close(self) -> None:
        """Nobody drives any more."""
        with self.lock:
            self._closed = True
