from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from outrider.errors import StartupError
from outrider.tiers import Tier, first_steps, read_tiers


def test_the_configuration_is_sglangs_and_nonsense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps({"8": {"candidate_steps": [1]}, "1": {"candidate_steps": [5, 3], "ema_alpha": 0.5}}))
    tiers = read_tiers(str(path))
    assert tiers == {1: Tier((3, 5), ema_alpha=0.5), 8: Tier((1,))}
    assert first_steps(tiers, None) == 3
    with pytest.raises(StartupError, match=r"one of \[1, 3, 5\]"):
        first_steps(tiers, 2)
    for text in ("{", "[]", '{"2": {"candidate_steps": [1]}}', '{"1": {"steps": [1]}}', '{"1": {}}', '{"1": 3}'):
        path.write_text(text)
        with pytest.raises(StartupError, match="--speculative-adaptive-config"):
            read_tiers(str(path))


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        *(("candidate_steps", bad, "from 0 to 64") for bad in ("137", [], [True], [1, "3"], [2.5], [-1], [65], 3)),
        *(("update_interval", bad, "at least 1") for bad in (0, -5, 1.5, True, "5", None)),
        *(("warmup_batches", bad, "at least 0") for bad in (-1, 2.5, True)),
        *(("ema_alpha", bad, "above 0 and at most 1") for bad in (0, -5, 1.1, math.nan, True, "0.2")),
        *(("up_hysteresis", bad, "from -64 to 64") for bad in (math.nan, math.inf, 10**400, False)),
        ("down_hysteresis", -math.inf, "from -64 to 64"),
    ],
)
def test_a_setting_that_no_rule_could_go_by_is_named_with_its_limit(
    tmp_path: Path, field: str, value: object, limit: str
) -> None:
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps({"1": {"candidate_steps": [1, 3], field: value}}))
    with pytest.raises(StartupError) as refused:
        read_tiers(str(path))
    assert str(refused.value).startswith(f"--speculative-adaptive-config {path}: {field} is {value!r}; it must be a")
    assert str(refused.value).endswith(limit)
