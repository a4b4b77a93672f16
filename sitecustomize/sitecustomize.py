# The start-up file of mlflashpoint's agent. Python's site module imports the first "sitecustomize" on its path, once
# per process, before the job's own code.
#
# What it promises: it decides from the environment alone and imports nothing but os and sys when the agent is off;
# it never raises and never writes to stdout; it runs the sitecustomize that it stands in front of, whose errors show
# as they would without it. It is read by every Python that inherits the path, so it is kept to syntax that all
# versions from 2.7 on parse, and does nothing on those that mlflashpoint does not support.
import os
import sys

#: the same as "requires-python" and the classifiers of the package
SUPPORTED = ((3, 10), (3, 14))
OFF = ("", "0", "false", "no", "off")
#: set while the agent starts, so that a Python that is started meanwhile does not start it again
STARTING = "_MLFLASHPOINT_STARTING"


def _is_wanted():
    # a malformed value counts as on: the agent then refuses with the setting's name, and the doctor shows it
    return (
        os.environ.get("MLFLASHPOINT_ENABLED", "").strip().lower() not in OFF
        and STARTING not in os.environ
        and SUPPORTED[0] <= sys.version_info[:2] < SUPPORTED[1]
    )


def _find_package(here):
    # a wheel carries this folder inside the package, the source tree beside it
    for package in (os.path.dirname(here), os.path.join(os.path.dirname(here), "mlflashpoint")):
        if os.path.isfile(os.path.join(package, "agent", "start.py")):
            return package
    return None


def _load_package(here):
    # by its place, and not by sys.path: a virtual environment that does not have mlflashpoint gets the one of this
    # file, and one that has another release of it does not get a mixture
    if "mlflashpoint" in sys.modules:
        return
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import spec_from_file_location

    package = _find_package(here)
    if package is None:
        return
    spec = spec_from_file_location(
        "mlflashpoint", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    module = module_from_spec(spec)
    sys.modules["mlflashpoint"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop("mlflashpoint", None)
        raise


def _start():
    os.environ[STARTING] = str(os.getpid())
    try:
        _load_package(os.path.dirname(os.path.realpath(__file__)))
        from mlflashpoint.agent.start import start

        start()
    except KeyboardInterrupt:
        raise
    except BaseException:
        # SystemExit too: raised here it would end the interpreter
        if os.environ.get("MLFLASHPOINT_LOG_LEVEL", "").strip().upper() == "DEBUG" and sys.stderr is not None:
            sys.excepthook(*sys.exc_info())
    finally:
        os.environ.pop(STARTING, None)


def _next_path():
    # every folder that holds one of our start-up files was or will be asked by us: two copies must not call each other
    visited = sys.__dict__.setdefault("_mlflashpoint_start_up", [])
    visited.append(os.path.dirname(os.path.realpath(__file__)))
    return [entry for entry in sys.path if os.path.realpath(entry) not in visited]


def _run_next():
    path = _next_path()
    if sys.version_info[0] == 2:
        import imp

        try:
            found = imp.find_module("sitecustomize", path)
        except ImportError:
            return
        imp.load_module("sitecustomize", *found)
        return
    from _frozen_importlib import module_from_spec

    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = None if find_spec is None else find_spec("sitecustomize", path)
        if spec is None or spec.loader is None:
            continue
        module = module_from_spec(spec)
        # the import system takes what it returns from sys.modules: the name stays ours where there is no other one
        sys.modules["sitecustomize"] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop("sitecustomize", None)
            raise
        return


if _is_wanted():
    _start()
if __name__ == "sitecustomize":
    _run_next()
