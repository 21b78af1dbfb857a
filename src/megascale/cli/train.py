"""`megascale train`: train a model from a configuration file."""

from __future__ import annotations

import typer

from megascale.cli.common import OVERRIDES


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(context_settings=OVERRIDES)
    def train(
        context: typer.Context,
        file: str = typer.Argument(
            None, metavar="FILE", help="Configuration, such as examples/stdlib.toml.", show_default=False
        ),
        dry_run: bool = typer.Option(False, "--dry-run", help="Print what would run and stop."),
    ) -> None:
        """Train a model; called again, go on from the newest checkpoint.

        Any setting can be given as --section.key=value, with or without a file; `megascale config` explains them.
        Everything the run leaves is in
        runs/NAME: config.toml, metrics.jsonl, events.jsonl, checkpoints/, plots/. Ctrl-C finishes the step, saves
        and stops; the same command goes on. Works under torchrun as well.

        Examples:

          megascale train examples/stdlib.toml

          megascale train examples/stdlib.toml --train.steps=2000 --lr.peak=1e-3 --train.name=longer

          megascale train examples/stdlib.toml --dry-run

          megascale train --model.preset=gpt2-124m --data.train=datasets/mine/train --train.precision=bf16
        """
        from megascale.config import load_command_line, with_precision

        config = load_command_line(file, context.args)
        from megascale import api
        from megascale.cli import summary
        from megascale.core.layout import lay_out
        from megascale.data.dataset.presence import check_data
        from megascale.errors import MegascaleError
        from megascale.train import launcher

        if dry_run:
            world = launcher.processes_wanted(config, api.visible_gpus(config))
            summary.print_description(api.describe(config), world)
            try:
                check_data(api.resolve(config))
                launcher.check_host_fits(api.describe(config).config, world, keeps=True)
            except MegascaleError as error:
                typer.echo(f"# would be refused here: {error}")
            return
        if not launcher.started_by_launcher():
            world = launcher.processes_wanted(config, api.visible_gpus(config))
            if world > 1:
                config = with_precision(api.resolve(config), api.visible_gpus(config) > 0)
                lay_out(config, world)  # what does not divide is said once, before any process starts
                check_data(config)
                words = ["train", *([file] if file else []), *context.args]
                raise typer.Exit(launcher.launch(words, world, config, saves_checkpoints=True))
        summary.print_start(api.describe(config))
        result = api.train(config)
        summary.print_end(config, result)
