"""`iris trace view`: what is served, to whom, and what the page draws."""

import http.client
import json
import signal
import subprocess
import sys
import threading

import browser
import pytest

from iris_core.cli import main
from iris_core.tracing.viewer import TraceServer

META = [{"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in (0, 1)] + [
    {"name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": {"name": f"XCC0_CU{lane}"}}
    for rank in (0, 1)
    for lane in (0, 1)
]
EVENTS = [
    {"name": "compute", "pid": 0, "tid": 0, "ts": 0.0, "dur": 100.0, "ph": "X", "args": {"pid_m": 3}},
    {"name": "put", "pid": 0, "tid": 0, "ts": 50.0, "dur": 10.0, "ph": "X", "args": {"payload_size": 4096}},
    {"name": "wait", "pid": 1, "tid": 1, "ts": 20.0, "dur": 70.0, "ph": "X", "args": {}},
    {"name": "<b>mine</b>", "pid": 1, "tid": 0, "ts": 95.0, "ph": "i", "s": "t", "args": {}},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.json"
    metadata = {"clock_error_us": 0.5, "dropped_events": 7, "device": "a GPU"}
    path.write_text(json.dumps({"traceEvents": META + EVENTS, "metadata": metadata}))
    return path


@pytest.fixture
def server(trace):
    with TraceServer(trace) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers["Content-Type"]


def test_what_is_served(server, trace):
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/trace.json?x=1") == (200, trace.read_bytes(), "application/json")
    status, page, kind = get(server, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert b"http" not in page.replace(b"http://www.w3.org", b"")  # it is self-contained
    for path in ("/etc/passwd", "/../trace.json", "/viewer.html"):
        assert get(server, path)[0] == 404
    assert get(server, "/trace.json", Host="evil.example")[0] == 403
    trace.unlink()
    assert get(server, "/trace.json")[0] == 500


def test_what_cannot_be_shown(tmp_path, capsys):
    assert main(["trace", "view", str(tmp_path / "absent.json"), "--no-browser"]) == 1
    assert "cannot be shown" in capsys.readouterr().err


def test_the_command(interruptible, trace):
    command = [sys.executable, "-m", "iris_core", "trace", "view", str(trace), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        port = int(line.split("http://127.0.0.1:")[1].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/trace.json")
        assert json.loads(connection.getresponse().read())["metadata"]["device"] == "a GPU"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130


@pytest.mark.skipif(browser.PROGRAM is None, reason="no Chromium is installed")
def test_the_page(server, trace, tmp_path):
    with browser.Browser(tmp_path / "profile") as page:
        page.open(server.url, "state.events.length == 4")
        facts = page.ask("el('facts').textContent")
        for text in ("4 events, 2 ranks, 3 lanes", "100 us", "aligned to 0.5 us", "7 events had no room", "a GPU"):
            assert text in facts
        assert page.ask("state.rows.map(row => row.title || row.lane.name)") == [
            "rank 0", "XCC0_CU0", "rank 1", "XCC0_CU0", "XCC0_CU1",
        ]  # fmt: skip
        assert page.ask("state.lanes[0].depth") == 2  # the put is drawn below the compute that it is nested in
        assert page.ask("el('totals').rows[1].textContent") == "compute1100 us100 us0"
        assert page.ask("document.querySelectorAll('#legend b').length") == 0  # names are text
        # where the put is, on the screen
        at = "(() => { const box = el('canvas').getBoundingClientRect(), lane = state.rows[1];"
        at += "const scale = (box.width - LABEL) / (state.to - state.from);"
        at += "return [box.left + LABEL + (55 - state.from) * scale, box.top + lane.y + LANE * 1.5]; })()"
        x, y = page.ask(at)
        page.mouse("mouseMoved", x, y)
        assert page.ask("getComputedStyle(el('tip')).display") == "block"
        tip = page.ask("el('tip').textContent")
        for text in ("put", "rank 0, XCC0_CU0", "at 50 us, takes 10 us", "payload_size: 4096", "0.4096 GB/s"):
            assert text in tip
        colour = "(() => { const g = el('canvas').getContext('2d'), r = devicePixelRatio, box ="
        colour += f"el('canvas').getBoundingClientRect(); return [...g.getImageData(({x} - box.left) * r,"
        colour += f"({y} - box.top) * r, 1, 1).data].slice(0, 3).join(); }})()"
        drawn = page.ask(colour)
        page.ask("document.querySelectorAll('#legend input')[2].click()")
        assert page.ask("[...state.hidden]") == ["put"]
        assert page.ask(colour) != drawn
        page.mouse("mouseMoved", x, y)
        assert page.ask("getComputedStyle(el('tip')).display") == "none"
        page.ask("document.querySelectorAll('#legend input')[2].click()")
        whole = page.ask("state.to - state.from")
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
        assert page.ask("state.to - state.from") == pytest.approx(0.8 * whole)
        zoomed_x, _ = page.ask(at)
        assert zoomed_x == pytest.approx(x, abs=1)  # around the pointer
        page.click(x, y)
        assert page.ask("location.hash").endswith("&event=2")
        page.click(x, y, count=2)
        assert page.ask("state.to - state.from") == pytest.approx(whole)
        page.open(f"{server.url}?again#event=2", "state.events.length == 4 && state.selected == 2")
        assert "takes 10 us" in page.ask("el('tip').textContent")
        trace.write_text("{")
        page.open(f"{server.url}?broken", "el('error').textContent")
        assert "cannot be shown" in page.ask("el('error').textContent")
