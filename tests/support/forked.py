"""Programs in processes forked from the server of the rank pools, which has imported torch and triton already."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing import forkserver, resource_tracker


def run(function, *args, cwd=None, environ=None, timeout_s=300.0):
    """Call a function of a module in a process of its own, as `subprocess.run` does with a command.

    An int that it returns is the status, as is that of a SystemExit.  `environ` is all of its environment, that of this
    process by default.  Returns a subprocess.CompletedProcess with text; raises subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        environ = dict(os.environ if environ is None else environ)
        server = forkserver._forkserver._forkserver_address
        given = function, args, os.fspath(cwd or os.getcwd()), environ, list(sys.path), files, server
        process = multiprocessing.get_context("forkserver").Process(target=_call, args=given)
        process.start()
        process.join(timeout_s)
        if late := process.is_alive():
            process.kill()
            process.join()
        out, err = (open(file).read() if os.path.exists(file) else "" for file in files)  # noqa: SIM115
    if late:
        raise subprocess.TimeoutExpired(str(function), timeout_s, out, err)
    return subprocess.CompletedProcess(function, process.exitcode, out, err)


def _call(function, args, cwd, environ, path, files, server):
    if server is not None:  # ranks that this process starts are forked from the same one, which has all modules
        forkserver._forkserver._forkserver_address = server
        forkserver._forkserver.ensure_running = resource_tracker.ensure_running
    for number, file in enumerate(files, start=1):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = path
    sys.exit(function(*args))


def python(source, *arguments, path=(), **how):
    """As `python -c SOURCE ARGUMENTS`; the folders of `path` come first in sys.path, and `how` is that of `run`."""
    return run(_execute, source, arguments, [os.fspath(each) for each in path], **how)


def fresh(source, *arguments, environ=None):
    """The same in a process that has imported nothing yet, for tests of what is imported."""
    how = {"env": environ, "capture_output": True, "text": True, "timeout": 300.0, "check": False}
    return subprocess.run([sys.executable, "-c", source, *arguments], **how)


def _execute(source, arguments, path):
    sys.argv[:] = ["-c", *arguments]
    sys.path[:0] = path
    exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})


def pytest_main(arguments, path=()):
    """Run pytest in the calling process, with settings of neither Iris nor pytest; folders of `path` come first."""
    import pytest

    for name in [each for each in os.environ if each.startswith(("IRIS_", "PYTEST_"))]:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # to import them, hypothesis above all, takes seconds
    sys.path[:0] = [os.fspath(each) for each in path]
    return int(pytest.main(["-p", "no:cacheprovider", *map(os.fspath, arguments)]))
