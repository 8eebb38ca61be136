"""The socket on which a running engine answers questions, with real processes at both ends."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.observe.client import EngineNotFound, NoAnswer, ask, find_engine, find_engines
from kvtier.observe.status_socket import SocketUnavailable, StatusSocket
from tests.tiering.patience import PATIENCE_S

ENGINE = """
import sys, time
from kvtier.observe.status_socket import StatusSocket
its = StatusSocket()
its.answer("status", lambda question: {"number": 7})
its.start()
print(its.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTIER_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def listening(run_dir: Path) -> Iterator[StatusSocket]:
    its = StatusSocket()
    its.answer("status", lambda question: {"asked": dict(question)})
    its.start()
    try:
        yield its
    finally:
        its.close()


def start_engine() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def raw(path: Path, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(path))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").read()


def test_an_engine_is_found_and_asked(listening: StatusSocket) -> None:
    (found,) = find_engines()
    assert (found.pid, found.path) == (os.getpid(), listening.path)
    assert ask(find_engine(), "status", of="x")["asked"] == {"ask": "status", "of": "x"}
    assert find_engine(str(os.getpid())).path == listening.path
    assert ask(find_engine(str(listening.path)), "status")


def test_only_its_user_may_enter(listening: StatusSocket, run_dir: Path) -> None:
    assert stat.S_IMODE(os.stat(listening.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(run_dir).st_mode) == 0o700


def test_nobody_may_enter_before_its_mode_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket at a path of the user's may be in a directory that others may enter."""
    modes: list[int] = []
    monkeypatch.setattr(
        os, "chmod", lambda path, _mode: modes.append(stat.S_IMODE(os.stat(path).st_mode))
    )
    former = os.umask(0)
    try:
        StatusSocket(tmp_path / "it.sock").close()
    finally:
        os.umask(former)
    assert modes == [0o600]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_gets_no_answer_even_past_the_modes(
    listening: StatusSocket, run_dir: Path
) -> None:
    for folder in (run_dir, *run_dir.parents[:-1]):
        if stat.S_IMODE(os.stat(folder).st_mode) & 0o001 == 0:
            os.chmod(folder, 0o755)
    os.chmod(listening.path, 0o666)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(listening.path))
                code = 2
                try:
                    connection.sendall(b'{"ask": "status"}\n')
                    code = 4 if connection.recv(100) else 3
                except (BrokenPipeError, ConnectionResetError):
                    code = 3
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3


@pytest.mark.parametrize(
    "question",
    [b"", b"\n", b"status\n", b"[]\n", b"{}\n", b'{"ask": 7}\n', b'{"ask": []}\n', b"[" * 9000],
    ids=repr,
)
def test_a_wrong_question_gets_the_right_ones(listening: StatusSocket, question: bytes) -> None:
    answer = json.loads(raw(listening.path, question))
    assert "status" in answer["error"]
    assert ask(listening.path, "status")


def test_an_endless_question_is_cut_off(listening: StatusSocket) -> None:
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        raw(listening.path, b"x" * (64 << 20))
    assert ask(listening.path, "status")


def test_a_client_that_says_nothing_does_not_stop_the_others(listening: StatusSocket) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(listening.path))
        assert ask(listening.path, "status")


def test_an_answer_that_fails_is_told_and_logged(
    listening: StatusSocket, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(question: object) -> dict[str, Any]:
        raise ValueError("give a key")

    def fail(question: object) -> dict[str, Any]:
        raise RuntimeError("a bug")

    listening.answer("explain", refuse)
    listening.answer("page", fail)
    listening.answer("curve", lambda question: {"what JSON lacks": object()})
    with pytest.raises(NoAnswer, match="give a key"):
        ask(listening.path, "explain")
    for question in ("page", "curve") * 3:
        with pytest.raises(NoAnswer, match="its log says why"):
            ask(listening.path, question)
    assert caplog.text.count("RuntimeError: a bug") == 1, "the log has it once"
    assert "not JSON serializable" in caplog.text
    assert ask(listening.path, "status")


def test_too_many_open_files_do_not_end_it(listening: StatusSocket) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        lowest_free = os.dup(client.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            client.connect(str(listening.path))
            client.sendall(b'{"ask": "status"}\n')
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(100)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        client.settimeout(PATIENCE_S)
        assert b"asked" in client.recv(100)


def test_functions_are_called_every_second_until_they_fail(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    its = StatusSocket()
    calls: list[str] = []

    def fail() -> None:
        calls.append("failing")
        raise RuntimeError("a bug")

    its.every_second += [fail, lambda: calls.append("good")]
    its.start()
    deadline = time.monotonic() + PATIENCE_S
    try:
        while calls.count("good") < 2:
            assert time.monotonic() < deadline
            # Questions do not keep the functions from being called.
            with pytest.raises(NoAnswer):
                ask(its.path, "nothing")
    finally:
        its.close()
    assert calls.count("failing") == 1


def test_closing_leaves_nothing(run_dir: Path) -> None:
    threads = threading.active_count()
    its = StatusSocket()
    its.start()
    its.close()
    its.close()
    assert list(run_dir.iterdir()) == []
    assert threading.active_count() == threads
    StatusSocket().close()  # one that was never started
    assert list(run_dir.iterdir()) == []


def test_a_forked_child_does_not_remove_the_socket(listening: StatusSocket) -> None:
    child = os.fork()
    if not child:
        code = 1
        try:
            listening.close()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert ask(find_engine(), "status")


def test_two_engines_of_one_process(listening: StatusSocket) -> None:
    second = StatusSocket()
    second.start()
    try:
        assert second.path != listening.path
        with pytest.raises(EngineNotFound, match="2 engines run here"):
            find_engine()
        assert find_engine(str(second.path)).path == second.path
    finally:
        second.close()


def test_an_engine_in_another_process_and_what_a_killed_one_leaves(run_dir: Path) -> None:
    with pytest.raises(EngineNotFound, match="no engine of this user runs here"):
        find_engine()
    process, path = start_engine()
    try:
        assert ask(find_engine(str(process.pid)), "status") == {"number": 7}
        with pytest.raises(EngineNotFound, match=f"There are: {process.pid}"):
            find_engine("1")
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert path.exists()
    assert find_engines() == []
    with pytest.raises(NoAnswer, match="refused"):
        ask(path, "status")
    later = StatusSocket()  # removes what the killed engine has left
    try:
        assert [its.name for its in run_dir.iterdir()] == [later.path.name]
    finally:
        later.close()


FORKING = """
import os, sys
from kvtier.observe.status_socket import StatusSocket
its = StatusSocket()
its.start()
if not os.fork():
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait()
"""


def test_a_killed_engine_is_gone_though_a_forked_child_lives(run_dir: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:  # the end closes the pipe, and so ends the child
        assert process.stdout is not None
        assert process.stdout.readline() == "forked\n"
        assert len(find_engines()) == 1
        process.kill()
        process.wait()
        assert len(list(run_dir.iterdir())) == 1
        assert find_engines() == []


def test_a_stopped_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.observe.client._TIMEOUT_S", 0.3)
    process, path = start_engine()
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(NoAnswer, match="may be stopped"):
            ask(path, "status")
        process.send_signal(signal.SIGCONT)
        monkeypatch.setattr("kvtier.observe.client._TIMEOUT_S", PATIENCE_S)
        assert ask(path, "status") == {"number": 7}
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_stopped_engine_that_admits_no_more_clients_is_still_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.observe.client._TIMEOUT_S", 0.5)
    process, path = start_engine()
    clients: list[socket.socket] = []
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        error = 0
        while not error:
            clients.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            clients[-1].setblocking(False)
            error = clients[-1].connect_ex(str(path))
        assert error == errno.EAGAIN
        assert [found.pid for found in find_engines()] == [process.pid]
        assert find_engine(str(path)).path == path
        with pytest.raises(NoAnswer, match="may be stopped or very busy"):
            ask(path, "status")
    finally:
        for client in clients:
            client.close()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize(
    "command", [["top", "--once"], ["switch"], ["explain"], ["plan", "--engine"]]
)
def test_an_engine_of_another_version_is_named(
    command: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    its = StatusSocket()
    for question in ("status", "switch", "explain", "curve"):
        its.answer(question, lambda _: {"an": "answer"})
    its.start()
    try:
        assert main(command) == 2
    finally:
        its.close()
    assert "it may run another version of kvtier" in capsys.readouterr().err


def test_why_nothing_answers_at_a_path(run_dir: Path, tmp_path: Path) -> None:
    process, path = start_engine()
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    (tmp_path / "file").touch()
    for name, reason in (
        (path, "the engine has ended"),
        (tmp_path / "file", "it is no socket"),
        (tmp_path / "nothing", "there is no such socket"),
    ):
        with pytest.raises(EngineNotFound, match=reason):
            find_engine(str(name))


def test_a_directory_that_others_may_enter_is_refused(run_dir: Path) -> None:
    run_dir.mkdir()
    run_dir.chmod(0o755)
    with pytest.raises(SocketUnavailable, match="0700"):
        StatusSocket()


def test_sockets_where_others_may_put_theirs_are_not_asked(
    listening: StatusSocket, run_dir: Path
) -> None:
    run_dir.chmod(0o777)
    with pytest.raises(EngineNotFound, match="other users may enter it"):
        find_engine()
    with pytest.raises(EngineNotFound, match="other users may enter it"):
        find_engines()
    run_dir.chmod(0o700)
    assert find_engine().path == listening.path


@pytest.mark.skipif(os.getuid() != 0, reason="needs to be root")
def test_root_asks_the_engines_of_another_user_in_the_directory_that_it_names(
    listening: StatusSocket, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = 65534
    os.chown(run_dir, nobody, nobody)
    assert find_engine().path == listening.path
    run_dir.chmod(0o755)
    with pytest.raises(EngineNotFound, match="other users may enter it"):
        find_engine()
    run_dir.chmod(0o700)
    monkeypatch.delenv("KVTIER_RUN_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_dir.parent))
    run_dir.rename(run_dir.parent / "kvtier")
    with pytest.raises(EngineNotFound, match="not a directory of this user"):
        find_engine()


def test_a_link_is_no_directory(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    run_dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SocketUnavailable, match="not a directory"):
        StatusSocket()


def test_a_file_at_the_path_stays(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("mine")
    with pytest.raises(SocketUnavailable, match="in use"):
        StatusSocket(path)
    assert path.read_text() == "mine"
