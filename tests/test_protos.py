"""The generated code that is checked in is what scripts/protos.sh makes of the protos."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor

from outrider.v1 import admin_pb2, common_pb2, draft_pb2, verify_pb2

ROOT = Path(__file__).parents[1]


def test_generated_code_is_current(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "protos.sh"
    subprocess.run([script, tmp_path], check=True, env={**os.environ, "PYTHON": sys.executable})
    made = {path.name: path.read_text() for path in (tmp_path / "outrider" / "v1").iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "outrider" / "v1").glob("*_pb2*")}
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == [], "run `make protos`"


def test_the_package_and_its_services_have_their_names() -> None:
    files: list[FileDescriptor] = [module.DESCRIPTOR for module in (admin_pb2, common_pb2, draft_pb2, verify_pb2)]
    assert {file.package for file in files} == {"outrider.v1"}
    services = {name: [m.name for m in service.methods] for f in files for name, service in f.services_by_name.items()}
    assert services == {
        "VerifyService": ["Generate", "GenerateMany", "Speculate", "StreamFeatures", "GetServerInfo", "FlushCache"],
        "AdminService": ["ListDrafters", "SetDrafterMode", "SetAlgorithm"],
        "DraftService": ["Propose", "AddCorpus", "RemoveCorpus", "GetServerInfo"],
    }
