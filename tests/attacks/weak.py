"""A deliberately weak executor: the code of an attack runs by `exec` in a fork of this process.

It exists to prove that the probes bite. The fork is the host that attacks may harm; it has limits of its own, so that
the machine survives. Run as a script with the secret as argument: for each line of standard input, a code as JSON, it
writes a line with what the code printed, null if it never came back.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import signal
import sys

SECONDS = 0.6
answer = "placeholder"  # replaced by the secret: what an attack finds by walking frames and globals


def finish(message: object = "") -> None:
    """The host function that is passed in; it does with the message what careless hosts do."""
    repr(message)
    message == "done"  # noqa: B015


def attempt(code: str) -> str:
    """Run code in this very process; whatever it prints is what the agent would see."""
    seen = io.StringIO()
    with contextlib.redirect_stdout(seen), contextlib.redirect_stderr(seen):
        try:
            exec(code, {"finish": finish})
        except BaseException as error:
            print(type(error).__name__, str(error)[:200])
    patched = json.loads("[1]") != [1]
    return seen.getvalue() + ("PATCHED" if patched else "")


def sacrifice(code: str) -> str | None:
    """Run code in a fork; None if no answer came in time."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        encode, write = json.dumps, os.write  # an attack may replace them
        data = encode(attempt(code)).encode()
        while data:
            data = data[write(writable, data) :]
        os._exit(0)
    os.close(writable)
    parts: list[bytes] = []
    try:
        while select.select([readable], [], [], SECONDS)[0]:
            part = os.read(readable, 1 << 20)
            if not part:
                return json.loads(b"".join(parts)) if parts else None
            parts.append(part)
        return None
    finally:
        os.close(readable)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    answer = sys.argv[1]
    for line in sys.stdin:
        print(json.dumps(sacrifice(json.loads(line))), flush=True)
