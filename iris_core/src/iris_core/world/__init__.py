"""The ranks, within a host and between nodes: rendezvous, connections, exchanges.

Ranks find each other in a folder that only their user can enter (`rendezvous`), and have a unix socket for each pair
(`exchange`), over which all exchanges go (`group`).  If one rank refuses, all refuse (`failures`).  `launch` starts
ranks.  Importing this imports neither torch nor triton.
"""

from iris_core.world.group import Arrival as Arrival
from iris_core.world.group import World as World
from iris_core.world.group import arrive as arrive
from iris_core.world.group import connect as connect
