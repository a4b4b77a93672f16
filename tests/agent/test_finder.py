"""The import hook: everything that can be done with a hooked module works as without the hook."""

from __future__ import annotations

import zipfile

import pytest

from tests.agent.support import Workspace, python

SAVE = 'patch("save")'
ACTIVE = "import table; import fw.core; fw.core.save(1); print(len(table.CALLS), states()['save'][0])"


def test_a_target_is_patched_when_its_module_is_imported(workspace: Workspace) -> None:
    workspace.table(SAVE)
    assert workspace.check(ACTIVE) == "1 active\n"


def test_nothing_heavier_than_the_finder_is_loaded_before_a_watched_package(workspace: Workspace) -> None:
    workspace.table(SAVE)
    code = """
import sys
before = "mlflashpoint.agent.registry" in sys.modules, "wrapt" in sys.modules
import fw
print(before, "mlflashpoint.agent.registry" in sys.modules, "wrapt" in sys.modules)
"""
    assert workspace.check(code) == "(False, False) True False\n"


def test_the_module_keeps_its_own_loader_source_and_resources(workspace: Workspace) -> None:
    workspace.table('patch("boot", module="fw"), patch("save")')
    workspace.write("fw/__init__.py", "def boot(): return 1\n")
    workspace.write("fw/data.txt", "a resource")
    code = """
import importlib.resources, importlib.util, inspect, pkgutil
import fw.core
kind = type(fw.core.__loader__).__name__
print(kind, type(fw.core.__spec__.loader).__name__, type(fw.__loader__).__name__)
print(importlib.resources.files("fw").joinpath("data.txt").read_text(), pkgutil.get_data("fw", "data.txt"))
print("class Manager" in inspect.getsource(fw.core), fw.core.__spec__.origin == fw.core.__file__)
print(importlib.util.find_spec("fw.core") is fw.core.__spec__, states()["boot"][0])
"""
    assert workspace.check(code).splitlines() == [
        "SourceFileLoader SourceFileLoader SourceFileLoader",
        "a resource b'a resource'",
        "True True",
        "True active",
    ]


def test_a_spec_that_is_found_and_not_executed_answers_like_the_real_one(workspace: Workspace) -> None:
    workspace.table(SAVE)
    code = """
import importlib.util
spec = importlib.util.find_spec("fw.core")
print(spec.loader.get_filename() == spec.origin, spec.loader.is_package("fw.core"))
print(spec.cached == importlib.util.cache_from_source(spec.origin))
print("def save" in spec.loader.get_source("fw.core"), spec.loader.get_code("fw.core").co_name)
import copy
print(type(copy.copy(spec.loader)).__name__)
"""
    assert workspace.check(code).splitlines() == ["True False", "True", "True <module>", "HookLoader"]


def test_python_m_runs_a_hooked_package_and_a_hooked_module(workspace: Workspace) -> None:
    workspace.table('patch("boot", module="fw"), patch("save"), patch("x", module="fw.__main__")')
    workspace.write("fw/__init__.py", "def boot(): return 1\n")
    workspace.write("fw/__main__.py", "import fw; print('main', fw.boot(), __spec__.name)\n")
    workspace.write("fw/tool.py", "print('tool', __name__)\n")
    env = workspace.environment()
    assert python("-m", "fw", env=env).stdout == "main 1 fw.__main__\n"
    assert python("-m", "fw.tool", env=env).stdout == "tool __main__\n"
    done = python("-m", "fw.core", env=env)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_namespace_package_can_be_imported_and_modules_below_it_patched(workspace: Workspace) -> None:
    (workspace.folder / "fw" / "__init__.py").unlink()
    workspace.table(f'{SAVE}, patch("anything", module="fw")')
    code = ACTIVE + "; import fw; print(fw.__file__ if hasattr(fw, '__file__') else None)"
    assert workspace.check(code) == "1 active\nNone\n"


def test_a_package_whose_init_waits_for_a_thread_that_imports_a_target_does_not_hang(workspace: Workspace) -> None:
    workspace.table(SAVE)
    workspace.write(
        "fw/__init__.py",
        """
import threading
def work():
    from fw.core import save
thread = threading.Thread(target=work, daemon=True)
thread.start()
thread.join(20)
FINISHED = not thread.is_alive()
""",
    )
    assert workspace.check("import fw; print(fw.FINISHED, states()['save'][0])") == "True active\n"


def test_threads_that_import_the_same_target_get_one_patched_module(workspace: Workspace) -> None:
    workspace.table(SAVE)
    code = """
import threading
seen = []
def work():
    import fw.core
    seen.append(fw.core.save)
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]; [t.join(20) for t in threads]
print(len(seen), len(set(map(id, seen))), hasattr(seen[0].__wrapped__, "__wrapped__"), states()["save"][0])
"""
    assert workspace.check(code) == "8 1 False active\n"


def test_an_import_error_of_the_target_is_the_users_and_a_second_try_works(workspace: Workspace) -> None:
    workspace.table(SAVE)
    core = (workspace.folder / "fw" / "core.py").read_text()
    workspace.write("fw/core.py", "import os\nif 'BREAK' in os.environ: raise KeyError('theirs')\n" + core)
    code = """
import os, sys
os.environ["BREAK"] = "1"
try:
    import fw.core
except KeyError as error:
    print(repr(error), "fw.core" in sys.modules, states()["save"][0])
del os.environ["BREAK"]
import fw.core
print(states()["save"][0])
"""
    assert workspace.check(code).splitlines() == ["KeyError('theirs') False pending", "active"]


def test_a_missing_module_of_a_watched_package_is_a_plain_module_not_found_error(workspace: Workspace) -> None:
    workspace.table('patch("f", module="fw.gone")')
    done = workspace.run("import fw.gone")
    assert done.stderr.rstrip().endswith("ModuleNotFoundError: No module named 'fw.gone'")
    assert "agent" not in done.stderr


def test_reload_patches_the_new_functions_once(workspace: Workspace) -> None:
    workspace.table(SAVE)
    code = """
import importlib, table, fw.core
fw.core.save(1)
importlib.reload(fw.core)
fw.core.save(2)
importlib.reload(fw.core)
fw.core.save(3)
print([args for _, args, _ in table.CALLS], hasattr(fw.core.save.__wrapped__, "__wrapped__"), states()["save"][0])
"""
    assert workspace.check(code) == "[(1,), (2,), (3,)] False active\n"


def test_another_finder_that_asks_all_the_others_does_not_recurse(workspace: Workspace) -> None:
    workspace.table(SAVE)
    code = """
import importlib.util, sys
class Asks:
    busy = False
    def find_spec(self, name, path=None, target=None):
        if self.busy:
            return None
        self.busy = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.busy = False
sys.meta_path.insert(0, Asks())
"""
    assert workspace.check(code + ACTIVE) == "1 active\n"
    assert workspace.check(code.replace("insert(0,", "insert(1,") + ACTIVE) == "1 active\n"


def test_a_finder_that_walks_the_others_as_ours_does_makes_no_endless_loop(workspace: Workspace) -> None:
    workspace.table(SAVE)
    code = """
import sys
asked = []
class Walks:
    def find_spec(self, name, path=None, target=None):
        asked.append(name)
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                return spec
sys.meta_path.insert(0, Walks())
"""
    after = ACTIVE + "; print(asked.count('fw.core'))"
    assert workspace.check(code + after) == "1 active\n2\n"
    assert workspace.check(code.replace("insert(0,", "insert(1,") + after) == "1 active\n1\n"


def test_wrapts_own_import_hook_on_the_same_module_works_beside_ours(workspace: Workspace) -> None:
    pytest.importorskip("wrapt")
    workspace.table(SAVE)
    code = """
import wrapt
@wrapt.when_imported("fw.core")
def hook(module):
    print("theirs", module.__name__)
"""
    assert workspace.check(code + ACTIVE) == "theirs fw.core\n1 active\n"


def test_a_finder_that_raises_fails_the_import_as_it_would_without_us(workspace: Workspace) -> None:
    workspace.table(SAVE)
    code = """
import sys
class Raises:
    def find_spec(self, name, path=None, target=None):
        if name == "fw.core":
            raise PermissionError("theirs")
sys.meta_path.insert(1, Raises())
try:
    import fw.core
except PermissionError as error:
    print(error)
"""
    assert workspace.check(code) == "theirs\n"


def test_a_module_that_puts_another_object_in_its_place_is_patched_there(workspace: Workspace) -> None:
    workspace.table(SAVE)
    workspace.write(
        "fw/core.py",
        """
import sys, types
class Lazy(types.ModuleType):
    pass
lazy = Lazy(__name__)
lazy.__spec__ = __spec__
def save(state):
    return state
lazy.save = save
sys.modules[__name__] = lazy
""",
    )
    assert workspace.check(ACTIVE) == "1 active\n"


def test_modules_in_one_zip_archive_share_a_loader_and_only_the_target_is_hooked(workspace: Workspace) -> None:
    workspace.table(SAVE)
    archive = workspace.folder / "zipped.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(workspace.folder / "fw" / "core.py", "fw/core.py")
        file.writestr("fw/__init__.py", "")
        file.writestr("fw/other.py", "def save(): return 'other'\n")
    for name in ("core.py", "__init__.py"):
        (workspace.folder / "fw" / name).unlink()
    (workspace.folder / "fw").rename(workspace.folder / "gone")
    code = f"import sys; sys.path.insert(0, {str(archive)!r}); {ACTIVE}; import fw.other; print(type(fw.__loader__))"
    code += "; print(hasattr(fw.other.save, '__wrapped__'))"
    assert workspace.check(code).splitlines() == ["1 active", "<class 'zipimport.zipimporter'>", "False"]


def test_a_name_taken_while_the_target_still_ran_is_replaced_too(workspace: Workspace) -> None:
    workspace.table(SAVE)
    core = (workspace.folder / "fw" / "core.py").read_text()
    workspace.write("fw/core.py", core + "\nimport fw.user\n")
    workspace.write("fw/user.py", "from fw.core import save as mine\ndef go(): return mine(5)\n")
    code = "import table, fw.core; fw.core.save(1); fw.user.go(); print(len(table.CALLS), states()['save'])"
    out = workspace.check(code)
    assert out.startswith("2 ('active'")
    assert "fw.user.mine" in out


def test_a_half_initialised_module_is_patched_when_it_is_done(workspace: Workspace) -> None:
    workspace.table(SAVE)
    core = (workspace.folder / "fw" / "core.py").read_text()
    workspace.write("fw/core.py", "import late_start\n" + core)
    workspace.write("this_is_not_there_yet.py")
    workspace.write(
        "late_start.py",
        "from mlflashpoint.agent import start\nstart.start((('bridge', ('fw',), 'table'),))\n",
    )
    code = """
from mlflashpoint.agent import start
start.stop()
import fw.core
print(states()["save"][0])
import table, this_is_not_there_yet
fw.core.save(1)
print(len(table.CALLS), states()["save"][0])
"""
    assert workspace.check(code).splitlines() == ["pending", "1 late"]


def test_modules_imported_before_the_agent_are_patched_and_shown_as_late(workspace: Workspace) -> None:
    workspace.table(SAVE)
    workspace.write("user.py", "from fw.core import save\nimport functools\nkept = functools.partial(save)\n")
    code = """
from mlflashpoint.agent import start
start.stop()
import fw.core, user
start.start((("bridge", ("fw",), "table"),))
import table
fw.core.save(1)
user.save(2)
user.kept(3)
print([args for _, args, _ in table.CALLS])
print(states()["save"])
start.stop()
print(user.save is fw.core.save, hasattr(fw.core.save, "__wrapped__"), states()["save"][0])
"""
    calls, state, undone = workspace.check(code).splitlines()
    assert calls == "[(1,), (2,)]"
    assert "'late'" in state and "user.save" in state and "1 such reference" in state
    assert undone == "True False skipped"


def test_starting_twice_changes_nothing(workspace: Workspace) -> None:
    workspace.table(SAVE)
    code = """
import sys
from mlflashpoint.agent import start
finders = len(sys.meta_path)
print(start.start(), len(sys.meta_path) - finders)
"""
    assert workspace.check(code + ACTIVE) == "False 0\n1 active\n"


def test_asking_for_a_spec_loads_nothing(workspace: Workspace) -> None:
    # it happens under the global import lock
    workspace.table(SAVE)
    code = """
import importlib.util, sys
spec = importlib.util.find_spec("fw")
print("mlflashpoint.agent.registry" in sys.modules, "table" in sys.modules)
import fw
print("mlflashpoint.agent.registry" in sys.modules, "table" in sys.modules)
"""
    assert workspace.check(code).splitlines() == ["False False", "True True"]


def test_a_fork_while_another_thread_loads_our_tables_hangs_neither_parent_nor_child(workspace: Workspace) -> None:
    # a fork takes the logging lock and then the import lock
    workspace.frameworks = (("bridge", ("fw",), "table"), ("two", ("other",), "table_two"))
    workspace.table(SAVE)
    workspace.write("other/__init__.py")
    # its module lock is held for ever in the child
    workspace.write("table_two.py", "import table\nPATCHES = ()\n")
    table = workspace.folder / "table.py"
    table.write_text("import logging, time; time.sleep(1); logging.getLogger('new')\n" + table.read_text())
    code = """
import logging, os, signal, threading, time
thread = threading.Thread(target=lambda: __import__("fw.core"))
thread.start()
time.sleep(0.5)
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    import other, decimal
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
thread.join(20)
print(thread.is_alive(), states()["save"][0])
"""
    assert workspace.check(code).splitlines() == ["7", "False active"]


def test_an_agent_that_can_not_load_its_own_modules_says_so_and_the_import_goes_on(workspace: Workspace) -> None:
    workspace.table(SAVE)
    code = """
import sys
sys.modules["mlflashpoint.agent.registry"] = None
import fw.core
print(fw.core.save(1))
"""
    done = workspace.run(code)
    assert (done.returncode, done.stdout) == (0, "('saved', 1, 1)\n")
    assert done.stderr.count("nothing is patched: ModuleNotFoundError") == 1


@pytest.mark.parametrize("framework", ["one", "two"])
def test_of_two_integrations_with_one_broken_the_other_is_active(workspace: Workspace, framework: str) -> None:
    workspace.frameworks = (("one", ("fw",), "table_one"), ("two", ("fw",), "table_two"))
    good, bad = ("one", "two") if framework == "one" else ("two", "one")
    workspace.table(SAVE, name=f"table_{good}")
    workspace.write(f"table_{bad}.py", "raise RuntimeError('a broken integration')\n")
    code = f"import table_{good}, fw.core; fw.core.save(1); print(len(table_{good}.CALLS)); print(states())"
    done = workspace.run(code)
    calls, states = done.stdout.splitlines()
    assert calls == "1"
    assert "a broken integration" in states and "'failed'" in states and "'active'" in states
    assert done.stderr.count("a broken integration") == 1


def test_a_table_that_is_not_part_of_the_build_is_no_fault(workspace: Workspace) -> None:
    workspace.frameworks = (("one", ("fw",), "absent_table"), ("bridge", ("fw",), "table"))
    workspace.table(SAVE)
    done = workspace.run("import fw.core; print(states()['PATCHES'], states()['save'][0])")
    assert done.stdout == "('skipped', 'not part of this build') active\n"
    assert "absent" not in done.stderr
