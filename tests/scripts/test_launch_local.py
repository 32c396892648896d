"""The local launcher, on tiny scripts.

Nothing here waits for a time to pass: it waits for lines, and for processes to end.
"""

import contextlib
import io
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from scripts import launch_local

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE_S = 60.0  # until what must happen has happened

# Ends when told, however the signal comes, and says by which.
TOLD = """
import signal, sys
def end(number, _):
    print(signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
print("ready")
while True:
    signal.pause()
"""

# Does not end when told; its own child does not either.
STUCK = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    print("stuck", os.getpid(), child)
while True:
    signal.pause()
"""


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def launched(commands: Sequence[str], grace_s: float = PATIENCE_S) -> tuple[int, str]:
    """Returns the status and the output of Python texts, one a process."""
    out = io.BytesIO()
    status = launch_local.launch([*map(python, commands)], grace_s=grace_s, out=out)
    return status, out.getvalue().decode()


def start(
    script: pathlib.Path, *arguments: str, num_processes: int = 2, grace_s: float = 60
) -> "subprocess.Popen[str]":
    """Starts the launcher's command."""
    return subprocess.Popen(
        [
            sys.executable,
            "scripts/launch_local.py",
            f"--num_processes={num_processes}",
            f"--grace_s={grace_s}",
            f"--script={script}",
            *arguments,
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def lines_until(process: "subprocess.Popen[str]", word: str, count: int) -> list[str]:
    """Reads lines until `count` of them have had a word in them."""
    assert process.stdout is not None
    lines: list[str] = []
    while sum(word in line for line in lines) < count:
        line = process.stdout.readline()
        assert line, f"ended after {lines}"
        lines.append(line)
    return lines


def assert_end(pids: Sequence[str], end: Callable[[], object]) -> None:
    """Asserts that processes, ours or not, end when `end` is called."""
    pidfds = [os.pidfd_open(int(pid)) for pid in pids]
    try:
        end()
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], PATIENCE_S)[0]
    finally:
        for pidfd in pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "script.py"


def test_each_line_stays_whole_and_says_whose_it_is():
    text = """
import sys
for i in range(200):
    for piece in ("line ", str(i), "\\n"):
        sys.stdout.write(piece)
        sys.stdout.flush()
print("the last", end="")
"""
    status, output = launched([text] * 3)
    assert status == 0
    expected = [f"line {i}" for i in range(200)] + ["the last"]
    lines = output.splitlines()
    assert len(lines) == 3 * len(expected)
    for number in range(3):
        prefix = f"[{number}] "
        mine = [line[len(prefix) :] for line in lines if line.startswith(prefix)]
        assert mine == expected


def test_standard_error_comes_in_its_place():
    text = "import sys; print('a'); print('b', file=sys.stderr); print('c')"
    assert launched([text]) == (0, "[0] a\n[0] b\n[0] c\n")


def test_the_status_is_that_of_the_first_to_fail(tmp_path: pathlib.Path):
    """Process 0 fails once process 2 is gone; process 1 is content."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    late = f"""
import os, sys, time
with open({str(fifo)!r}) as file:
    other = f"/proc/{{file.read()}}"
while os.path.exists(other):
    time.sleep(0.001)
sys.exit(4)
"""
    early = f"""
import os, sys
with open({str(fifo)!r}, "w") as file:
    file.write(str(os.getpid()))
sys.exit(3)
"""
    status, output = launched([late, "", early])
    assert status == 3
    assert output.splitlines() == [
        "launch_local: process 2 ended with status 3.",
        "launch_local: process 0 ended with status 4.",
        "launch_local: process 2 failed first: it ended with status 3.",
    ]


def test_a_process_that_was_killed_has_the_status_that_a_shell_gives_it():
    status, output = launched(["import os; os.kill(os.getpid(), 9)"])
    assert status == 128 + 9
    assert "process 0 failed first: it was killed by SIGKILL." in output


def test_a_command_that_does_not_exist_fails():
    out = io.BytesIO()
    assert launch_local.launch([["/no/such/command"]], out=out) != 0
    assert b"/no/such/command" in out.getvalue() or b"No such file" in out.getvalue()


def test_a_stuck_process_is_killed_once_another_has_failed():
    status, output = launched([STUCK, "import sys; sys.exit(5)"], grace_s=0.5)
    assert status == 5
    assert "killing 0, still there 0.5 s later." in output
    assert "process 0 was killed by SIGKILL." in output


def test_the_children_of_a_process_end_with_it(tmp_path: pathlib.Path):
    """The child's end is the end of what it has open."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    parent = f"""
import os, signal
held = os.open({str(fifo)!r}, os.O_WRONLY)
os.write(held, b"begun")
if not os.fork():
    while True:
        signal.pause()
"""
    read = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    assert launched([parent]) == (0, "")
    os.set_blocking(read, True)
    with open(read) as file:
        assert file.read() == "begun"


def test_each_process_is_told_where_the_others_are(script: pathlib.Path):
    script.write_text(
        "import os, sys\n"
        "print(*sys.argv[1:], os.environ['JAX_LOCAL_DEVICE_IDS'],"
        " os.environ['JAX_COORDINATOR_BIND_ADDRESS'])\n"
    )
    process = start(script, "--gpus_per_process=2", "--", "--config=file.py", "--a=1")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    pattern = (
        r"\[(\d)\] --config=file.py --a=1 --config.cluster.coordinator=(127.0.0.1:\d+) "
        r"--config.cluster.num_processes=2 --config.cluster.process_id=(\d) (\S+) (\S+)"
    )
    found = sorted(re.findall(pattern, output))
    address = found[0][1]
    assert found == [
        ("0", address, "0", "0,1", address),
        ("1", address, "1", "2,3", address),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all_which_may_end_in_order(
    number: signal.Signals, script: pathlib.Path
):
    script.write_text(TOLD)
    process = start(script, num_processes=3)
    lines_until(process, "ready", 3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert sorted(output.splitlines()) == [f"[{i}] {number.name}" for i in range(3)]
    assert process.returncode == 0


def test_a_stuck_process_is_killed_after_a_signal_and_its_child_too(
    script: pathlib.Path,
):
    script.write_text(STUCK)
    process = start(script, num_processes=1, grace_s=0.5)
    (line,) = lines_until(process, "stuck", 1)
    assert_end(line.split()[2:], process.terminate)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert "killing 0, still there 0.5 s later." in output
    assert process.returncode == 128 + 9


def test_a_launcher_that_is_killed_leaves_no_process_behind(script: pathlib.Path):
    script.write_text(
        TOLD.replace('print("ready")', "import os; print('pid', os.getpid())")
    )
    process = start(script, num_processes=3)
    lines = lines_until(process, "pid", 3)
    pids = [line.split()[-1] for line in lines if "pid" in line]
    assert_end(pids, process.kill)
    process.communicate(timeout=PATIENCE_S)
