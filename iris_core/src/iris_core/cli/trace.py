"""`iris trace`: look at what kernels have recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser("trace", help="look at what kernels have recorded (docs/tracing.md)")
    kinds = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    viewing = kinds.add_parser(
        "view",
        help="serve a trace and a page that draws it, on 127.0.0.1",
        description="Serve a file of ctx.tracing.export() and a page that draws it, on 127.0.0.1, until Ctrl-C. "
        "Perfetto (https://ui.perfetto.dev) opens the file as well.",
    )
    viewing.add_argument("file", metavar="FILE", help="the file")
    viewing.add_argument("--port", type=int, default=0, help="default: one that is free")
    viewing.add_argument("--no-browser", action="store_true", help="only print the address")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    import pathlib
    import webbrowser

    from iris_core.errors import ArgumentError
    from iris_core.tracing.viewer import TraceServer

    try:
        server = TraceServer(pathlib.Path(args.file), args.port)
    except (OSError, OverflowError, ValueError) as error:
        raise ArgumentError(f"{args.file} cannot be shown: {error}") from error
    with server:
        print(f"{args.file} is shown at {server.url}, until Ctrl-C", flush=True)
        if not args.no_browser:
            webbrowser.open(server.url)
        server.serve_forever()
    return 0
