"""Workers find their packages wherever this process has them, and read nothing of where and for whom it runs."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

ROOT = Path(__file__).parents[2]
RENDERS = """
import asyncio, sys
from pathlib import Path
from gateway.template import ChatTemplate
from training.template_process import TemplateProcess
from verify_service import grammar_trial

async def render(source):
    template = ChatTemplate(source, {})
    await template.start()
    print(await template.render({"messages": [{"content": "gateway"}]}, 100))
    await template.close()

asyncio.run(render("{{ messages[0].content }}"))
print(TemplateProcess("here", "{{ where }}", {}).render({"where": "training"}))
print(grammar_trial.ends('start: "a"', Path(sys.argv[1]), 257))
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    vocab = {token: number for number, token in enumerate(["<end>", *sorted(ByteLevel.alphabet())])}
    made = Tokenizer(BPE(vocab=vocab, merges=[]))
    made.decoder = ByteLevelDecoder()  # by which it is known for one of bytes
    made.save(str(path))
    return path


def test_packages_may_lie_where_only_this_process_looks(tmp_path: Path, tokenizer: Path) -> None:
    """By `pip install --user` or `--target`, say: on PYTHONPATH, and not where the Python looks by itself."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("jinja2", "json", "msgspec", "llguidance"):
        (here / f"{name}.py").write_text("raise SystemExit('read from the current folder')")
    path = os.pathsep.join([str(ROOT), *site.getsitepackages()])
    bare = getattr(sys, "_base_executable", sys.executable)
    ended = subprocess.run(
        [bare, "-P", "-S", "-c", RENDERS, tokenizer], cwd=here, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout.split()) == (0, ["gateway", "training", "True"]), ended.stderr
