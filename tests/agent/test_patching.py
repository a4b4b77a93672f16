"""What a patched function still is: inspected, pickled, compiled, wrapped by others and unpatched like its original."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.agent.support import BOOTSTRAP, STATES, Workspace, environment, python

ALL = ", ".join(
    [
        'patch("save")',
        'patch("save_async", around="table:record_async")',
        'patch("Manager.save")',
        'patch("Manager.where")',
        'patch("Manager.make")',
        'patch("Manager.latest")',
        'patch("Manager.load", around="table:record_async")',
    ]
)


def needs(module: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None and not os.environ.get("REQUIRE_FRAMEWORKS")
    return pytest.mark.skipif(missing, reason=f"{module} is not installed here")


def test_every_kind_of_callable_is_intercepted_once_and_bound_as_before(workspace: Workspace) -> None:
    workspace.table(ALL)
    code = """
import asyncio, table, fw.core
from fw.core import Manager
class Sub(Manager):
    pass
one = Manager("d")
print(fw.core.save(1, step=2), asyncio.run(fw.core.save_async(3)))
print(one.save(4), Manager.save(one, 5), Manager.where("a"), one.where("b"), Sub.make("e").folder)
print(type(Sub.make("e")).__name__, one.latest, asyncio.run(one.load(6)))
print(len(table.CALLS), {state for state, _ in states().values()})
print([type(instance).__name__ for instance, _, _ in table.CALLS])
"""
    assert workspace.check(code).splitlines() == [
        "('saved', 1, 2) ('saved', 3)",
        "('d', 4) ('d', 5) /a /b e",
        "Sub 7 ('d', 6)",
        "10 {'active'}",
        "['NoneType', 'NoneType', 'Manager', 'Manager', 'NoneType', 'NoneType', 'type', 'type', 'Manager', 'Manager']",
    ]


def test_signature_names_and_kind_are_unchanged(workspace: Workspace) -> None:
    workspace.table(ALL)
    code = """
import asyncio, inspect, sys
def look():
    import fw.core as core
    M = core.Manager
    rows = []
    for f in (core.save, core.save_async, M.save, M.where, M.make, M.load, vars(M)["latest"].fget):
        rows.append((str(inspect.signature(f)), f.__name__, f.__qualname__, f.__module__, f.__doc__,
                     inspect.iscoroutinefunction(f), asyncio.iscoroutinefunction(f), inspect.isfunction(f),
                     inspect.ismethod(f), type(f).__name__, inspect.getsource(f)))
    rows += [type(vars(M)[name]).__name__ for name in ("save", "where", "make", "latest", "load")]
    return rows
patched = look()
assert {state for state, _ in states().values()} == {"active"}
from mlflashpoint.agent import start
start.stop()
for name in [name for name in sys.modules if name.split(".")[0] == "fw"]:
    del sys.modules[name]
print(look() == patched)
"""
    assert workspace.check(code, PYTHONWARNINGS="ignore") == "True\n"


def test_what_the_original_raises_is_untouched_and_it_runs_once(workspace: Workspace) -> None:
    workspace.table(ALL)
    code = """
import asyncio, fw.core
for call in (lambda: fw.core.save(1, step=-1), lambda: asyncio.run(fw.core.save_async(None)), lambda: fw.core.save(),
             lambda: fw.core.Manager.save()):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error, error.__cause__)
print(fw.core.RUNS)
"""
    assert workspace.check(code).splitlines() == [
        "Refused a negative step None",
        "Refused no state None",
        "TypeError save() missing 1 required positional argument: 'state' None",
        "TypeError Manager.save() missing 2 required positional arguments: 'self' and 'state' None",
        "[(1, -1), None]",
    ]


def test_a_fault_of_ours_is_logged_once_with_its_traceback_and_counted(workspace: Workspace) -> None:
    workspace.table(
        'patch("save", around="table:bad")', "def bad(call, *rest):\n    raise ValueError('ours, ' * 2 + 'broken')\n"
    )
    code = """
import fw.core
print([fw.core.save(n) for n in range(3)])
from mlflashpoint.agent.registry import REGISTRY
handle = REGISTRY.handles["bridge:fw.core:save"]
print(handle.calls, handle.faults, handle.last_fault)
"""
    done = workspace.run(code)
    assert done.stdout.splitlines() == [
        "[('saved', 0, 1), ('saved', 1, 1), ('saved', 2, 1)]",
        "3 3 before the original: ValueError: ours, ours, broken",
    ]
    assert done.stderr.count("Traceback") == 1 and "the job goes on without it" in done.stderr


def test_strict_raises_it(workspace: Workspace) -> None:
    workspace.table('patch("save", around="table:bad")', "def bad(call, *rest):\n    raise ValueError('ours')\n")
    done = workspace.run("import fw.core; fw.core.save(1)", MLFLASHPOINT_STRICT="1")
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ValueError: ours")


def test_before_and_after_are_called_in_order(workspace: Workspace) -> None:
    functions = """
def before(instance, args, kwargs): CALLS.append("before")
def after(result, instance, args, kwargs): CALLS.append(result)
"""
    workspace.table('patch("Manager.save", before="table:before", after="table:after")', functions)
    code = "import table, fw.core; fw.core.Manager('d').save(1); print(table.CALLS)"
    assert workspace.check(code) == "['before', ('d', 1)]\n"


def test_a_class_is_replaced_and_names_of_it_too(workspace: Workspace) -> None:
    functions = """
def replacement(original):
    class Ours:
        def __init__(self, folder):
            self.folder = folder.upper()
    return Ours
"""
    workspace.table('patch("Manager", replace="table:replacement")', functions)
    workspace.write("fw/core.py", (workspace.folder / "fw/core.py").read_text() + "\nimport fw.user\n")
    workspace.write("fw/user.py", "import sys\nManager = sys.modules['fw.core'].Manager\n")
    code = """
import fw.core, pickle
from mlflashpoint.agent import start
patched = fw.core.Manager
print(patched("d").folder, type(patched("x")).__name__, patched is fw.user.Manager)
print(pickle.loads(pickle.dumps(patched)) is patched)
start.stop()
print(fw.core.Manager("d").folder, fw.user.Manager is fw.core.Manager, patched("d").folder)
"""
    assert workspace.check(code).splitlines() == ["D Ours True", "True", "d True d"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nothing", "fw.core has no nothing"),
        ("Nothing.save", "fw.core has no Nothing"),
        ("save.part", "fw.core.save is no class"),
        ("Manager.nothing", "fw.core has no Manager.nothing"),
        ("Manager.inherited", "Manager does not define inherited itself, it inherits fw.core.Base.inherited"),
    ],
)
def test_a_missing_target_is_a_visible_skip(workspace: Workspace, target: str, reason: str) -> None:
    workspace.table(f'patch("{target}"), patch("save")')
    done = workspace.run(f"import fw.core; print(states()[{target!r}], states()['save'][0])")
    assert done.stdout == f"('skipped', {'missing target: ' + reason!r}) active\n"
    assert (
        f"WARNING mlflashpoint agent: patch bridge:fw.core:{target} is skipped: missing target: {reason}" in done.stderr
    )


def test_what_can_not_be_wrapped_is_a_visible_failure_and_stays_as_it_was(workspace: Workspace) -> None:
    workspace.table(
        'patch("Refused"), patch("RUNS"), patch("steps"), patch("save", around="table:gone"), patch("save_async",'
        ' replace="table:record")'
    )
    core = (workspace.folder / "fw/core.py").read_text()
    workspace.write("fw/core.py", core + "\ndef steps():\n    yield 1\n")
    code = "import fw.core; print(list(fw.core.steps()), fw.core.save(1)); print(states())"
    done = workspace.run(code)
    works, states = done.stdout.splitlines()
    assert works == "[1] ('saved', 1, 1)"
    assert states.count("'failed'") == 5
    assert "a generator function can't be wrapped" in states and "has no attribute 'gone'" in states
    assert done.stderr.count("ERROR mlflashpoint agent: patch") == 5


def test_a_diamond_of_classes_keeps_its_order(workspace: Workspace) -> None:
    workspace.write(
        "fw/core.py",
        """
class Top:
    def save(self): return ["top"]
class Left(Top):
    def save(self): return ["left"] + super().save()
class Right(Top):
    def save(self): return ["right"] + super().save()
class Both(Left, Right):
    pass
""",
    )
    groups = ", ".join(f'patch("{name}.save", group="save")' for name in ("Top", "Left", "Right", "Both"))
    workspace.table(groups)
    code = "import table, fw.core; print(fw.core.Both().save(), len(table.CALLS), states()['Both.save'][0])"
    assert workspace.check(code) == "['left', 'right', 'top'] 1 skipped\n"


def test_a_nested_call_of_the_original_or_of_ours_is_not_intercepted_again(workspace: Workspace) -> None:
    functions = """
def calls_back(call, instance, args, kwargs):
    import fw.core
    CALLS.append("ours")
    fw.core.save("nested")
    return call()
"""
    workspace.table('patch("save", around="table:calls_back"), patch("down")', functions)
    core = (workspace.folder / "fw/core.py").read_text()
    workspace.write("fw/core.py", core + "\ndef down(n):\n    return n and down(n - 1)\n")
    code = "import table, fw.core; fw.core.save(1); fw.core.down(5); print(table.CALLS, fw.core.RUNS)"
    assert workspace.check(code) == "['ours', (None, (5,), {})] [('nested', 1), (1, 1)]\n"


def test_lightning_under_both_of_its_names_is_intercepted_once_per_save(workspace: Workspace) -> None:
    for name in ("lightning/pytorch", "pytorch_lightning"):
        workspace.write("lightning/__init__.py")
        workspace.write(
            f"{name}/__init__.py",
            "class Trainer:\n    def save_checkpoint(self, path):\n        return (type(self).__module__, path)\n",
        )
    workspace.frameworks = (("lightning", ("lightning", "pytorch_lightning"), "table"),)
    workspace.table(
        'patch("Trainer.save_checkpoint", module="lightning.pytorch", group="save", framework="lightning"),'
        'patch("Trainer.save_checkpoint", module="pytorch_lightning", group="save", framework="lightning")'
    )
    code = """
import lightning.pytorch, pytorch_lightning, table
class Mine(pytorch_lightning.Trainer):
    def save_checkpoint(self, path):
        return lightning.pytorch.Trainer.save_checkpoint(self, path), super().save_checkpoint(path)
print(lightning.pytorch.Trainer().save_checkpoint("a"), len(table.CALLS))
print(pytorch_lightning.Trainer().save_checkpoint("b"), len(table.CALLS))
from mlflashpoint.agent.registry import REGISTRY
print(sorted((h.patch.module, str(h.state)) for h in REGISTRY.handles.values()))
"""
    assert workspace.check(code).splitlines() == [
        "('lightning.pytorch', 'a') 1",
        "('pytorch_lightning', 'b') 2",
        "[('lightning.pytorch', 'active'), ('pytorch_lightning', 'active')]",
    ]


WRAPS = """
import functools
def theirs(f):
    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        seen.append("theirs")
        return f(*args, **kwargs)
    return wrapper
seen = []
"""


def test_another_wrapper_before_ours_stays_in_place_when_ours_goes(workspace: Workspace) -> None:
    workspace.table('patch("save"), patch("Manager.save")')
    core = (workspace.folder / "fw/core.py").read_text()
    workspace.write("fw/core.py", core + WRAPS + "\nsave = theirs(save)\nManager.save = theirs(Manager.save)\n")
    code = """
import table, fw.core
from mlflashpoint.agent import start
fw.core.save(1); fw.core.Manager("d").save(2)
print(fw.core.seen, len(table.CALLS))
start.stop()
fw.core.save(1); fw.core.Manager("d").save(2)
print(fw.core.seen, len(table.CALLS))
"""
    assert workspace.check(code).splitlines() == ["['theirs', 'theirs'] 2", f"{['theirs'] * 4} 2"]


def test_another_wrapper_after_ours_stays_in_place_and_ours_passes_through(workspace: Workspace) -> None:
    workspace.table('patch("save"), patch("Manager.save")')
    code = (
        WRAPS
        + """
import table, fw.core
from mlflashpoint.agent import start
fw.core.save = theirs(fw.core.save)
fw.core.Manager.save = theirs(fw.core.Manager.save)
fw.core.save(1); fw.core.Manager("d").save(2)
print(seen, len(table.CALLS))
start.stop()
print(fw.core.save(3), fw.core.Manager("d").save(4))
print(seen, len(table.CALLS), fw.core.save.__name__)
"""
    )
    assert workspace.check(code).splitlines() == [
        "['theirs', 'theirs'] 2",
        "('saved', 3, 1) ('d', 4)",
        f"{['theirs'] * 4} 2 save",
    ]


@pytest.mark.parametrize("order", ["before", "after"])
def test_another_tools_wrapt_proxy_keeps_its_instance_and_arguments(workspace: Workspace, order: str) -> None:
    pytest.importorskip("wrapt")
    workspace.table('patch("save"), patch("Manager.save"), patch("Manager.where"), patch("Manager.make")')
    theirs = """
import sys, wrapt
seen = []
def note(wrapped, instance, args, kwargs):
    seen.append(type(instance).__name__)
    return wrapped(*args, **kwargs)
for target in ("save", "Manager.save", "Manager.where", "Manager.make"):
    wrapt.wrap_function_wrapper(MODULE, target, note)
"""
    core = workspace.folder / "fw/core.py"
    if order == "before":
        core.write_text(core.read_text() + theirs.replace("MODULE", "sys.modules[__name__]"))
    code = """
import table, fw.core, inspect
THEIRS
M = fw.core.Manager
print(fw.core.save(1), M("d").save(2), M.where("a"), M.make("e").folder)
print(SEEN, [type(instance).__name__ for instance, _, _ in table.CALLS])
print(inspect.signature(fw.core.save), fw.core.save.__qualname__, sorted({s for s, _ in states().values()}))
from mlflashpoint.agent import start
start.stop()
print(fw.core.save(1), M("d").save(2), M.where("a"), M.make("e").folder, len(table.CALLS), len(SEEN))
"""
    code = code.replace("THEIRS", theirs.replace("MODULE", "fw.core") if order == "after" else "")
    out = workspace.check(code.replace("SEEN", "fw.core.seen" if order == "before" else "seen"))
    assert out.splitlines() == [
        "('saved', 1, 1) ('d', 2) /a e",
        "['NoneType', 'Manager', 'NoneType', 'type'] ['NoneType', 'Manager', 'NoneType', 'type']",
        "(state, *, step=1) save ['active']",
        "('saved', 1, 1) ('d', 2) /a e 4 8",
    ]


def test_callables_that_are_no_functions_are_proxied_and_pickle_as_they_did(workspace: Workspace) -> None:
    pytest.importorskip("wrapt")
    core = (workspace.folder / "fw/core.py").read_text()
    workspace.write(
        "fw/core.py",
        core
        + """
import operator
class Saver:
    marker = 5
    def __call__(self, state): return ("saver", state)
saver = Saver()
partial = functools.partial(save, step=4)
length = len
""",
    )
    workspace.table('patch("saver"), patch("partial"), patch("length")')
    code = """
import copy, pickle, table, fw.core as core
print(core.saver(1), core.saver.marker, isinstance(core.saver, core.Saver), core.partial(2), core.partial.keywords)
print(core.length([1]), len(table.CALLS), {s for s, _ in states().values()})
for value in (core.saver, core.partial, core.length):
    print(pickle.loads(pickle.dumps(value))([1]), copy.deepcopy(value)([1]))
"""
    assert workspace.check(code).splitlines() == [
        "('saver', 1) 5 True ('saved', 2, 4) {'step': 4}",
        "1 3 {'active'}",
        "('saver', [1]) ('saver', [1])",
        "('saved', [1], 4) ('saved', [1], 4)",
        "1 1",
    ]


SPAWN = """
import copy, multiprocessing, pickle, sys

class InMain:
    def __init__(self, n): self.n = n
    def __eq__(self, other): return self.n == other.n

def work(item):
    import fw.core, table
    fw.core.save(item.n)
    return InMain(item.n + 1), len(table.CALLS), fw.core.save

if __name__ == "__main__":
    import fw.core
    assert pickle.loads(pickle.dumps(fw.core.save)) is fw.core.save is copy.deepcopy(fw.core.save)
    bound = pickle.loads(pickle.dumps(fw.core.Manager("d").save))
    print(bound(1), pickle.loads(pickle.dumps(fw.core.Manager)) is fw.core.Manager)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result, calls, function = pool.apply_async(work, (InMain(1),)).get(timeout=60)
    print(result == InMain(2), type(result) is InMain, calls, function is fw.core.save)
"""


def test_a_class_of_main_and_patched_functions_go_through_a_spawn_pool(workspace: Workspace) -> None:
    workspace.table('patch("save"), patch("Manager.save")')
    script = workspace.write("main.py", SPAWN)
    done = python(str(script), env=workspace.environment())
    assert done.stdout.splitlines() == ["('d', 1) True", "True True 1 True"], done.stderr


@needs("cloudpickle")
def test_cloudpickle_takes_a_patched_function_by_name_and_a_class_of_main_by_value(workspace: Workspace) -> None:
    workspace.table('patch("save"), patch("Manager.save")')
    script = workspace.write(
        "main.py",
        """
import cloudpickle, fw.core, subprocess, sys
LOAD = "import pickle, sys, table; a, f = pickle.loads(sys.stdin.buffer.read()); "
class InMain(fw.core.Manager):
    def both(self): return self.save(1), fw.core.save(2)
data = cloudpickle.dumps((InMain("d"), fw.core.save))
assert b"fw.core" in data
code = LOAD + "print(a.both(), f(3), len(table.CALLS))"
print(subprocess.run([sys.executable, "-c", code], input=data, stdout=subprocess.PIPE, check=True).stdout.decode())
""",
    )
    done = python(str(script), env=workspace.environment())
    assert done.stdout.split("\n")[0] == "(('d', 1), ('saved', 2, 1)) ('saved', 3, 1) 3", done.stderr


@needs("ray")
def test_a_class_of_main_goes_through_ray(workspace: Workspace) -> None:
    workspace.table('patch("save"), patch("Manager.save")')
    script = workspace.write(
        "main.py",
        """
import fw.core, ray
class InMain(fw.core.Manager):
    pass
@ray.remote
class Actor:
    def go(self, item):
        import table
        return item.save(1), fw.core.save(2), len(table.CALLS), type(item).__name__
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
actor = Actor.remote()
print(ray.get(actor.go.remote(InMain("d")), timeout=90))
ray.shutdown()
""",
    )
    done = python(str(script), env=workspace.environment(), timeout=180)
    assert done.stdout.splitlines()[-1:] == ["(('d', 1), ('saved', 2, 1), 2, 'InMain')"], done.stderr


@needs("torch")
def test_torch_compile_calls_the_patched_function_and_does_not_trace_through_to_the_original(
    workspace: Workspace,
) -> None:
    functions = """
def counted(call, instance, args, kwargs):
    with open(__file__ + ".log", "a") as log:
        log.write("called\\n")
    return call()
"""
    workspace.table(
        'patch("double", around="table:counted"), patch("Module.forward", around="table:counted")', functions
    )
    workspace.write(
        "fw/core.py",
        "import torch\ndef double(x):\n    return x * 2\n"
        "class Module(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n",
    )
    code = """
import torch, table, fw.core
@torch.compile(backend="eager")
def step(x):
    return fw.core.double(x) + 1
module = torch.compile(fw.core.Module(), backend="eager")
print([float(step(torch.tensor(float(n)))) for n in range(3)], float(module(torch.tensor(1.0))))
print(len(open(table.__file__ + ".log").readlines()), {s for s, _ in states().values()})
"""
    done = workspace.run(code, timeout=180)
    assert done.stdout.splitlines() == ["[1.0, 3.0, 5.0] 2.0", "4 {'active'}"], done.stderr


def test_an_exit_without_clean_up_and_a_sigterm_keep_their_codes(workspace: Workspace) -> None:
    workspace.table(ALL)
    code = "import fw.core, os; fw.core.save(1); os._exit(0)"
    assert workspace.run(code).returncode == 0
    code = "import fw.core, os, signal; fw.core.save(1); os.kill(os.getpid(), signal.SIGTERM); signal.pause()"
    assert workspace.run(code).returncode == -15


def test_the_agent_off_leaves_the_framework_untouched(workspace: Workspace) -> None:
    workspace.table(ALL)
    env = environment(BOOTSTRAP, workspace.folder, on=False)
    code = STATES + "import fw.core, sys; print(hasattr(fw.core.save, '__wrapped__'), 'mlflashpoint' in sys.modules)"
    assert python("-c", code, env=env).stdout == "False False\n"


def test_python_optimised_twice_patches_all_the_same(workspace: Workspace, tmp_path: Path) -> None:
    workspace.table(ALL)
    code = STATES + "import fw.core; print({s for s, _ in states().values()})"
    done = python("-OO", "-c", code, env=workspace.environment(), executable=sys.executable)
    assert done.stdout == "{'active'}\n", done.stderr
