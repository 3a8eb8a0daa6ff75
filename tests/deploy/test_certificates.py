"""The script that makes certificates: it completes what an interrupted run left, and nonsense is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

SCRIPT = Path(__file__).parents[2] / "deploy" / "certificates.sh"


def make(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script."""
    return subprocess.run(
        [SCRIPT, folder], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_what_was_left_half_made_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "authority").mkdir()
    (tmp_path / "authority" / "key.pem").write_text("of an authority that was never used")
    for name in ("authority/ca.pem", "admin-tokens"):
        (tmp_path / name).write_text("")
    assert make(tmp_path).returncode == 0
    assert len((tmp_path / "admin-tokens").read_text().strip()) == 64
    ca, shown = tmp_path / "authority" / "ca.pem", tmp_path / "verify" / "cert.pem"
    subprocess.run(["openssl", "verify", "-CAfile", ca, shown], check=True, capture_output=True)
    before = ca.read_bytes(), (tmp_path / "admin-tokens").read_bytes()
    (tmp_path / "authority" / "key.pem").unlink()  # kept elsewhere
    ended = make(tmp_path)
    assert (ended.returncode, before) == (2, (ca.read_bytes(), (tmp_path / "admin-tokens").read_bytes()))
    assert "no key.pem beside it" in ended.stderr


@pytest.mark.parametrize("days", ["0", "abc", "-1"])
def test_days_are_days(tmp_path: Path, days: str) -> None:
    ended = make(tmp_path / "tls", DAYS=days)
    assert ended.returncode == 2
    assert ended.stderr == f"certificates.sh: DAYS is '{days}'; it must be a number of days from 1 to 99999\n"
    assert not (tmp_path / "tls").exists()
