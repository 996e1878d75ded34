"""`paceline replay`: repeat one step from the bundle that a run saved when it was not finite."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.commands.common import add_json, add_use, print_json, print_notes
from paceline.core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a folder runs/NAME/replay/step-…")
    parser.add_argument("--rank", type=int, default=0, help="the rank to repeat (default: 0)")
    add_use(parser)
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Repeat the forward and backward passes of the step; print the result of each."""
    folder: Path = options.bundle
    if not (folder / "recipe.json").is_file():
        raise UsageError(f"{folder} is not a replay bundle: it has no recipe.json")
    from paceline.recipe.user_modules import read_checked

    checked = read_checked(str(folder / "recipe.json"), (), options.use, is_run=True)
    print_notes(checked.notes)

    from paceline.engine.replay import explain_nonfinite, read_model, read_step
    from paceline.engine.step import forward, start_losses
    from paceline.recipe.build import Builder

    run = Builder(checked).run(folder)
    run.state.model.load_state_dict(read_model(folder))
    run.precision.sync_weights()
    run.freezing.apply(read_step(folder, options.rank).step)
    run.freezing.train_mode(run.model)
    step_batch = read_step(folder, options.rank)
    accumulator, losses = start_losses(run, step_batch), []
    for micro in step_batch.micro_batches:
        terms = forward(run, micro)
        run.precision.backward(accumulator.to_backward(terms, micro))
        losses.append({name: term.numerator.item() / float(term.denominator) for name, term in terms.items()})
    norm = float(run.clip(run.strategy.local(run.optimized)))
    answer = {
        "step": step_batch.step + 1,
        "losses": losses,
        "grad_norm": norm,
        "finding": explain_nonfinite(run, step_batch),
    }
    if options.json:
        print_json(answer)
        return 0
    for number, found in enumerate(losses):
        print(f"micro-batch {number}: " + ", ".join(f"{name} {value:g}" for name, value in found.items()))
    print(f"gradient norm {norm:g}")
    print(answer["finding"])
    return 0
