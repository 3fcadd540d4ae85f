"""What is imported before this is left out of collections of garbage, each of which takes half a second otherwise.

The server of forked processes imports it last, and finds it by PYTHONPATH, which its processes need not have.
"""

import gc
import inspect
import os

HERE = os.path.dirname(__file__)

if found := [each for each in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if each not in ("", HERE)]:
    os.environ["PYTHONPATH"] = os.pathsep.join(found)
inspect.getmodule(compile("", "", "exec"))  # looks at the files of all modules, once
gc.collect()
gc.freeze()
gc.set_threshold(10_000, 20, 20)  # what is left out no longer counts, so all the rest would be looked at often
