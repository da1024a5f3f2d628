"""Processes that compare math answers, so that no question can stall, crash or fill the one that trains.

    in_worker(answer, gold, timeout_s) -> the reason that `answers.compare` gives, "timeout" or "crashed"

A worker answers one question after another; importing math-verify takes it a second, which is no question's own time.
One that is too slow or dies is replaced, and a spare is kept. Workers end with their master: a pipe is all they have.
"""

import atexit
import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time

MEMORY = 2**32  # bytes of address space
START = 120  # seconds in which a worker must have imported math-verify


class Worker:
    """A process that runs `answers.compare`. Starting takes a second, which is no question's own time."""

    def __init__(self):
        folder = os.path.dirname(os.path.abspath(__file__))
        start = f"import sys; sys.path.insert(0, {folder!r}); import workers; workers.work()"
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process = subprocess.Popen([sys.executable, "-c", start], **pipes, start_new_session=True)
        self.ready = False

    def ask(self, answer: str, gold: str, timeout_s: float) -> str:
        """The reason. Raises TimeoutError, EOFError if the process dies, OSError if it does not start."""
        if not self.ready:
            with contextlib.suppress(TimeoutError, EOFError):
                self.ready = self.listen(START) == "ready"
        if not self.ready:
            raise OSError("a worker of math-verify does not start")
        self.process.stdin.write(json.dumps([answer, gold, timeout_s]).encode() + b"\n")
        self.process.stdin.flush()
        return self.listen(timeout_s)

    def listen(self, timeout_s: float) -> str:
        """The next line, which is written whole."""
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise TimeoutError
        line = self.process.stdout.readline()
        if not line:
            raise EOFError
        return line.decode().strip()

    def stop(self) -> None:
        """Kill it and wait for its end."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # what was not flushed, to one that has ended
            self.process.stdin.close()
        self.process.stdout.close()


_idle: list[Worker] = []
_lock = threading.Lock()


def in_worker(answer: str, gold: str, timeout_s: float) -> str:
    """The reason that a worker gives, or what became of it. Raises OSError where none can be had."""
    for _attempt in range(2):  # the second says whose fault a death was, the question's or the machine's
        with _lock:
            while _idle and _idle[-1].process.poll() is not None:
                _idle.pop().stop()  # it died in its sleep
            worker = _idle.pop() if _idle else Worker()
            if not _idle:
                with contextlib.suppress(OSError):  # a spare, in case this one must be killed
                    _idle.append(Worker())
        try:
            reason = worker.ask(answer, gold, timeout_s)
        except TimeoutError:
            worker.stop()
            return "timeout"
        except (EOFError, BrokenPipeError):
            worker.stop()
        except BaseException:
            worker.stop()
            raise
        else:
            with _lock:
                _idle.append(worker)
            return reason
    return "crashed"


def work() -> None:
    """What a worker does, until its master closes the pipe: questions in, reasons out, a line of JSON each."""
    from answers import compare  # slow to import, and only workers need it; this folder is on their path

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("ready", flush=True)
    for line in sys.stdin:
        answer, gold, timeout_s = json.loads(line)
        cpu = int(time.process_time() + timeout_s) + 2  # so that an orphan ends
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
        print(compare(answer, gold), flush=True)


@atexit.register
def _stop_workers() -> None:
    for worker in _idle:
        worker.stop()


def _start_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_start_anew)  # a pipe serves one master
