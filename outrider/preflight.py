"""What is looked at before a model is loaded, or `outrider serve` starts anything: mistakes that are told late else."""

from __future__ import annotations

from pathlib import Path

from outrider import descriptors, env
from outrider.api_keys import KeyFile
from outrider.args import ServeArgs, VerifyArgs
from outrider.args.links import ServingArgs
from outrider.auth import token_file
from outrider.embedded import embedded_folder
from outrider.errors import StartupError
from outrider.model_name import may_be_hub_id
from outrider.tls import server_files


def check_before_start(args: ServeArgs) -> None:
    """StartupError for a file or folder that flags name, or the embedded model's, that cannot be used or made."""
    for flag, name in (
        ("--model-path", args.model_path), ("--speculative-draft-model-path", args.speculative_draft_model_path),
    ):  # fmt: skip
        path = Path(name or ".").expanduser()
        if name and not may_be_hub_id(name) and not path.exists():
            raise StartupError(f"{flag} is {name!r}; there is no such folder, and it is no hub id")
        if path.is_file():
            raise StartupError(f"{flag} is {name!r}, a file; a Hugging Face folder is needed")
    for flag, name, needed in (
        ("--model-path", args.model_path, "config.json"), ("--tokenizer-path", args.tokenizer_path, "tokenizer.json"),
    ):  # fmt: skip
        folder = Path(name or ".").expanduser()
        if name and (folder.is_dir() or needed == "tokenizer.json") and not (folder / needed).is_file():
            raise StartupError(f"{flag} is {name!r}; there is no {needed} in it")
    if args.model_path is None:
        embedded_folder()
    check_before_load(args)
    if args.api_key_file is not None:
        KeyFile(args.api_key_file)


def check_before_load(args: ServingArgs) -> None:
    """StartupError for certificates, token files, variables of the environment or a limit of open files that cannot be
    served with."""
    descriptors.check()
    env.check()
    files = server_files(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
    if files is not None:
        files.read()
    token_file(args.token_file, "--token-file")
    if isinstance(args, VerifyArgs):
        token_file(args.admin_token_file, "--admin-token-file")
