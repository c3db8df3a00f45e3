"""Ctrl-C and SIGTERM ask a run to end: the first one after its step, the second one at once."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class StopRequest:
    """Notes the first signal that asks this process to end; the second one raises an exception wherever it is."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_urgent = False
        """Whether a second signal came."""
        self._before: dict[int, Any] = {}
        self._process = 0

    def listen(self, noted: int | None = None) -> None:
        """From now on, in the main thread, for signals that are not ignored; `noted` is one that came before."""
        self.number = noted
        self._process = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in WORDS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._note)

    def end(self) -> None:
        """Puts the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def obey(self) -> None:
        """Raises what ends a run by the signal that was noted."""
        number = self.number
        self.end()
        raise KeyboardInterrupt if number == signal.SIGINT else SIGTERMException

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker of a data loader, which Ctrl-C reaches too: its parent decides
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.number is not None:
            self.number, self.is_urgent = number, True
            self.obey()
        self.number = number
        word = WORDS[signal.Signals(number)]
        print(f"{word}: the run ends after this step, with a checkpoint; again, and it ends at once", file=sys.stderr)
