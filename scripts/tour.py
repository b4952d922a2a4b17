"""The end of the tour: what the layers of a bundle can choose from, and its answer beside ONNX Runtime's.

python scripts/tour.py MODEL.onnx BUNDLE.mvb
"""

from __future__ import annotations

import sys

import numpy as np
import onnx

from mvcompile import runtime
from mvcompile.bundle.schema import Task, Variant
from mvcompile.frontend.reference import integer_limits, random_inputs, reference_outputs


def trade(variant: Variant, fastest: Variant) -> str:
    """What a variant gives and takes, as factors of the fastest one's objectives."""
    if variant.objectives is None or fastest.objectives is None:
        return "not measured"
    slower = variant.objectives.latency_s / fastest.objectives.latency_s
    traffic = variant.objectives.traffic_bytes / max(fastest.objectives.traffic_bytes, 1.0)
    footprint = (variant.objectives.footprint_bytes - fastest.objectives.footprint_bytes) / 1024
    return f"latency x{slower:.2f}, traffic x{traffic:.2f}, footprint {footprint:+.0f} KiB"


def show_choices(tasks: tuple[Task, ...], calls: list[int]) -> None:
    """One paragraph per task that kept more than one variant, heaviest first."""
    chosen = [(task, count) for task, count in zip(tasks, calls, strict=True) if len(task.variants) > 1]
    print(f"{len(chosen)} of {len(tasks)} tasks have a real choice; the others have one schedule that nothing else beats.\n")
    for task, count in sorted(chosen, key=lambda each: -each[0].time_share):
        measured = f"{task.measured} measured, front of {len(task.front)}"
        print(f"{task.name}: {task.time_share:.1%} of the time in {count} layer(s); {measured}")
        for number, variant in enumerate(task.variants):
            print(f"    variant {number}: {trade(variant, task.variants[0])}")


def main(model: str, bundle: str) -> int:
    """Prints the tables; exit code 1 when the answers differ."""
    with runtime.load(bundle) as session:
        manifest = session.manifest
        calls = [sum(step.task == index for step in manifest.plan.steps) for index in range(len(manifest.tasks))]
        show_choices(manifest.tasks, calls)
        inputs = random_inputs(session.inputs, 7, integer_limits(onnx.load(model)))
        reference = reference_outputs(model, inputs)
        last = {layer: len(variants) - 1 for layer, variants in session.variants.items()}
        good = True
        for label, selection in (("fastest variants", 0), ("kindest variants", last)):
            session.select_all(selection)
            for name, found in session.run(inputs).items():
                expected = reference[name]
                best = np.argsort(-expected.reshape(-1))[:3]
                close = np.allclose(found, expected, rtol=1e-3, atol=1e-5)
                good = good and close
                print(f"\n{label}, output {name}: largest difference to ONNX Runtime {np.abs(found - expected).max():.2e}")
                for index in best:
                    print(
                        f"    element {index:4d}: {found.reshape(-1)[index]:.6f}   ONNX Runtime {expected.reshape(-1)[index]:.6f}"
                    )
        print("\nThe answers agree." if good else "\nThe answers DIFFER.")
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
