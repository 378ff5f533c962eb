"""What ``agentcomm run`` has the interpreter import at its start, in every process of the run.

It costs next to nothing as long as nobody imports torch. An interpreter of another installation may
find it too, through the inherited PYTHONPATH; so it imports nothing of agentcomm before it must.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
# When one of these has been imported, agentcomm.run._patches looks at it.
_WATCHED = {
    "torch",
    "torch.nn.parallel.distributed",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp._fully_shard._fully_shard",
}


def _run_hidden_sitecustomize() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    found = (finder.find_spec("sitecustomize", None) for finder in sys.meta_path)
    spec = next((spec for spec in found if spec is not None), None)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class _Watch:
    """A finder that finds nothing by itself, but sees torch being imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in _WATCHED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                _watch_loader(spec.loader, name)  # type: ignore[no-untyped-call]
                return spec
        return None


def _watch_loader(loader, name):  # type: ignore[no-untyped-def]
    exec_module = loader.exec_module

    def exec_and_patch(module):  # type: ignore[no-untyped-def]
        del loader.exec_module  # the loader has its own again
        exec_module(module)
        try:
            from agentcomm.run import _patches
        except ImportError as error:
            _WATCHED.clear()
            sys.stderr.write(
                f"agentcomm: {sys.executable} cannot import agentcomm ({error}): what it trains"
                " stays dense\n"
            )
        else:
            _patches.after_import(name, module)

    loader.exec_module = exec_and_patch


def _at_exit() -> None:
    from agentcomm.run import _summary

    _summary.print_at_exit()


if os.environ.get("AGENTCOMM_LAUNCHER_PID") == str(os.getpid()):
    import atexit

    # The first to be registered is the last to run: all parts of the report are written then.
    atexit.register(_at_exit)
sys.meta_path.insert(0, _Watch())
_run_hidden_sitecustomize()
