"""The pages for API users say what the code does: the error table is complete, the example runs."""

from __future__ import annotations

import re
from pathlib import Path

from taktline_protocol.errors import HTTP_STATUS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_error_table_is_the_codes():
    rows = re.findall(r"^\| `([a-z_]+)` \| (\d{3}) \|", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert {code: int(status) for code, status in rows} == {code.value: status for code, status in HTTP_STATUS.items()}


def test_the_python_example_runs(stack):
    page = (DOCS / "robotics-engineer.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    # The example is written for the demo policy; the scripted worker has other names and sizes.
    for written, here in {
        "http://gateway:8080": stack.url,
        "demo-reach": "scripted",
        '"scene"': '"front"',
        "np.zeros(4)": "np.zeros(6)",
    }.items():
        assert written in code
        code = code.replace(written, here)
    names = {}
    exec(code, names)
    names["robot"].close()
    assert names["chunk"].actions.shape == (10, 6)
