"""Programs that compute what a task computes by another algorithm, from a weight in another form.

A task has one program of its own, which its direct kernels schedule. A search space may be one of another algorithm: its traces
schedule the program that `Programs.program` returns for the space's name, whose kernels take `Programs.arguments`. The further
form of a weight is made from the weight when the model is built (`transform`), and travels beside it.
"""

from mvcompile.algorithms.programs import ALGORITHMS, Algorithm, Programs, transform

__all__ = ["ALGORITHMS", "Algorithm", "Programs", "transform"]
