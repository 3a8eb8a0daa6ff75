"""Prints the compose services of a machine with several GPUs: a verify service for each target GPU, drafters on others.

python deploy/gpus.py --targets 0 1 2 --drafters 3 > docker-compose.override.yml
It copies `verify-gpu` and `draft-gpu` of docker-compose.yml, which are the first of each, and gives every copy its GPU;
with --tls what docker-compose.tls.yml adds to them, too. Needs PyYAML.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

try:
    import yaml
except ModuleNotFoundError:
    sys.exit("gpus.py: needs PyYAML: pip install pyyaml")

COMPOSE = Path(__file__).parents[1] / "docker-compose.yml"
TLS = COMPOSE.with_name("docker-compose.tls.yml")


def main() -> int:
    """Returns 0; complains about a GPU that cannot be, or that is named twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", required=True, metavar="GPU", help="GPUs of verify services.")
    parser.add_argument("--drafters", type=int, nargs="+", required=True, metavar="GPU", help="GPUs of drafters.")
    parser.add_argument("--tls", action="store_true", help="For use with docker-compose.tls.yml.")
    args = parser.parse_args()
    if min(*args.targets, *args.drafters) < 0:
        parser.error("GPUs are numbered from 0")
    if len({*args.targets, *args.drafters}) < len(args.targets) + len(args.drafters):
        parser.error("a GPU is named twice: the two kinds would take time and memory from one another")
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    if args.tls:
        add(services, yaml.safe_load(TLS.read_text(encoding="utf-8"))["services"])
    made = {**replicas(services, "verify-gpu", args.targets), **replicas(services, "draft-gpu", args.drafters)}
    print("# Made by deploy/gpus.py " + " ".join(sys.argv[1:]))
    print(json.dumps({"services": made}, indent=2))  # which is YAML
    return 0


def add(services: dict[str, Any], more: dict[str, Any]) -> None:
    """Joins two files' services as compose does, as far as docker-compose.tls.yml needs it."""
    for name, service in more.items():
        for key, value in service.items():
            known = services[name].get(key)
            if isinstance(known, list) and key == "volumes":
                value = [*known, *value]
            elif isinstance(known, dict):
                value = {**known, **value}
            services[name][key] = value


def replicas(services: dict[str, Any], name: str, gpus: list[int]) -> dict[str, Any]:
    """The first replica's GPU, and copies with one each for the others.

    Compose joins lists of two files, so the first one's GPU stays where docker-compose.yml reads it from, a variable.
    """
    variable = {"verify-gpu": "OUTRIDER_TARGET_GPU", "draft-gpu": "OUTRIDER_DRAFT_GPU"}[name]
    default = {"verify-gpu": 0, "draft-gpu": 1}[name]
    if gpus[0] != default:
        print(f"set {variable}={gpus[0]} (in .env): the first replica is in docker-compose.yml", file=sys.stderr)
    made: dict[str, Any] = {}
    for gpu in gpus[1:]:
        service = copy.deepcopy(services[name])
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] = [str(gpu)]
        made[f"{name}-{gpu}"] = service
    return made


if __name__ == "__main__":
    sys.exit(main())
