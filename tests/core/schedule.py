"""Runs programs one operation at a time, in any order that a test chooses, and kills them between any two."""

import threading


class Killed(BaseException):
    """Raised in a program at the point where its process dies."""


class Program(threading.Thread):
    def __init__(self, schedule, body):
        super().__init__(daemon=True)
        self.schedule, self.body = schedule, body
        self.go, self.killed, self.finished, self.failure = threading.Semaphore(0), False, False, None

    def run(self):
        self.go.acquire()
        try:
            if not self.killed:
                self.body()
        except Killed:
            pass
        except BaseException as error:
            self.failure = error
        finally:
            self.finished = True
            self.schedule.handed_back.release()


class Schedule:
    """Only one program runs at a time, from one ``point`` to the next."""

    def __init__(self):
        self.programs, self.handed_back = [], threading.Semaphore(0)

    def spawn(self, body):
        program = Program(self, body)
        self.programs.append(program)
        program.start()

    def point(self):
        """Called by programs before each operation that others can see; does nothing elsewhere."""
        program = threading.current_thread()
        if not isinstance(program, Program):
            return
        if not program.killed:
            self.handed_back.release()
            program.go.acquire()
        if program.killed:
            raise Killed

    def advance(self, choice):
        """Let one of the live programs make one step; False if none is left."""
        live = [program for program in self.programs if not program.finished]
        if not live:
            return False
        program = live[choice % len(live)]
        program.go.release()
        assert self.handed_back.acquire(timeout=30), "a program is stuck"
        if program.failure is not None:
            raise program.failure
        return True

    def kill(self):
        for program in self.programs:
            program.killed = True
            if not program.finished:
                program.go.release()
                program.join(30)
        self.programs = []
        while self.handed_back.acquire(blocking=False):
            pass
