"""Files of measured tables, as tests need them."""

import json

HEAD = {"format": 2, "device": "cpu", "group_size": 4, "measured": True}
ROW = {"op": "all_reduce", "dtype": "*", "nbytes": 1024, "algorithm": "slow", "seconds": 1e-6}


def table_file(folder, *rows, **head):
    """Write a file with rows, each of which changes ROW (one by default), and return its path; None takes a field away.

    `head` changes HEAD.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{len(list(folder.iterdir()))}.json"
    entries = [without_none(ROW | row) for row in rows or ({},)]
    path.write_text(json.dumps(without_none(HEAD | head) | {"entries": entries}))
    return path


def without_none(fields):
    return {name: value for name, value in fields.items() if value is not None}
