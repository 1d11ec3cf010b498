"""Precision under a budget: labelled samples choose the fastest plan that is as good as asked."""

from tessella.compiler.budget.by_task import TaskScore
from tessella.compiler.budget.chart import svg
from tessella.compiler.budget.costs import Built, Costs
from tessella.compiler.budget.front import Front, Point
from tessella.compiler.budget.judging import Labelled, Metric, Predict, of_tensors, top1
from tessella.compiler.budget.mixes import offered
from tessella.compiler.budget.search import search

__all__ = [
    "Built", "Costs", "Front", "Labelled", "Metric", "Point", "Predict", "TaskScore", "of_tensors",
    "offered", "search", "svg", "top1",
]  # fmt: skip
