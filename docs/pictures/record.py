"""Records the quickstart: ``python docs/pictures/record.py`` runs `tensorshard train` in a terminal of its own.
It writes quickstart.json, which quickstart.svg is drawn from. It takes as long as the command: two minutes on two idle
cores."""

import fcntl
import json
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path

_COLUMNS, _ROWS = 96, 200
_COMMAND = ("tensorshard", "train")
_TOKEN = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\x1b\][^\x07]*\x07|(\r)|(\n)|([^\x1b\r\n]+)")


class Screen:
    """What a terminal shows: text in lines, and a cursor. Colours are left out."""

    def __init__(self) -> None:
        self.lines: list[str] = [""]
        self.row = self.column = 0

    def write(self, written: str) -> None:
        """Takes text with carriage returns, cursor movements and erasures."""
        for options, letter, back, down, words in _TOKEN.findall(written):
            if words:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + words + line[self.column + len(words) :]
                self.column += len(words)
            elif back:
                self.column = 0
            elif down:
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append("")
            elif letter == "A":
                self.row = max(0, self.row - int(options or 1))
            elif letter == "K":
                self.lines[self.row] = "" if options == "2" else self.lines[self.row][: self.column]


def record(command: tuple[str, ...]) -> dict[str, object]:
    """Runs `command`; returns what each line of the terminal showed from when on, in seconds."""
    began = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            os.environ["TERM"] = "xterm-256color"
            code = os.spawnvp(os.P_WAIT, command[0], command)
        os._exit(code)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    screen, states = Screen(), list[list[tuple[float, str]]]()
    rest = b""
    while True:
        try:
            rest += os.read(terminal, 1 << 16)
        except OSError:  # the command has ended
            break
        whole, newline, rest = rest.rpartition(b"\n") if b"\n" in rest else (rest, b"", b"")
        screen.write((whole + newline).decode(errors="replace"))
        now = round(time.monotonic() - began, 1)
        for number, line in enumerate(screen.lines):
            if number == len(states):
                states.append([])
            if line.rstrip() != (states[number][-1][1] if states[number] else ""):
                states[number].append((now, line.rstrip()))
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed:\n" + "\n".join(screen.lines))
    return {"command": " ".join(command), "seconds": round(time.monotonic() - began, 1), "lines": states}


if __name__ == "__main__":
    recorded = record(_COMMAND)
    Path(__file__).with_name("quickstart.json").write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
