"""A world of two hosts, as far as one machine can be two: a network, host name and process ids for each node."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("one_node.py")
HANG_S = 90.0


def call(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def networks():
    """Two network namespaces that a cable joins: (name, interface, address) of each."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("only root can make networks, with ip and unshare")
    mark = f"{os.getpid() % 100000}"
    nets = [(f"iris{mark}{side}", f"iv{mark}{side}", f"10.213.7.{1 + index}") for index, side in enumerate("ab")]
    with contextlib.ExitStack() as undo:
        try:
            for name, _, _ in nets:
                call("ip", "netns", "add", name)
                undo.callback(call, "ip", "netns", "del", name)
            (a, inner_a, _), (b, inner_b, _) = nets
            call("ip", "link", "add", inner_a, "netns", a, "type", "veth", "peer", "name", inner_b, "netns", b)
            for name, interface, address in nets:
                call("ip", "-n", name, "address", "add", f"{address}/24", "dev", interface)
                call("ip", "-n", name, "link", "set", interface, "up")
                call("ip", "-n", name, "link", "set", "lo", "up")
            call("ip", "netns", "exec", a, "unshare", "--pid", "--fork", "--uts", "--mount-proc", "true")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no networks and namespaces can be made here: {error.stderr.strip()}")
        yield nets


def test_a_world_of_two_networks(networks):
    """Three ranks, one of them alone on its node; at last rank 0 dies, whose process has torch's store."""
    ranks, nodes = [[0, 1], [2]], []
    address = networks[0][2]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        for index, (name, interface, _) in enumerate(networks):
            unshare = ["unshare", "--pid", "--fork", "--kill-child", "--uts", "--mount-proc"]
            what = [f"host{index}", interface, address, "29555", "3", *map(str, ranks[index])]
            command = ["ip", "netns", "exec", name, *unshare, sys.executable, str(PROGRAM), *what]
            nodes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ))
        said = [json.loads(line) for each in nodes for line in each.communicate(timeout=HANG_S)[0].splitlines()]
    finally:
        for each in nodes:
            each.kill()
            each.wait()
    assert [each.get("failed") for each in said] == [None] * 3
    assert [(each["node"], each["ranks"]) for each in said] == [(0, [0, 1]), (0, [0, 1]), (1, [2])]
    assert [each["peers"] for each in said] == [[0.0, 1.0], [0.0, 1.0], [2.0]]
    assert len({each["offset"] for each in said}) == 1
    assert all(each["sent"] == {"from": 2} and each["sum"] == [3.0] * 4 for each in said)
    assert ["is on node" in each.get("refused", "") for each in said] == [True, False, True]
    assert [each["lost"][0] for each in said[1:]] == ["PeerLostError"] * 2
    gone = "the process that has the store of torch.distributed is gone"
    assert said[1]["lost"][1].startswith(("rank 1: rank 0 ", f"rank 1: {gone}"))
    assert said[2]["lost"][1].startswith(f"rank 2: {gone}")
