"""A world of several hosts, as far as one machine can be that: a network, host name and process ids for each node."""

import contextlib
import json
import os
import re
import shutil
import subprocess

import one_node
import pytest

HANG_S = 90.0


def call(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def networks(nodes):
    """Network namespaces that a switch in another one joins, one for each node: (name, interface, address) of each."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("only root can make networks, with ip and unshare")
    mark = f"{os.getpid() % 100000}"
    nets = [(f"iris{mark}{node}", f"iv{mark}{node}", f"10.213.7.{1 + node}") for node in range(nodes)]
    switch = f"iris{mark}switch"
    with contextlib.ExitStack() as undo:
        try:
            for name in (switch, *(name for name, _, _ in nets)):
                call("ip", "netns", "add", name)
                undo.callback(call, "ip", "netns", "del", name)
            call("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
            call("ip", "-n", switch, "link", "set", "switch", "up")
            for name, interface, address in nets:
                port = "type", "veth", "peer", "name", interface, "netns", switch
                call("ip", "link", "add", interface, "netns", name, *port)
                call("ip", "-n", switch, "link", "set", interface, "master", "switch", "up")
                call("ip", "-n", name, "address", "add", f"{address}/24", "dev", interface)
                call("ip", "-n", name, "link", "set", interface, "up")
                call("ip", "-n", name, "link", "set", "lo", "up")
            call("ip", "netns", "exec", nets[0][0], "unshare", "--pid", "--fork", "--uts", "--mount-proc", "true")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no networks and namespaces can be made here: {error.stderr.strip()}")
        yield nets


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "per_node", "lost", "last"), [
    (2, 2, 1, "call"), (2, 2, 1, "wait"), (3, 2, 0, "call"),
    pytest.param(2, 4, 1, "wait", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_a_world_of_several_networks(server, networks, nodes, per_node, lost, last):
    """At last a node dies: the one with torch's store, or another one, which others notice or which is only silent."""
    size, started, said = nodes * per_node, [], []
    try:
        for node, (name, interface, _) in enumerate(networks):
            ranks = range(node * per_node, (node + 1) * per_node)
            end, theirs = server.Pipe(duplex=False)
            what = f"host{node}", interface, networks[0][2], 29555, size, "pause" if node == lost else last
            started.append(server.Process(target=one_node.main, args=(name, theirs, *what, *ranks)))
            started[-1].start()
            theirs.close()
            said.append(open(os.dup(end.fileno())))  # noqa: SIM115
        first = [said[lost].readline() for _ in range(per_node)]
        if last == "wait":
            call("ip", "-n", networks[lost][0], "link", "set", networks[lost][1], "down")
        started[lost].kill()
        assert [each.join(HANG_S) or each.is_alive() for each in started] == [False] * nodes
        rest = [line for each in said for line in each]
    finally:
        for each in started:
            each.kill()
            each.join()
    said = [json.loads(line) for line in (*first, *rest)]
    assert [each.get("failed") for each in said] == [None] * size
    assert [each["wrong"] for each in said] == [[[]] * 3] * size
    for each in said:
        mine = list(range(each["node"] * per_node, (each["node"] + 1) * per_node))
        assert (each["ranks"], each["peers"]) == (mine, [float(rank) for rank in mine])
        assert (each["sent"], each["offset"]) == ({"from": size - 1}, said[0]["offset"])
        assert "node" in each["refused"]
    survivors = [each["lost"] for each in said if each["node"] != lost]
    assert len(survivors) == size - per_node
    named = "|".join(rf"\branks? (\d+, )*{rank}\b" for rank in range(lost * per_node, (lost + 1) * per_node))
    named += "|the process that has the store of torch.distributed is gone"  # it may be the first that knows, and ends
    for kind, text in survivors:
        assert kind in ("PeerLostError", "CollectiveTimeoutError", "IrisError")
        assert re.search(named, text), text
