"""`publish`: publish a model on the Hub, with its card and its code."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from vanilla_transformer.errors import UserError
from vanilla_transformer.files import MANIFEST
from vanilla_transformer.training.options import option
from vanilla_transformer.training.records.leases import reading


@dataclass(kw_only=True)
class PublishOptions:
    """Options of `publish`."""

    folder: Path = option(..., "Folder of a run, a checkpoint or another model.", positional=True)
    repo: str = option(..., "Repository, user/name or organisation/name; made if it does not exist.")
    private: bool = option(False, "Make the repository private; one that exists must be.")
    revision: str | None = option(None, "Branch to publish on; made if it does not exist. Default: main.")
    tag: str | None = option(None, "Tag for the commit, such as v1.0.")
    facts: Path | None = option(
        None, "JSON file of facts for the card that the run does not know; default: facts.json in FOLDER, if there."
    )
    evaluations: tuple[Path, ...] = option(
        (), "Scores for the card, files of `evaluate --output`; default: evaluation.json in FOLDER, if there."
    )
    license: str | None = option(None, "Licence of the model as the Hub names it, such as apache-2.0.")
    message: str = option("Publish the model", "First line of the commit's message.")
    dry_run: bool = option(False, "Print the files and the card, and publish nothing.")


OPTIONS = PublishOptions


def run(options: PublishOptions) -> int:
    """Publish, and print the address of the commit."""
    if not options.folder.is_dir():
        raise UserError(f"{options.folder} is not a folder; give the folder of a run, a checkpoint or another model.")
    if not options.message.strip():
        raise UserError("--message is empty; a commit needs a message.")
    from .session import start

    start()
    folder = options.folder
    try:
        # A run that goes on must not delete its checkpoint meanwhile.
        with reading(folder) if (folder / MANIFEST).exists() else nullcontext():
            return _publish(options)
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename or folder} was deleted while {folder} was being published; give a folder that stays."
        ) from error


def _publish(options: PublishOptions) -> int:
    from vanilla_transformer.loading import check_whole, read_json
    from vanilla_transformer.publishing.bundle import (
        check_model_folder,
        check_private,
        make_bundle,
        told_facts,
    )
    from vanilla_transformer.publishing.upload import Destination, Hub, secrets

    destination = Destination(repo=options.repo, private=options.private, revision=options.revision, tag=options.tag)
    check_model_folder(options.folder)
    told = told_facts(options.folder) if options.facts is None else read_json(options.facts)
    if options.license is not None:
        told["license"] = options.license
    hub = None if options.dry_run else Hub()
    check_whole(options.folder)
    bundle = make_bundle(
        options.folder,
        options.repo,
        # A tag stays what the card tells to load, whatever the branch becomes.
        revision=options.tag or options.revision,
        told=told,
        evaluations=options.evaluations,
    )
    if hub is None:
        check_private(bundle, secrets(None, options.folder))
        for name, size in bundle.sizes().items():
            print(f"{size:>14,}  {name}")
        print(f"\n{bundle.card}", end="")
        return 0
    hub.prepare(destination)
    print(hub.upload(bundle, destination, options.message))
    return 0
