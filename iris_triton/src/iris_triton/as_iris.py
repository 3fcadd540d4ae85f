"""Let a script say `import iris`: its names and paths, as AMD's Iris has them, are those of `iris_triton`.

    import iris_triton.as_iris
    import iris
    from iris.ccl import Config

Importing it puts the modules of `iris_triton.rocm_iris.names.TABLE` into `sys.modules`, and sets the level of the
logger to INFO, as there, unless IRIS_LOG_LEVEL says otherwise.  It raises ImportError where another package `iris` is
installed.
"""

import os

from iris_core.logs import INFO, set_logger_level
from iris_triton.rocm_iris.names import publish

publish("iris")
if not os.environ.get("IRIS_LOG_LEVEL"):
    set_logger_level(INFO)
