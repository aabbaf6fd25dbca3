"""The examples of docs/compatibility.md."""

from __future__ import annotations

import re

import pytest

from tests.helpers.stack import ROOT


@pytest.mark.parametrize("name", ["prorl", "nemo_gym"])
def test_the_examples_of_the_guide_run_as_written(service, trainer, name, monkeypatch, capsys):
    pattern = rf"<!-- tested: {name} -->\n```python\n(.*?)```"
    (code,) = re.findall(pattern, (ROOT / "docs" / "compatibility.md").read_text(), re.DOTALL)
    question = "What is 6 times 7?"
    assert question in code and len(code.splitlines()) <= 20
    monkeypatch.setenv("ROLLOUT_URL", service.stack.compat_url)
    monkeypatch.setenv("LLM_SERVER", service.address)
    asked = service.asks(f"guide-{name.replace('_', '-')}", r"It is \boxed{42}.")
    exec(code.replace(question, asked), {})
    assert "1.0" in capsys.readouterr().out
