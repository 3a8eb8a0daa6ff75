"""vLLM loads what is exported and drafts with it. Needs a Python that has vLLM's CPU wheel: OUTRIDER_VLLM_PYTHON."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.training.rig import head_args
from training.args import ExportArgs
from training.export import main as export_main
from training.loop import Trainer
from training.ranks import Ranks

PYTHON = os.environ.get("OUTRIDER_VLLM_PYTHON")
DRAFTS = 2
SCRIPT = f"""
import json, sys
from vllm import LLM, SamplingParams
target, head, method = sys.argv[1:]
llm = LLM(model=target, dtype="bfloat16", enforce_eager=True, max_model_len=128, max_num_seqs=1, skip_tokenizer_init=True,
          disable_log_stats=False,
          speculative_config={{"method": method, "model": head, "num_speculative_tokens": {DRAFTS}}})
sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
(said,) = llm.generate([{{"prompt_token_ids": list(range(5, 25))}}], sampling)
counts = {{m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode_num_draft")}}
print("\\n" + json.dumps([len(said.outputs[0].token_ids), counts["vllm:spec_decode_num_draft_tokens"]]))
"""


@pytest.mark.skipif(PYTHON is None, reason="OUTRIDER_VLLM_PYTHON names no Python that has vLLM")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("algorithm", "method"), [("EAGLE3", "eagle3"), ("EAGLE", "eagle")])
def test_vllm_drafts_with_an_exported_head(
    algorithm: str, method: str, target: Path, data: Path, tmp_path: Path
) -> None:
    trainer = Trainer(head_args(algorithm, target, data, tmp_path), Ranks(0, 1, "cpu"))
    trainer._save("checkpoint.pt")
    folder = tmp_path / "published"
    assert export_main(ExportArgs(model_path=str(target), checkpoint=str(tmp_path), output=str(folder))) == 0
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    found = subprocess.run(
        [str(PYTHON), "-c", SCRIPT, str(target), str(folder), method], env=os.environ | settings, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    num_tokens, num_drafted = json.loads(found.stdout.strip().splitlines()[-1])
    assert num_tokens == 24
    assert num_drafted >= DRAFTS
