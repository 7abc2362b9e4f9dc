import multiprocessing
import os
from pathlib import Path
from threading import Thread

import pytest

from holdfast.core import locks
from holdfast.core.errors import HoldfastError


def count_up(path: Path, times: int) -> None:
    for _ in range(times):
        with locks.hold(path.with_name("lock")):
            path.write_text(str(int(path.read_text()) + 1))


def test_waiting_processes_hold_a_lock_one_after_another(tmp_path):
    path = tmp_path / "count"
    path.write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=count_up, args=(path, 50)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert path.read_text() == "150"


def test_a_lock_is_released_after_an_error_and_by_another_thread(tmp_path):
    path = tmp_path / "lock"
    with pytest.raises(RuntimeError), locks.hold_or_refuse(path):
        raise RuntimeError
    held = locks.hold_or_refuse(path)
    held.__enter__()
    with pytest.raises(HoldfastError, match=f"in use by process {os.getpid()};"), locks.hold_or_refuse(path):
        pass
    thread = Thread(target=held.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    with locks.hold_or_refuse(path):
        pass


def test_looking_at_a_lock_writes_nothing(tmp_path):
    path = tmp_path / "lock"
    assert not locks.is_held(path)
    assert list(tmp_path.iterdir()) == []
    with locks.hold_or_refuse(path):
        files = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
        assert locks.is_held(path)
        assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == files
    assert not locks.is_held(path)


def test_looking_at_a_lock_does_not_refuse_its_holder(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    looking = True

    def look() -> None:
        while looking:
            locks.is_held(path)

    thread = Thread(target=look)
    thread.start()
    try:
        for _ in range(50):
            with locks.hold_or_refuse(path):
                pass
    finally:
        looking = False
        thread.join()


def test_a_lock_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    for hold in (locks.hold, locks.hold_or_refuse):
        with pytest.raises(HoldfastError, match="cannot write"), hold(tmp_path / "file" / "lock"):
            pass
