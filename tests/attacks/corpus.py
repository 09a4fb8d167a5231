"""Code that tries to get out of a REPL session, each piece with the probe that shows whether it did.

Numbers are those of the list in `test_repl_attacks`. `@name@` stands for something of the host, see `Host`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OWNED = "OWNED"  # written as 'OW' + 'NED' in the code, so that an error which quotes the code does not count


class Host:
    """What attacks are after: files, an environment, a process and services, all made for the purpose.

    Args:
        folder: an empty folder. secret: the canary that must not be read.
    """

    def __init__(self, folder: Path, secret: str):
        self.folder, self.secret = folder, secret
        self.canary = folder / "canary.txt"
        self.canary.write_text(secret)
        self.sentinel = subprocess.Popen(["sleep", "600"])
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.abstract = f"canary-{os.getpid()}-{secret}"
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind("\0" + self.abstract)
        self.unix.listen()
        self.open_file = os.open(self.canary, os.O_RDONLY)
        os.set_inheritable(self.open_file, True)
        self.visits = 0
        for server in (self.tcp, self.unix):
            threading.Thread(target=self._count, args=(server,), daemon=True).start()

    def _count(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            self.visits += 1
            connection.close()

    def fill(self, code: str) -> str:
        """The code with the names of this host in it."""
        names = {
            "canary": self.canary, "folder": self.folder, "relative": os.path.relpath(self.canary),
            "sentinel": self.sentinel.pid, "port": self.tcp.getsockname()[1], "abstract": self.abstract,
            "pid": os.getpid(), "fd": self.open_file,
        }  # fmt: skip
        for name, value in names.items():
            code = code.replace(f"@{name}@", str(value))
        return code

    def reset(self) -> None:
        """Make the host whole again after an attack."""
        for path in self.folder.iterdir():
            if path != self.canary:
                path.unlink()
        self.canary.write_text(self.secret)
        self.visits = 0
        if self.sentinel.poll() is not None:
            self.sentinel = subprocess.Popen(["sleep", "600"])

    def close(self) -> None:
        """End everything."""
        self.sentinel.kill()
        self.sentinel.wait()
        self.tcp.close()
        self.unix.close()
        os.close(self.open_file)


Probe = Callable[[Host, str | None], bool]


def reads(host: Host, seen: str | None) -> bool:
    """The canary's text came back."""
    return seen is not None and host.secret in seen


def writes(host: Host, seen: str | None) -> bool:
    """There is something in the folder that was not there, now or a moment later."""
    return set(host.folder.iterdir()) != {host.canary} or host.canary.read_text() != host.secret


def writes_later(host: Host, seen: str | None) -> bool:
    """The same for a process that outlives its session."""
    time.sleep(0.3)
    return writes(host, seen)


def connects(host: Host, seen: str | None) -> bool:
    """A service of the host was visited."""
    time.sleep(0.05)
    return host.visits > 0


def kills(host: Host, seen: str | None) -> bool:
    """A process of the host has ended."""
    time.sleep(0.05)
    return host.sentinel.poll() is not None


def owned(host: Host, seen: str | None) -> bool:
    """The code got to its last line."""
    return seen is not None and OWNED in seen


def passwords(host: Host, seen: str | None) -> bool:
    """The list of accounts came back."""
    return seen is not None and "root:" in seen


def patched(host: Host, seen: str | None) -> bool:
    """The host's own library works differently now."""
    return seen is not None and "PATCHED" in seen


def hangs_or_dies(host: Host, seen: str | None) -> bool:
    """No observation came back."""
    return seen is None


def floods(host: Host, seen: str | None) -> bool:
    """More came back than a context could hold."""
    return seen is None or len(seen) > 100_000


@dataclass(frozen=True)
class Attack:
    """One attack.

    Args:
        number: in the list. name: of the variant.
        code: what the agent writes. escaped: the probe.
        seen: regular expression of what the agent is told by a session that holds.
        weak: whether the weak executor runs it; False where it could harm the machine.
    """

    number: int
    name: str
    code: str
    escaped: Probe
    seen: str
    weak: bool = True

    def __str__(self) -> str:
        return f"{self.number:02d}-{self.name}"


DENIED = "PermissionError: Permission denied"
NO_MODULE = "ModuleNotFoundError: No module named"
NO_ATTRIBUTE = "AttributeError:|NotImplementedError:|NameError:"
DONE = r"print('OW' + 'NED')"

ATTACKS = [
    # files
    Attack(1, "open", "print(open('@canary@').read())", reads, DENIED),
    Attack(1, "pathlib", "from pathlib import Path\nprint(Path('@canary@').read_text())", reads, DENIED),
    Attack(2, "passwd", "print(open('/etc/passwd').read())", passwords, DENIED),
    Attack(3, "traversal", "print(open('@relative@').read())", reads, DENIED),
    Attack(3, "dots", "print(open('../' * 30 + '@canary@'.lstrip('/')).read())", reads, DENIED),
    Attack(4, "symlink", "import os\nos.symlink('@canary@', '@folder@/link')\nprint(open('@folder@/link').read())",
           writes, NO_ATTRIBUTE),
    Attack(5, "write", "open('@folder@/evil', 'w').write('x')", writes, DENIED),
    Attack(5, "overwrite", "from pathlib import Path\nPath('@canary@').write_text('gone')", writes, DENIED),
    Attack(5, "delete", "from pathlib import Path\nPath('@canary@').rename('@folder@/moved')", writes, DENIED),
    Attack(6, "fill-disk", "f = open('@folder@/evil', 'w')\nfor _ in range(4): f.write('x' * (1 << 20))",
           writes, DENIED),
    Attack(7, "many-files", "for k in range(100): open(f'@folder@/evil{k}', 'w')", writes, DENIED),
    Attack(8, "proc-write", f"open('/proc/self/oom_score_adj', 'w').write('1000')\n{DONE}", owned, DENIED),
    Attack(9, "hard-link", "import os\nos.link('@canary@', '@folder@/hard')", writes, NO_ATTRIBUTE),
    # language
    Attack(10, "subclasses", "for c in ().__class__.__base__.__subclasses__():\n"
           "    if c.__name__ == 'BuiltinImporter': print(c.load_module('posix').environ[b'CANARY'])",
           reads, NO_ATTRIBUTE),
    Attack(10, "globals", "print(finish.__globals__['answer'])", reads, NO_ATTRIBUTE),
    Attack(10, "getattr", "print(getattr(finish, '__glo' + 'bals__')['answer'])", reads, NO_ATTRIBUTE),
    Attack(10, "format", "print('{0.__globals__}'.format(finish))", reads, NO_ATTRIBUTE),
    Attack(10, "f-string", "print(f'{finish.__globals__}')", reads, NO_ATTRIBUTE),
    Attack(10, "builtins", f"__builtins__['__import__']('os')\n{DONE}", owned, "NameError:"),
    Attack(10, "eval-import", f"eval(\"__import__('os')\")\n{DONE}", owned, "NameError:|NotImplementedError:"),
    Attack(11, "ctypes", f"import ctypes\nctypes.CDLL(None).getpid()\n{DONE}", owned, NO_MODULE),
    Attack(12, "system", "import os\nos.system('touch @folder@/evil')", writes, NO_ATTRIBUTE),
    Attack(12, "popen", "import os\nprint(os.popen('cat @canary@').read())", reads, NO_ATTRIBUTE),
    Attack(13, "subprocess", "import subprocess\nsubprocess.run(['touch', '@folder@/evil'])", writes, NO_MODULE),
    Attack(14, "patch-json", "import json\njson.loads = lambda *_, **__: 'owned'", patched, r"\(no output\)|Error"),
    Attack(14, "modules", "import sys\nsys.modules['json'].loads = lambda *_, **__: 'owned'", patched, NO_ATTRIBUTE),
    Attack(14, "importlib", f"import importlib\nimportlib.import_module('os').getcwd()\n{DONE}", owned, NO_MODULE),
    Attack(15, "gc", "import gc\nfor o in gc.get_objects():\n"
           "    if isinstance(o, dict) and 'answer' in o: print(o['answer'])", reads, NO_MODULE),
    Attack(15, "frames", "import sys\nf = sys._getframe()\nwhile f:\n    print(f.f_globals.get('answer'))\n"
           "    f = f.f_back", reads, NO_ATTRIBUTE),
    Attack(15, "traceback", "try:\n    1 / 0\nexcept Exception as e:\n    f = e.__traceback__.tb_frame.f_back\n"
           "    while f:\n        print(f.f_globals.get('answer'))\n        f = f.f_back", reads, NO_ATTRIBUTE),
    Attack(16, "repr-bomb", "class Bomb:\n    def __repr__(self): return str(open('@folder@/evil', 'w').write('x'))\n"
           "finish(Bomb())", writes, "ValueError: finish|PermissionError"),
    Attack(16, "eq-bomb", "class Bomb:\n    def __eq__(self, _): return bool(open('@folder@/evil', 'w').write('x'))\n"
           "finish(Bomb())", writes, "ValueError: finish|PermissionError|NotImplementedError"),
    Attack(16, "del-bomb", "class Bomb:\n    def __del__(self): open('@folder@/evil', 'w').write('x')\nBomb()",
           writes, "Bomb|NotImplementedError|no output"),
    Attack(16, "reduce-bomb", "class Bomb:\n    def __reduce__(self): return (open, ('@folder@/evil', 'w'))\n"
           "finish([Bomb()])", writes, "ValueError: finish|NotImplementedError", weak=False),
    Attack(17, "bytecode", "def f(): pass\nf.__code__ = f.__code__.replace(co_code=bytes([100, 255] * 50))\nf()",
           hangs_or_dies, NO_ATTRIBUTE),
    Attack(18, "recursion", "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n): return f(n + 1)\nf(0)",
           hangs_or_dies, "AttributeError|RecursionError"),
    Attack(18, "nested-literal", "(" * 100_000 + ")" * 100_000, hangs_or_dies, "SyntaxError|RecursionError|Error"),
    Attack(18, "nested-value", "x = []\nfor _ in range(100_000): x = [x]\nfinish(x)\nx", hangs_or_dies, "."),
    Attack(19, "huge-power", "10 ** 10 ** 9", hangs_or_dies, "MemoryError"),
    Attack(19, "huge-text", "str(10 ** 100_000)", hangs_or_dies, "ValueError: Exceeds the limit"),
    Attack(19, "huge-argument", "finish(10 ** 100_000)", hangs_or_dies, "ValueError: finish"),
    Attack(19, "regex", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')", hangs_or_dies, "no output|TimeoutError"),
    # processes
    Attack(20, "kill", "import os\nos.kill(@sentinel@, 9)", kills, NO_ATTRIBUTE),
    Attack(20, "signal-kill", "import signal\nsignal.pthread_kill(@sentinel@, 9)", kills, NO_MODULE, weak=False),
    Attack(21, "fork-bomb", f"import os\nfor _ in range(1000): os.fork()\n{DONE}", owned, NO_ATTRIBUTE, weak=False),
    Attack(21, "processes", f"import multiprocessing\n{DONE}", owned, NO_MODULE),
    Attack(22, "daemon", "import os\nif os.fork() == 0:\n    if os.fork() == 0: open('@folder@/evil', 'w').write('x')\n"
           "    os._exit(0)", writes_later, NO_ATTRIBUTE),
    Attack(23, "ignore-signals", "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
           hangs_or_dies, NO_MODULE),
    Attack(24, "threads", "import threading\nfor _ in range(100): threading.Thread(target=print).start()\n" + DONE,
           owned, NO_MODULE),
    Attack(25, "ptrace", f"import ctypes\nctypes.CDLL(None).ptrace(0, 0, 0, 0)\n{DONE}", owned, NO_MODULE),
    Attack(26, "namespace", f"import ctypes\nctypes.CDLL(None).unshare(0x10000000)\n{DONE}", owned, NO_MODULE),
    # resources
    Attack(27, "memory", "x = []\nwhile True: x.append('a' * 10 ** 6)", hangs_or_dies, "MemoryError", weak=False),
    Attack(27, "memory-at-once", "x = [0] * 10 ** 10", hangs_or_dies, "MemoryError", weak=False),
    Attack(28, "loop", "while True: pass", hangs_or_dies, "TimeoutError"),
    Attack(28, "stubborn-loop", "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
           hangs_or_dies, "TimeoutError"),
    Attack(29, "flood", "for _ in range(10_000): print('x' * 100)", floods, "more characters were cut"),
    Attack(29, "endless-flood", "while True: print('x' * 100)", floods, "more characters were cut"),
    Attack(30, "stderr-flood", "import sys\nfor _ in range(10_000): print('x' * 100, file=sys.stderr)", floods, "."),
    Attack(31, "one-line", "print('x' * (4 << 20))", floods, "more characters were cut"),
    Attack(31, "one-value", "'x' * (4 << 20)", floods, "more characters were cut", weak=False),
    Attack(31, "one-error", "raise ValueError('x' * (4 << 20))", floods, "more characters were cut", weak=False),
    Attack(32, "sleep", "import time\ntime.sleep(3600)\nprint('awake')", hangs_or_dies, "awake"),
    # network
    Attack(33, "tcp", "import socket\nsocket.create_connection(('127.0.0.1', @port@))", connects, NO_MODULE),
    Attack(33, "http", "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:@port@', timeout=0.3)",
           connects, NO_MODULE),
    Attack(33, "asyncio", "import asyncio\nasyncio.run(asyncio.open_connection('127.0.0.1', @port@))",
           connects, NO_ATTRIBUTE),
    Attack(34, "names", f"import socket\nsocket.getaddrinfo('localhost', 80)\n{DONE}", owned, NO_MODULE),
    Attack(35, "abstract", "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0@abstract@')",
           connects, NO_MODULE),
    Attack(36, "netlink", f"import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\n{DONE}",
           owned, NO_MODULE),
    Attack(37, "io-uring", f"import ctypes\nctypes.CDLL(None).syscall(425, 1, 0)\n{DONE}", owned, NO_MODULE),
    # secrets
    Attack(38, "environ", "import os\nprint(os.environ['CANARY'])", reads, "'os.environ' is not supported"),
    Attack(38, "getenv", "import os\nprint(os.getenv('CANARY'))", reads, "."),
    Attack(39, "proc-environ", "print(open('/proc/self/environ').read())", reads, DENIED),
    Attack(39, "host-environ", "print(open('/proc/@pid@/environ').read())", reads, DENIED),
    Attack(40, "descriptors", "import os\nprint(os.read(@fd@, 100))", reads, NO_ATTRIBUTE),
    Attack(40, "open-descriptor", "print(open(@fd@).read())", reads, "TypeError|PermissionError"),
    Attack(40, "proc-fd", "print(open('/proc/@pid@/fd/@fd@').read())", reads, DENIED),
    Attack(41, "keyring", f"import ctypes\nctypes.CDLL(None).syscall(250, 0, -3, 0)\n{DONE}", owned, NO_MODULE),
]  # fmt: skip
