"""Processes that compare math answers: no question can stall, crash or fill the training process.

`in_worker` returns the reason that `answers.compare` gives, "timeout" or "crashed".

A worker answers one question after another. Its start, a second in which it imports math-verify,
does not count towards a question's time. A worker that dies or runs out of time is replaced. When
the master ends, its pipes close: idle workers end at once, a busy one at its CPU time limit at the
latest.
"""

import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import time
from pathlib import Path

MEMORY = 2**32  # bytes of address space
START = 120  # seconds allowed for importing math-verify


class Worker:
    """A process that runs `answers.compare`. Raises OSError if it does not start."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grading.workers"],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout  # they are pipes
        self.stdin = self.process.stdin
        self.stdout = self.process.stdout
        if self.listen(START) != "ready":
            self.stop()
            raise OSError("a worker of math-verify does not start")

    def ask(self, answer: str, gold: str, timeout_s: float) -> str:
        """Have two answers compared; returns what `listen` returns, in time the reason.

        Afterwards the worker waits for another question, or is stopped.
        """
        with contextlib.suppress(BrokenPipeError):  # it has died
            self.stdin.write(json.dumps([answer, gold, timeout_s]).encode() + b"\n")
            self.stdin.flush()
        reason = self.listen(timeout_s)
        if reason in ("", "timeout"):
            self.stop()
        else:
            _idle.append(self)
        return reason

    def listen(self, timeout_s: float) -> str:
        """The worker's next line, "timeout", or nothing if the process died.

        Once its first byte can be read, the rest follows: the worker writes whole lines.
        """
        poll = select.poll()
        poll.register(self.stdout, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return "timeout"
        return self.stdout.readline().decode().strip()

    def stop(self) -> None:
        """Kill the process and wait for its end."""
        # Closing the pipes flushes an unsent question to a process that is gone.
        with contextlib.suppress(BrokenPipeError), self.process:
            self.process.kill()


_idle: list[Worker] = []


def in_worker(answer: str, gold: str, timeout_s: float) -> str:
    """The reason that a worker gives, "timeout" or "crashed".

    Raises OSError if no worker can be started, or if they die of an easy question, too.
    """
    try:
        worker = _idle.pop()  # no other thread gets the same one
    except IndexError:
        worker = Worker()
    # it may have died while idle, or have used up the user's limit of CPU time: ask a new one
    reason = worker.ask(answer, gold, timeout_s) or Worker().ask(answer, gold, timeout_s)
    # the question's fault, unless a worker dies of any
    if not reason and Worker().ask("x/2", ".5x", START) != "correct":
        raise OSError("workers of math-verify die")
    return reason or "crashed"


def work() -> None:
    """The loop of a worker: a line of JSON in, a reason out, until its master closes the pipe."""
    from grading.answers import compare  # slow, and only workers need it

    limit(resource.RLIMIT_AS, MEMORY)
    print("ready", flush=True)
    for line in sys.stdin:
        answer, gold, timeout_s = json.loads(line)
        # seconds; it ends a busy worker whose master is gone
        limit(resource.RLIMIT_CPU, int(time.process_time() + timeout_s) + 2)
        print(compare(answer, gold), flush=True)


def limit(kind: int, value: int) -> None:
    """Set a limit of this process, unless the user's hard limit is lower, which then holds."""
    with contextlib.suppress(ValueError):  # also on macOS, which has no limit of memory
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


os.register_at_fork(after_in_child=_idle.clear)  # a child must not share its parent's pipes

if __name__ == "__main__":
    work()
