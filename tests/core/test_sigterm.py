"""One SIGTERM is one drain, whoever hears of it first and however its handlers call each other."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PRELUDE = """
import ctypes, os, signal, sys, threading, time
from mlflashpoint.core import sigterm

class Owner:
    pass

owner, drains = Owner(), []

def on_sigterm(drain=lambda: drains.append(len(drains) + 1), budget_s=5.0):
    sigterm.on_sigterm(owner, drain, budget_s)

def until(met):
    give_up = time.monotonic() + 20
    while not met() and time.monotonic() < give_up:
        time.sleep(0.01)

def in_native_code(seconds):
    # The signal goes to another thread, and so does not end the call.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ctypes.CDLL(None).sleep(seconds)

def terminate(after_s=0.0):
    def kill():
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGTERM)
    thread = threading.Thread(target=kill)
    thread.start()
    return thread

def note(number, frame):
    print("noted", flush=True)

def compose():
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: (before(number, frame), note(number, frame)))

def settle():
    # Whoever were to drain again would have begun by then.
    until(lambda: drains)
    time.sleep(0.5)
    print(f"{len(drains)} drains", flush=True)
"""


def process(body):
    """Exit code and output of a process that does that."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.split("\n")[:-1]


def test_a_signal_that_was_drained_while_the_main_thread_was_in_native_code_is_not_drained_again_behind_it():
    body = """
        signal.signal(signal.SIGTERM, note)
        on_sigterm()
        terminate(0.3)
        in_native_code(2)
        print(f"{len(drains)} in native code", flush=True)
        settle()
    """
    assert process(body) == (0, ["noted", "1 in native code", "1 drains"])


def test_a_drain_that_has_used_up_its_budget_in_native_code_puts_the_end_off_no_longer():
    body = """
        on_sigterm(lambda: (print("drain", flush=True), time.sleep(1)), budget_s=1.0)
        terminate(0.2)
        in_native_code(2)
        time.sleep(20)
    """
    assert process(body) == (-15, ["drain"])


@pytest.mark.parametrize("native_s", [0, 1])
def test_a_second_signal_behind_a_finished_drain_drains_anew(native_s):
    body = f"""
        signal.signal(signal.SIGTERM, note)
        on_sigterm()
        for time_ in (1, 2):
            terminate(0.2)
            in_native_code({native_s})
            until(lambda: len(drains) == time_)
        settle()
    """
    assert process(body) == (0, ["noted", "noted", "2 drains"])


def test_two_signals_while_the_main_thread_is_in_native_code_are_two_drains():
    body = """
        signal.signal(signal.SIGTERM, note)
        on_sigterm()
        terminate(0.2), terminate(1.0)
        in_native_code(2)
        settle()
    """
    assert process(body) == (0, ["noted", "2 drains"])


def test_handlers_of_ours_on_both_sides_of_a_frameworks_are_one_drain():
    body = """
        on_sigterm()
        compose()
        sigterm.install()
        terminate()
        settle()
    """
    assert process(body) == (0, ["noted", "1 drains"])


def test_a_frameworks_handler_that_takes_long_before_it_calls_ours_is_one_drain():
    body = """
        on_sigterm()
        before = signal.getsignal(signal.SIGTERM)

        def late(number, frame):
            until(lambda: drains)
            time.sleep(0.5)
            before(number, frame)

        signal.signal(signal.SIGTERM, late)
        sigterm.install()
        terminate()
        settle()
    """
    assert process(body) == (0, ["1 drains"])


def test_where_another_has_the_wakeup_descriptor_each_signal_is_one_drain():
    body = """
        signal.signal(signal.SIGTERM, note)
        signal.set_wakeup_fd(os.open("/dev/null", os.O_WRONLY | os.O_NONBLOCK))
        on_sigterm()
        compose()
        sigterm.install()
        for time_ in (1, 2):
            terminate()
            until(lambda: len(drains) == time_)
        settle()
    """
    assert process(body) == (0, ["noted", "noted", "noted", "noted", "2 drains"])


def test_a_drain_begins_before_the_handler_that_was_there_is_called():
    body = """
        def leave(number, frame):
            print(f"{len(drains)} drains", flush=True)
            os._exit(3)

        signal.signal(signal.SIGTERM, leave)
        on_sigterm(lambda: (drains.append(1), time.sleep(5)))
        terminate()
        time.sleep(20)
    """
    assert process(body) == (3, ["1 drains"])


def test_a_handler_that_raises_keeps_no_later_signal_from_being_drained():
    body = """
        def leave(number, frame):
            raise SystemExit(7)

        signal.signal(signal.SIGTERM, leave)
        signal.set_wakeup_fd(os.open("/dev/null", os.O_WRONLY | os.O_NONBLOCK))
        on_sigterm()
        for time_ in (1, 2):
            try:
                terminate()
                until(lambda: len(drains) == time_)
                time.sleep(1)
            except SystemExit:
                print("left", flush=True)
        settle()
    """
    assert process(body) == (0, ["left", "left", "2 drains"])


def test_a_signal_to_a_forked_child_drains_neither_there_nor_in_its_parent():
    body = """
        on_sigterm(lambda: drains.append(print("drain", flush=True)))
        child = os.fork()
        if child == 0:
            time.sleep(20)
        time.sleep(0.3)
        os.kill(child, signal.SIGTERM)
        print("child", os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
        time.sleep(0.5)
        print(f"{len(drains)} drains", flush=True)
    """
    assert process(body) == (0, ["child 15", "0 drains"])


def test_a_forked_child_that_has_something_to_drain_itself_does():
    body = """
        on_sigterm(lambda: print("the parent's", flush=True))
        child = os.fork()
        if child == 0:
            on_sigterm(lambda: print("the child's", flush=True))
            terminate()
            time.sleep(20)
        print("child", os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
        time.sleep(0.5)
    """
    assert process(body) == (0, ["the child's", "child 15"])
